"""After a commit: the pointers, then what is no longer kept goes, alike on every storage."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.checkpoint import commit, pointers
from llmx.checkpoint.holdings import Part, holdings, removals
from llmx.checkpoint.manifest import STATE
from llmx.config import CheckpointConfig
from llmx.run.rundir import read_json


@dataclass(frozen=True)
class Found:
    """What one storage holds."""

    parts: Mapping[int, Part | None]
    metrics: Mapping[int, float | None]
    """Step -> the value that the checkpoint was saved with, where it has one."""
    pinned: frozenset[int]
    """Steps that are being copied elsewhere."""


def look_around(checkpoints: Path, *, metric: str) -> Found:
    """Names and small files only: nothing is hashed."""
    parts = holdings(checkpoints)
    pins = frozenset(pointers.pinned(checkpoints))
    return Found(parts, metrics_of(checkpoints, parts, name=metric), pins)


def tidy(
    checkpoints: Path,
    found: Sequence[Found | None],
    step: int,
    *,
    damaged: Collection[int],
    config: CheckpointConfig,
) -> None:
    """Set ``latest`` and ``best`` and remove the rest, on this storage.

    Args:
        found: by rank, of those that lead a storage.
        step: the one that was committed just now.
    """
    keep, storages = config.keep, [each for each in found if each is not None]
    pointers.set_pointer(checkpoints, pointers.LATEST, step)
    gone, best = removals(
        [storage.parts for storage in storages],
        step=step,
        damaged=damaged,
        last=keep.last,
        best=keep.best,
        every=keep.every,
        metrics={at: value for storage in storages for at, value in storage.metrics.items()},
        mode=config.mode,
    )
    if keep.best and best is not None:
        pointers.set_pointer(checkpoints, pointers.BEST, best)
    # A past that was given up goes even where it is pinned: it must not be taken for the newest.
    pins = {at for storage in storages for at in storage.pinned if at <= step}
    commit.prune(checkpoints, [at for at in gone if at not in pins])


def metrics_of(checkpoints: Path, steps: Iterable[int], *, name: str) -> dict[int, float | None]:
    """Step -> the value of ``name`` that each checkpoint was saved with, where it has one."""
    values: dict[int, float | None] = {}
    for step in steps:
        with contextlib.suppress(OSError, ValueError):
            path = commit.committed_dir(checkpoints, step) / STATE
            metric = read_json(path).get("metric") or {}
            if metric.get("name") == name:
                values[step] = metric["value"]
    return values
