"""Starts all ranks on this machine, without ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator

from llmx.config.schema import Experiment, HardwareConfig, LaunchConfig
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport, deepspeed_argv, module_argv
from llmx.plan.types import Plan


class LocalTransport(Transport):
    """``deepspeed`` with a hostfile of one line, for which it needs no launcher."""

    name = "local"
    is_remote = False
    has_agents = False
    ends_by_itself = False

    def problems(self, launch: LaunchConfig, hardware: HardwareConfig) -> Iterator[str]:
        yield from super().problems(launch, hardware)
        if len(hardware.hosts) > 1:
            yield (
                f"launch.transport=local starts the ranks of this machine only, but there are "
                f"{len(hardware.hosts)} hosts. Use launch.transport=ssh, pdsh, openmpi or slurm."
            )

    def cores(self, exp: Experiment, plan: Plan) -> tuple[int | None, int | None]:
        return len(os.sched_getaffinity(0)), None

    def argv(self, spec: LaunchSpec) -> list[str]:
        return deepspeed_argv(spec, module_argv(spec))
