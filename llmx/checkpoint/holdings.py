"""Which steps are complete over several storages, by the names of their files: nothing is hashed.

For deciding what may go: a crash while old checkpoints were removed leaves parts of one on some
hosts, which must not stand in for a whole one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.manifest import Manifest, read_manifest
from llmx.checkpoint.retention import best_steps, to_prune
from llmx.checkpoint.selection import lies_here, list_steps


@dataclass(frozen=True)
class Part:
    """What one storage holds of one checkpoint."""

    digest: str
    """Of the manifest."""
    here: frozenset[str]
    wanted: frozenset[str]
    """All files of the manifest."""


def holdings(checkpoints: Path) -> dict[int, Part | None]:
    """Step -> what lies here of it; None where its manifest cannot be read."""
    found: dict[int, Part | None] = {}
    for step in list_steps(checkpoints):
        directory = committed_dir(checkpoints, step)
        manifest = read_manifest(directory)
        found[step] = None
        if isinstance(manifest, Manifest):
            here = frozenset(name for name in manifest.files if lies_here(directory / name))
            found[step] = Part(manifest.digest, here, frozenset(manifest.files))
    return found


def complete_steps(storages: Sequence[Mapping[int, Part | None]]) -> list[int]:
    """Steps of which every file is on one storage or another, under one manifest."""
    complete = []
    for step in sorted({step for storage in storages for step in storage}):
        parts = [part for storage in storages if (part := storage.get(step)) is not None]
        together = frozenset[str]().union(*(part.here for part in parts))
        if len({part.digest for part in parts}) == 1 and parts[0].wanted <= together:
            complete.append(step)
    return complete


def removals(
    storages: Sequence[Mapping[int, Part | None]],
    *,
    step: int,
    damaged: Collection[int],
    last: int,
    best: int,
    every: int,
    metrics: Mapping[int, float | None],
    mode: str,
) -> tuple[list[int], int | None]:
    """What goes once ``step`` is committed, the same on every storage; and the best of the rest.

    Args:
        step: later ones are of a past that was given up: the run was sent back.
        damaged: neither counted nor removed.
        last, best, every, metrics, mode: see ``llmx.checkpoint.retention``.
    """

    def out_of_keep(steps: Collection[int]) -> set[int]:
        return set(to_prune(steps, last=last, best=best, every=every, metrics=metrics, mode=mode))

    there = {each for storage in storages for each in storage} - set(damaged)
    complete = {each for each in complete_steps(storages) if each in there and each <= step}
    later = {each for each in there if each > step}
    gone = later | out_of_keep(complete)
    # Parts do not take the place of a whole one, and go when their turn comes.
    gone |= out_of_keep(there - later) - complete
    ranked = best_steps(complete, metrics, mode=mode)
    return sorted(gone), ranked[0] if ranked else None
