"""The retention policy: which checkpoints stay, and how the others are removed after a commit.

``to_prune`` is the policy of ``checkpoint.keep``. Over several storages a crash while old
checkpoints were removed may leave files of one on some hosts; these must not count as a
complete one, so each storage makes an ``Inventory`` of names and sizes, the ranks gather them,
and ``apply_retention`` does the same everywhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.checkpoint import commit, pointers
from llmx.checkpoint.manifest import STATE
from llmx.checkpoint.selection import Report, assess, inspect, list_steps
from llmx.config import CheckpointConfig
from llmx.run.rundir import read_json


def to_prune(
    steps: Iterable[int],
    *,
    last: int,
    best: int = 0,
    every: int = 0,
    metrics: Mapping[int, float | None] | None = None,
    mode: str = "min",
) -> list[int]:
    """Steps that none of the three rules keeps, oldest first.

    Args:
        steps: the usable checkpoints; others are not counted and not removed.
        last: the newest so many stay, at least 1.
        best: so many with the best value of ``metrics`` stay.
        every: multiples of it stay; 0 is none.
        metrics: step -> value, where there is one.
        mode: ``min`` or ``max`` is best.
    """
    ordered = sorted(set(steps))
    retained = set(ordered[-max(last, 1) :])
    retained |= set(best_steps(ordered, metrics or {}, mode=mode)[:best])
    if every > 0:
        retained |= {step for step in ordered if step % every == 0}
    return [step for step in ordered if step not in retained]


def best_steps(
    steps: Iterable[int], metrics: Mapping[int, float | None], *, mode: str = "min"
) -> list[int]:
    """The steps with a finite value, best first; of equals the older first.

    A checkpoint has the newest value that was measured before it, so of those between two
    evaluations the first one is what was evaluated.
    """
    values = {}
    for step in steps:
        value = metrics.get(step)
        if value is not None and math.isfinite(value):
            values[step] = -value if mode == "max" else value
    return sorted(values, key=lambda step: (values[step], step))


def plan_removals(
    storages: Sequence[Mapping[int, Report]],
    *,
    step: int,
    damaged: Collection[int],
    last: int,
    best: int,
    every: int,
    metrics: Mapping[int, float | None],
    mode: str,
) -> tuple[list[int], int | None]:
    """The steps to remove once ``step`` is committed, the same on every storage; and the best step.

    Args:
        step: later ones are of an abandoned branch: the run was rolled back.
        damaged: neither counted nor removed.
        last, best, every, metrics, mode: see ``to_prune``.
    """

    def outside_policy(steps: Collection[int]) -> set[int]:
        return set(to_prune(steps, last=last, best=best, every=every, metrics=metrics, mode=mode))

    there = {other for storage in storages for other in storage} - set(damaged)
    later = {other for other in there if other > step}
    complete = {
        other
        for other in there - later
        if assess([storage[other] for storage in storages if other in storage]).usable
    }
    removals = later | outside_policy(complete)
    # Incomplete ones are not counted among the complete, and are removed when they are older.
    removals |= outside_policy(there - later) - complete
    ranked = best_steps(complete, metrics, mode=mode)
    return sorted(removals), ranked[0] if ranked else None


@dataclass(frozen=True)
class Inventory:
    """The checkpoints on one storage, by their names, sizes and small files."""

    reports: Mapping[int, Report]
    """Step -> its files on this storage."""
    metrics: Mapping[int, float | None]
    """Step -> the value that the checkpoint was saved with, where it has one."""
    pinned: frozenset[int]
    """Steps that are being copied elsewhere."""


def take_inventory(checkpoints: Path, *, storage: int = 0, metric: str = "") -> Inventory:
    """Look at the checkpoints of one storage; nothing is hashed."""
    reports = {
        step: inspect(checkpoints, step, storage=storage, hashes=False)
        for step in list_steps(checkpoints)
    }
    pins = frozenset(pointers.pinned(checkpoints))
    return Inventory(reports, metrics_of(checkpoints, reports, name=metric), pins)


def apply_retention(
    checkpoints: Path,
    inventories: Sequence[Inventory | None],
    step: int,
    *,
    damaged: Collection[int],
    config: CheckpointConfig,
) -> None:
    """Set ``latest`` and ``best`` and remove the rest, on this storage.

    Args:
        inventories: by rank, of those that lead a storage.
        step: the one that was committed just now.
    """
    keep, storages = config.keep, [inventory for inventory in inventories if inventory is not None]
    pointers.set_pointer(checkpoints, pointers.LATEST, step)
    removals, best = plan_removals(
        [storage.reports for storage in storages],
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
    # An abandoned branch is removed even where it is pinned: its steps must not count as newest.
    pins = {at for storage in storages for at in storage.pinned if at <= step}
    commit.prune(checkpoints, [at for at in removals if at not in pins])


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
