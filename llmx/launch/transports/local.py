"""All ranks on this machine, without ssh."""

from __future__ import annotations

from collections.abc import Iterable

from llmx.errors import LaunchError
from llmx.launch.render.hostfile import HostSlots
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports.base import (
    Transport,
    chosen_devices,
    deepspeed_argv,
    include_argv,
    module_argv,
    slots_for,
)


class LocalTransport(Transport):
    """``deepspeed`` with a hostfile of one line, for which it needs no launcher."""

    name = "local"
    has_agents = False
    ends_by_itself = False

    def argv(self, spec: LaunchSpec) -> list[str]:
        return deepspeed_argv(spec, [*include_argv(_devices(spec)), *module_argv(spec)])

    def hostfile(self, spec: LaunchSpec) -> Iterable[HostSlots]:
        devices = _devices(spec)
        return slots_for(devices) if devices else super().hostfile(spec)


def _devices(spec: LaunchSpec) -> dict[str, list[int]]:
    devices = visible_devices(spec)
    return {spec.plan.hosts[0].name: devices} if devices else {}


def visible_devices(spec: LaunchSpec) -> list[int] | None:
    """The GPUs of this run by CUDA_VISIBLE_DEVICES and by the indices of the host (among those that
    the variable leaves), or None where neither is set.

    Given a hostfile, DeepSpeed overwrites the variable with 0..slots-1, and two users of a machine
    would run on the same GPUs; so they are passed to it with ``--include``.
    """
    value = spec.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    host = spec.plan.hosts[0]
    chosen = chosen_devices(spec).get(host.name)
    if not value or spec.plan.accelerator != "cuda":
        return chosen
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() for part in parts):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value}: DeepSpeed's launcher takes indices only. Write them as "
            "numbers, e.g. CUDA_VISIBLE_DEVICES=2,3 (`nvidia-smi -L` lists them)."
        )
    if chosen and max(chosen) >= len(parts):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value}: {len(parts)} GPUs, and device_indices={chosen} of "
            f"{host.name} is one of them, from 0 on. Use indices below {len(parts)}."
        )
    if len(parts) < host.slots:
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value}: {len(parts)} GPUs for {host.slots} slots. List "
            f"{host.slots}, or set hardware.slots={len(parts)}."
        )
    return [int(parts[index]) for index in chosen or range(host.slots)]
