"""The storage topology: which ranks see the same ``checkpoints/``, and which one acts for it.

Not configured but probed: hosts may share a file system or have one each, and several hosts may
have one name (containers). Each rank creates a mark and looks whose marks it sees:

    leave_mark(checkpoints, rank)     -- barrier --
    seen = marks_seen(checkpoints, range(world))     -- all-gather of seen --
    leader = storage_leaders(seen)[rank]     -- barrier --
    remove_mark(checkpoints, rank)

Tried by ``python -m pytest -m deepspeed tests/integration/test_resume.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.commit import MARK
from llmx.checkpoint.disk import DISK, Disk, make_directories, remove_tree
from llmx.collectives import all_gather


def leave_mark(checkpoints: Path, rank: int, *, token: str, disk: Disk = DISK) -> None:
    """``token``: the same on all ranks, new at each start: marks that a crash left do not count."""
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


@dataclass(frozen=True)
class StorageTopology:
    """This rank among those that see the same directory."""

    directory: Path
    """``checkpoints/``."""
    rank: int
    leaders: tuple[int, ...]
    """For each rank of the run, the one that acts for its storage."""

    @property
    def storage(self) -> int:
        """The rank that acts for this storage: its name among the storages."""
        return self.leaders[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once on each storage."""
        return self.rank == self.storage

    @property
    def members(self) -> list[int]:
        """The ranks on this storage, ascending."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.storage]


def find_topology(directory: Path, *, create: bool, group: Any) -> StorageTopology:
    """Probe which ranks share ``directory``. Collective over ``group``.

    ``create``: create it where it is missing; otherwise, if no rank has it, nothing is probed.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not create and not any(all_gather(directory.is_dir(), group=group)):
        return StorageTopology(directory=directory, rank=rank, leaders=(0,) * world)
    token = all_gather(secrets.token_hex(4), group=group)[0]
    leave_mark(directory, rank, token=token)
    torch.distributed.barrier(group=group)
    try:
        seen = all_gather(marks_seen(directory, range(world), token=token), group=group)
    finally:
        # Only after every rank has looked: the all-gather was the barrier.
        remove_mark(directory, rank, token=token)
    return StorageTopology(directory=directory, rank=rank, leaders=tuple(storage_leaders(seen)))
