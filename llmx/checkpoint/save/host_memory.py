"""How much memory a host still has.

Tried by ``python -m pytest tests/unit/test_train_saver.py``.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llmx.checkpoint.distributed.topology import exchange

RESERVE = 0.2
"""Part of the free memory that a copy of the state never takes."""


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: of the host, and of its control groups (which is
    what a container or a job is killed by)."""
    free = [_meminfo(root / "proc/meminfo")]
    for group, files in _control_groups(root):
        limit = _number(group / files.limit)
        if limit is not None:
            # Pages of files are given up before anything is killed.
            cached = _stat(group / "memory.stat", files.cached)
            free.append(limit - (_number(group / files.used) or 0) + cached)
    return max(0, min(free))


def fits(num_bytes: int, *, group: Any = None) -> bool:
    """Whether every host has room for a copy of so many bytes from each rank that says so.

    The same answer on every rank. Collective.
    """
    host = Path("/proc/sys/kernel/random/boot_id")
    name = (socket.gethostname(), host.read_text() if host.exists() else "")
    everyone = exchange((name, num_bytes, available_bytes()), group=group)
    return all(room_for(everyone, host) for host in {entry[0] for entry in everyone})


def room_for(everyone: Sequence[tuple[Any, int, int]], host: Any) -> bool:
    """``everyone``: (host, bytes to copy, bytes available) of each rank."""
    wanted = sum(entry[1] for entry in everyone if entry[0] == host)
    available = min(entry[2] for entry in everyone if entry[0] == host)
    return wanted <= (1 - RESERVE) * available


@dataclass(frozen=True)
class _Files:
    """How a control group says what it may use."""

    limit: str
    used: str
    cached: str
    """A line of its ``memory.stat``."""


_SECOND = _Files("memory.max", "memory.current", "inactive_file")
_FIRST = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""By version of the kernel's interface."""


def _control_groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's own and those above it, each with its limit: a job of Slurm or a service is
    in a group far below the root. In a container the names may be those of the host, and only
    the root is there."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        first = "memory" in controllers.split(",")
        if first or not controllers:
            base, files = (mounted / "memory", _FIRST) if first else (mounted, _SECOND)
            own = PurePosixPath(name.lstrip("/"))
            for group in (own, *own.parents):
                yield base / group, files


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
