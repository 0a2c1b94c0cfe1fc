"""Which ranks share a ``checkpoints/`` directory, and which one of them acts for it.

Not asked of the user, but tried: each rank leaves a mark and looks whose marks it sees.

    leave_mark(checkpoints, rank)     -- barrier --
    seen = marks_seen(checkpoints, range(world))     -- all exchange seen --
    leader = storage_leaders(all_seen)[rank]     -- barrier --
    remove_mark(checkpoints, rank)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from llmx.checkpoint.commit import MARK
from llmx.checkpoint.disk import DISK, Disk, make_directories, remove_tree


def leave_mark(checkpoints: Path, rank: int, *, token: str, disk: Disk = DISK) -> None:
    """``token``: the same on all ranks, new at each start: marks of a crash are not ours."""
    make_directories(disk, checkpoints)
    path = _mark(checkpoints, rank, token)
    remove_tree(disk, path)
    disk.close(disk.create(path))


def marks_seen(checkpoints: Path, ranks: Iterable[int], *, token: str) -> frozenset[int]:
    """Ranks whose mark is here. Each name is looked up: a listing may be cached by NFS."""
    return frozenset(rank for rank in ranks if _mark(checkpoints, rank, token).exists())


def remove_mark(checkpoints: Path, rank: int, *, token: str, disk: Disk = DISK) -> None:
    remove_tree(disk, _mark(checkpoints, rank, token))


def storage_leaders(seen: Sequence[frozenset[int]]) -> list[int]:
    """For each rank the lowest rank on its storage. ``seen[r]``: what rank ``r`` saw."""
    return [min(ranks | {rank}) for rank, ranks in enumerate(seen)]


def _mark(checkpoints: Path, rank: int, token: str) -> Path:
    return checkpoints / f"{MARK}{token}-{rank:05d}"
