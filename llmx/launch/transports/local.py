"""Starts all ranks on this machine, without ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator

from llmx.config.schema import Experiment, HardwareConfig, LaunchConfig
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport, deepspeed_argv, module_argv
from llmx.launch.transports.ssh import SshTransport
from llmx.plan.types import Plan


class LocalTransport(SshTransport):
    """The agent of this machine starts them; ``command.txt`` has the ``deepspeed`` command, whose
    two launchers each import torch first."""

    name = "local"
    programs = ()
    is_remote = False
    has_agents = False

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

    def commands(self, spec: LaunchSpec) -> str:
        return Transport.commands(self, spec)
