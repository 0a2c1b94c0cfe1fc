"""Which ranks see the same ``checkpoints/``: found by trying (``llmx.checkpoint.storage``).

Hosts may share a file system or have one each, and hosts of one name may be several (containers).
Tried by ``python -m pytest -m deepspeed tests/integration/test_resume.py``.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.storage import leave_mark, marks_seen, remove_mark, storage_leaders


@dataclass(frozen=True)
class Place:
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

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see one directory."""
        return len(set(self.leaders)) == 1


def exchange(value: Any, *, group: Any = None) -> list[Any]:
    """What every rank says, by rank. Collective."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value, group=group)
    return everyone


def find_place(directory: Path, *, create: bool, group: Any) -> Place:
    """Look who shares ``directory``. Collective over ``group``.

    ``create``: make it where it is not; otherwise, if nobody has one, nothing is tried.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not create and not any(exchange(directory.is_dir(), group=group)):
        return Place(directory=directory, rank=rank, leaders=(0,) * world)
    token = exchange(secrets.token_hex(4), group=group)[0]
    leave_mark(directory, rank, token=token)
    torch.distributed.barrier(group=group)
    try:
        seen = exchange(marks_seen(directory, range(world), token=token), group=group)
    finally:
        # Only after everybody has looked: the exchange was the barrier.
        remove_mark(directory, rank, token=token)
    return Place(directory=directory, rank=rank, leaders=tuple(storage_leaders(seen)))
