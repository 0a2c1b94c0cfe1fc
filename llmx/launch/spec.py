"""``LaunchSpec``: the frozen input of everything that is rendered for a launch.

Rendering reads nothing else, so the same spec always gives the same files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import llmx
from llmx.config.addresses import bare
from llmx.config.by_host import host_named, path_on
from llmx.config.schema import Experiment, HostConfig
from llmx.launch.agents.agent import tag_of
from llmx.plan.types import Plan
from llmx.rollout.protocol import ServerAddress
from llmx.run.rundir import RunDir


@dataclass(frozen=True)
class LaunchSpec:
    """One launch of a run."""

    exp: Experiment
    plan: Plan
    run_dir: RunDir
    port: int
    """MASTER_PORT: of the rendezvous, on the host of rank 0."""
    token: str
    """A secret of this run, in the environment of each of its processes, on every host."""
    python: str = sys.executable
    """The interpreter on the hosts, and of ``deepspeed``, which starts the ranks with its own."""
    code_root: str | None = None
    """The directory that holds the ``llmx`` package; None where it is installed."""
    worker: str = "llmx.worker"
    """The module that a rank runs."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment of the supervisor; rendering copies allow-listed names from it."""
    cores: int | None = None
    """CPU cores of each host, where they are known here: of this machine in a local run, of the
    smallest host under Slurm. None: each rank looks at its host."""
    cpus_per_task: int | None = None
    """Under Slurm: cores of a rank; None where the cores of the hosts are unknown."""
    visible_gpus: Mapping[str, str] = field(default_factory=dict)
    """Host -> CUDA_VISIBLE_DEVICES there, as its agent found it; without those that lack it."""
    interfaces: tuple[str | None, ...] = ()
    """Network interface of each host, where it is known."""
    rollout_servers: tuple[ServerAddress, ...] = ()
    """Where the servers of ``rollout.hosts`` listen, once their hosts have been asked."""

    def host(self, index: int) -> HostConfig:
        """The config of a host of the plan."""
        return host_named(self.exp.hardware, self.plan.hosts[index].name)

    def index_of(self, name: str) -> int:
        """The index of a host of the plan."""
        return next(i for i, host in enumerate(self.plan.hosts) if host.name == name)

    def python_on(self, index: int) -> str:
        """The Python of the ranks of a host."""
        return self.host(index).python or self.python

    def path_on(self, index: int, path: str | Path) -> str:
        """The path on a host of what is at ``path`` here."""
        return path_on(self.exp.hardware, self.host(index), str(path))

    def rendezvous(self, host: int | None) -> tuple[str, int]:
        """Address and port at which the ranks of a host meet (None: those of most hosts)."""
        if self.exp.hardware.reach is None or len(self.plan.hosts) == 1:
            return self.plan.master_addr, self.port
        if host == 0:
            return "127.0.0.1", self.port  # NAT may not lead back to the host that it is for
        address, _, port = self.exp.hardware.reach.rpartition(":")
        return bare(address), int(port)

    @property
    def job_name(self) -> str:
        """The name of the Slurm job; unique to this run."""
        return f"llmx-{self.tag}"

    @property
    def tag(self) -> str:
        """The name of this run where every user can read it, made from the token."""
        return tag_of(self.token)

    @property
    def worker_path(self) -> str:
        """The file of the worker, for a launcher that cannot start a module."""
        relative = Path(*self.worker.split(".")).with_suffix(".py")
        root = self.code_root or str(Path(llmx.__file__).parent.parent)
        return str(Path(root) / relative)


def code_root() -> str | None:
    """The directory that holds the ``llmx`` package, or None where pip installed it."""
    root = Path(os.path.abspath(llmx.__file__)).parent.parent
    installed = {"site-packages", "dist-packages"} & set(root.parts)
    return None if installed else str(root)
