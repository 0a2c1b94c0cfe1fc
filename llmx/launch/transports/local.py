"""All ranks on this machine, without ssh."""

from __future__ import annotations

from collections.abc import Iterable

from llmx.errors import LaunchError
from llmx.launch.render.hostfile import HostSlots
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports.base import Transport, deepspeed_argv, module_argv


class LocalTransport(Transport):
    """``deepspeed`` with a hostfile of one line, for which it needs no launcher."""

    name = "local"
    has_agents = False

    def argv(self, spec: LaunchSpec) -> list[str]:
        devices = visible_devices(spec)
        chosen = ",".join(map(str, devices or ()))
        include = [f"--include={spec.plan.hosts[0].name}:{chosen}"] if chosen else []
        return deepspeed_argv(spec, [*include, *module_argv(spec)])

    def hostfile(self, spec: LaunchSpec) -> Iterable[HostSlots]:
        """With ``--include``, DeepSpeed needs slots up to the highest index."""
        devices = visible_devices(spec)
        if devices is None:
            return super().hostfile(spec)
        return [HostSlots(spec.plan.hosts[0].name, max(devices) + 1)]


def visible_devices(spec: LaunchSpec) -> list[int] | None:
    """The GPUs of this run by CUDA_VISIBLE_DEVICES, or None where it is not set.

    Given a hostfile, DeepSpeed overwrites the variable with 0..slots-1, and two users of a machine
    would run on the same GPUs; so they are passed to it with ``--include``.
    """
    value = spec.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not value or spec.plan.accelerator != "cuda":
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() for part in parts):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value}: DeepSpeed's launcher takes indices only. Write them as "
            "numbers, e.g. CUDA_VISIBLE_DEVICES=2,3 (`nvidia-smi -L` lists them)."
        )
    slots = spec.plan.hosts[0].slots
    if len(parts) < slots:
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value}: {len(parts)} GPUs for {slots} slots. List {slots}, or "
            f"set hardware.slots={len(parts)}."
        )
    return [int(part) for part in parts[:slots]]
