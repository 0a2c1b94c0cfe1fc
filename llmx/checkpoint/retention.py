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
    steps: Iterable[int], config: CheckpointConfig, *, metrics: Mapping[int, float | None]
) -> list[int]:
    """Steps that no rule of ``config.keep`` keeps, oldest first.

    Args:
        steps: the usable checkpoints; others are not counted and not removed.
        metrics: step -> value, where there is one.
    """
    keep, ordered = config.keep, sorted(set(steps))
    retained = set(ordered[-max(keep.last, 1) :])
    retained |= set(best_steps(ordered, metrics, mode=config.mode)[: keep.best])
    if keep.every:
        retained |= {step for step in ordered if step % keep.every == 0}
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
    """Look at the checkpoints of one storage; nothing is hashed. ``metric``: the name of the value
    that ranks them."""
    reports, values = {}, {}
    for step in list_steps(checkpoints):
        reports[step] = inspect(checkpoints, step, storage=storage, hashes=False)
        with contextlib.suppress(OSError, ValueError):
            saved = read_json(commit.committed_dir(checkpoints, step) / STATE).get("metric") or {}
            if saved.get("name") == metric:
                values[step] = saved["value"]
    return Inventory(reports, values, frozenset(pointers.pinned(checkpoints)))


def plan_removals(
    storages: Sequence[Inventory],
    step: int,
    *,
    damaged: Collection[int],
    config: CheckpointConfig,
) -> tuple[list[int], int | None]:
    """The steps to remove once ``step`` is committed, the same on every storage; and the best step.

    Args:
        step: later ones are of an abandoned branch: the run was rolled back.
        damaged: neither counted nor removed.
    """
    metrics = {at: value for storage in storages for at, value in storage.metrics.items()}
    reports = [storage.reports for storage in storages]
    there = {each_step for storage in reports for each_step in storage} - set(damaged)
    later = {each_step for each_step in there if each_step > step}
    complete = {
        each_step
        for each_step in there - later
        if assess([storage[each_step] for storage in reports if each_step in storage]).usable
    }
    # Incomplete ones are not counted among the complete, and are removed when they are older.
    removals = {
        *to_prune(complete, config, metrics=metrics),
        *(set(to_prune(there - later, config, metrics=metrics)) - complete),
    }
    # An abandoned branch is removed even where it is pinned: its steps must not count as newest.
    removals -= {at for storage in storages for at in storage.pinned}
    ranked = best_steps(complete, metrics, mode=config.mode)
    return sorted(removals | later), ranked[0] if ranked else None


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
    storages = [inventory for inventory in inventories if inventory is not None]
    pointers.set_pointer(checkpoints, pointers.LATEST, step)
    removals, best = plan_removals(storages, step, damaged=damaged, config=config)
    if config.keep.best and best is not None:
        pointers.set_pointer(checkpoints, pointers.BEST, best)
    commit.prune(checkpoints, removals)
