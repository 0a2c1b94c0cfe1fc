"""What a dead session may leave: a directory and control groups. Processes and networks end by
themselves, because each host's process 1 lives on a pipe from the session.

``sweep()`` runs whenever a cluster is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "llmx-cluster-"
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
CORE_GROUPS = Path("/sys/fs/cgroup/cpuset")
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
_OWNER = "owner.json"


def sign(directory: Path) -> None:
    """Say in the directory which process owns it."""
    owner = {"pid": os.getpid(), "started": _start_of(os.getpid())}
    (directory / _OWNER).write_text(json.dumps(owner))


def sweep() -> list[Path]:
    """Remove the directories and control groups of sessions that are dead; return them."""
    removed = []
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            owner = json.loads((directory / _OWNER).read_text())
        except (OSError, ValueError):  # just being made, or not ours
            continue
        if _start_of(owner["pid"]) != owner["started"]:
            remove_cgroups(directory)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed


def remove_cgroups(directory: Path) -> None:
    """Remove the control groups of the cluster in ``directory``."""
    for groups in (CPU_GROUPS, CORE_GROUPS, MEMORY_GROUPS):
        for group in groups.glob(f"{directory.name}-*"):
            with contextlib.suppress(OSError):  # a process is still ending: the next sweep has it
                group.rmdir()


def _start_of(pid: int) -> str | None:
    """When the process started, in clock ticks: a pid that is used again has another."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
