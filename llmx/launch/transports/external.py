"""Processes that another program started (torchrun, Kubernetes, ...) become the ranks. This one is
rank 0's: it supervises, with rank 0 as its child. The run directory must be on a file system that
all of them share: nothing else is known of the other machines, and they are not reached by ssh."""

from __future__ import annotations

from collections.abc import Iterator

from llmx.config.schema import HardwareConfig, LaunchConfig
from llmx.errors import LaunchError
from llmx.hardware.external import STARTED
from llmx.launch.environment import rank_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import Transport

_OF_EACH = ("PATH", "MASTER_ADDR", "MASTER_PORT")
"""Variables that every process has already."""


class ExternalTransport(Transport):
    """The worker of rank 0, once the others have been released."""

    name = "external"
    has_agents = False
    allocates = True
    restarts = False

    def problems(self, launch: LaunchConfig, hardware: HardwareConfig) -> Iterator[str]:
        yield from super().problems(launch, hardware)
        if launch.sync == "rsync":
            yield (
                "launch.sync=rsync with launch=external: nothing is copied to machines that are "
                "not reached by ssh. Leave it out, and use a shared file system."
            )
        if launch.detach:
            yield (
                "launch.detach=true with launch=external: the process of rank 0 supervises, and "
                "the program that started it waits for it. Leave it out."
            )

    def fixed_port(self, spec: LaunchSpec) -> int | None:
        return int(spec.environ["MASTER_PORT"])

    def release(self, spec: LaunchSpec) -> None:
        if not STARTED:
            raise LaunchError(
                "launch=external: no other program started this process. Start it with one, e.g. "
                "torchrun --nproc-per-node 8 -m llmx ... launch=external."
            )
        added = {
            name: value
            for name, value in rank_env(spec).items()
            if name not in _OF_EACH and spec.environ.get(name) != value
        }
        STARTED[0].release(str(spec.run_dir.root), added)

    def argv(self, spec: LaunchSpec) -> list[str]:
        return [spec.python, "-m", spec.worker, str(spec.run_dir.root)]

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        return {
            name: value
            for name, value in spec.environ.items()
            if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
            or name.startswith("TORCHELASTIC_")
        }
