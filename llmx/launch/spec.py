"""What one launch is made of: the frozen input of everything that is rendered.

Rendering reads nothing but a ``LaunchSpec``, so the same spec always gives the same files.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import llmx
from llmx.config.schema import Experiment
from llmx.launch.hostfile import HostSlots
from llmx.plan.types import Plan
from llmx.rundir import RunDir


@dataclass(frozen=True)
class LaunchSpec:
    """One run about to be started."""

    exp: Experiment
    plan: Plan
    run_dir: RunDir
    port: int
    """Of the rendezvous, on the host of rank 0."""
    token: str
    """Unique to this run; in the environment of each of its processes, on every host."""
    python: str = sys.executable
    """On the hosts and for ``deepspeed`` itself, which starts the ranks with its own."""
    code_root: str | None = None
    """The directory that holds the ``llmx`` package; None where it is installed."""
    worker: str = "llmx.worker"
    """The module of a rank."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment of the supervisor; rendering copies allow-listed names from it."""
    cores: int = 1
    """Of this machine."""
    interfaces: tuple[str | None, ...] = ()
    """Network interface of each host, where it is known."""

    @property
    def host_slots(self) -> tuple[HostSlots, ...]:
        return tuple(HostSlots(host.name, host.slots) for host in self.plan.hosts)

    @property
    def job_name(self) -> str:
        """Unique to this run: what Slurm knows it by."""
        return f"llmx-{self.token}"

    @property
    def worker_path(self) -> str:
        """The worker as a file, for a launcher that cannot start a module."""
        relative = Path(*self.worker.split(".")).with_suffix(".py")
        root = self.code_root or str(Path(llmx.__file__).parent.parent)
        return str(Path(root) / relative)


def make_spec(
    exp: Experiment,
    plan: Plan,
    run_dir: RunDir,
    *,
    port: int,
    token: str | None = None,
    worker: str = "llmx.worker",
    interfaces: tuple[str | None, ...] = (),
) -> LaunchSpec:
    """The spec of a launch from this machine, as it is now."""
    return LaunchSpec(
        exp=exp,
        plan=plan,
        run_dir=run_dir,
        port=port,
        token=token or new_token(),
        python=exp.launch.python or sys.executable,
        code_root=code_root(),
        worker=worker,
        environ=dict(os.environ),
        cores=len(os.sched_getaffinity(0)),
        interfaces=interfaces or tuple(host.interface for host in plan.hosts),
    )


def new_token() -> str:
    """A name that no other run has."""
    return secrets.token_hex(8)


def code_root() -> str | None:
    """The directory that holds the ``llmx`` package, or None where pip installed it."""
    root = Path(os.path.abspath(llmx.__file__)).parent.parent
    installed = {"site-packages", "dist-packages"} & set(root.parts)
    return None if installed else str(root)
