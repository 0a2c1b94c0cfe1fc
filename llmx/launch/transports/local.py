"""All ranks on this machine, without ssh."""

from __future__ import annotations

from llmx.config.schema import Experiment
from llmx.errors import LaunchError
from llmx.launch.environment import render_ds_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports.base import deepspeed_argv, module_argv, remote_hosts
from llmx.plan.types import Plan


class LocalTransport:
    """``deepspeed`` with a one-line hostfile, which it runs without a launcher."""

    name = "local"
    programs: tuple[tuple[str, str], ...] = ()
    has_agents = False

    def problems(self, exp: Experiment, plan: Plan) -> list[str]:
        if len(plan.hosts) > 1:
            return [
                f"launch.transport=local: the hardware has {len(plan.hosts)} hosts; "
                "use launch.transport=pdsh, openmpi or slurm."
            ]
        if remote_hosts(plan):
            return [
                f'launch.transport=local: "{plan.hosts[0].name}" is another machine; '
                "use launch.transport=pdsh."
            ]
        return []

    def argv(self, spec: LaunchSpec) -> list[str]:
        return deepspeed_argv(spec, [*_include(spec), *module_argv(spec)])

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {"DS_ENV_FILE": str(spec.run_dir.ds_env)}

    def ds_env(self, spec: LaunchSpec, env: dict[str, str]) -> str:
        return render_ds_env(env, shell=True)

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        return []

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        return []  # the agents do it


def visible_devices(spec: LaunchSpec) -> list[int] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this run, or None where it is not set.

    With a hostfile DeepSpeed overwrites the variable with 0..slots-1, and two people who
    share a machine would meet on the same GPUs; so its choice is made explicit.
    """
    value = spec.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not value or spec.plan.accelerator != "cuda":
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() for part in parts):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value}: DeepSpeed's launcher takes indices only; write them "
            "as numbers, e.g. CUDA_VISIBLE_DEVICES=2,3 (`nvidia-smi -L` lists them)."
        )
    slots = spec.plan.hosts[0].slots
    if len(parts) < slots:
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value}: {len(parts)} GPUs for {slots} slots; show more of "
            f"them or plan for {len(parts)} (hardware.hosts[0].slots)."
        )
    return [int(part) for part in parts[:slots]]


def _include(spec: LaunchSpec) -> list[str]:
    devices = visible_devices(spec)
    if devices is None:
        return []
    return [f"--include={spec.plan.hosts[0].name}:{','.join(map(str, devices))}"]
