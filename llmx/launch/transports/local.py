"""All ranks on this machine, without ssh."""

from __future__ import annotations

from collections.abc import Iterable

from llmx.hardware.hostfile import HostSlots
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
        return deepspeed_argv(spec, [*include_argv(chosen_devices(spec)), *module_argv(spec)])

    def hostfile(self, spec: LaunchSpec) -> Iterable[HostSlots]:
        devices = chosen_devices(spec)
        return slots_for(devices) if devices else super().hostfile(spec)
