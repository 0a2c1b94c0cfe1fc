"""Collectives over Python objects. Every rank calls them at the same point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

host_group: Any = None
"""Group of all ranks over gloo, where the default group is NCCL's (``join_process_group``), which
would copy objects to the GPU and wait for it."""


def all_gather(value: T, *, group: Any = None) -> list[T]:
    """The value of every rank, by rank. Values are pickled; keep them small."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value, group=group or host_group)
    return everyone


def world() -> tuple[int, int]:
    """(number of ranks, own rank); of a process by itself (1, 0)."""
    if not torch.distributed.is_initialized():
        return 1, 0
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def shared(items: Sequence[T], function: Callable[[T], R]) -> list[R]:
    """The value of each item, in order. The ranks share the items, and get all values."""
    num_ranks, rank = world()
    here = [function(item) for item in items[rank::num_ranks]]
    if num_ranks == 1:
        return here
    values: list[Any] = [None] * len(items)
    for from_rank, part in enumerate(all_gather(here)):
        values[from_rank::num_ranks] = part
    return values


def first_problem(problem: str | None, *, group: Any = None) -> tuple[int, str] | None:
    """The first rank with a problem, and the problem; the same on every rank."""
    problems = enumerate(all_gather(problem, group=group))
    return next(((rank, text) for rank, text in problems if text), None)


def first_failure(act: Callable[[], object], *, group: Any = None) -> tuple[int, str] | None:
    """Call ``act`` on every rank; the first rank where it raised an OSError, and its text."""
    problem = None
    try:
        act()
    except OSError as error:
        problem = str(error)
    return first_problem(problem, group=group)
