"""``LaunchSpec``: the frozen input of everything that is rendered for a launch.

Rendering reads nothing else, so the same spec always gives the same files.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import llmx
from llmx.config.schema import Experiment
from llmx.plan.types import Plan
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
    """Unique to this run; in the environment of each of its processes, on every host."""
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
    interfaces: tuple[str | None, ...] = ()
    """Network interface of each host, where it is known."""

    @property
    def job_name(self) -> str:
        """The name of the Slurm job; unique to this run."""
        return f"llmx-{self.token}"

    @property
    def worker_path(self) -> str:
        """The file of the worker, for a launcher that cannot start a module."""
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
) -> LaunchSpec:
    """The spec of a launch from this machine, with its current environment."""
    cores = len(os.sched_getaffinity(0)) if plan.transport == "local" else None
    cpus_per_task = None
    if plan.transport == "slurm":
        names = [host.name for host in plan.hosts]
        slots = max(host.slots for host in plan.hosts)
        cpus_per_task = exp.launch.slurm.cpus_per_task or share_of_cores(
            slurm_cores(os.environ, names), slots
        )
        cores = cpus_per_task * slots if cpus_per_task else None
    return LaunchSpec(
        exp=exp,
        plan=plan,
        run_dir=run_dir,
        port=port,
        token=token or secrets.token_hex(8),
        python=exp.launch.python or sys.executable,
        code_root=code_root(),
        worker=worker,
        environ=dict(os.environ),
        cores=cores,
        cpus_per_task=cpus_per_task,
        interfaces=tuple(host.interface for host in plan.hosts),
    )


def share_of_cores(cores: int | None, slots: int) -> int | None:
    """Cores of one rank. An even number, since Slurm allocates both threads of a core: 7 ranks with
    13 of 96 would be rounded up to 98."""
    if cores is None:
        return None
    share = max(1, cores // slots)
    return share if share == 1 else share - share % 2


def slurm_cores(environ: Mapping[str, str], hosts: list[str]) -> int | None:
    """Cores that every host has for the run: of the allocation, else as Slurm lists the hosts; None
    where unknown."""
    given = environ.get("SLURM_JOB_CPUS_PER_NODE")
    if given:  # 16(x2),8
        counts = [part.split("(")[0] for part in given.split(",")]
        return min((int(count) for count in counts if count.isdecimal()), default=None)
    if environ.get("SLURM_JOB_ID"):
        # An allocation joined by its id: it may have fewer cores than its hosts.
        return None
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%c"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(word) for word in done.stdout.split() if word.isdecimal()), default=None)


def code_root() -> str | None:
    """The directory that holds the ``llmx`` package, or None where pip installed it."""
    root = Path(os.path.abspath(llmx.__file__)).parent.parent
    installed = {"site-packages", "dist-packages"} & set(root.parts)
    return None if installed else str(root)
