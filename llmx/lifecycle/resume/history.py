"""``RUN_DIR/history/NNN/``: what a run was before it went on with something changed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from llmx.checkpoint.manifest import Manifest, read_manifest
from llmx.checkpoint.pointers import BEST, LATEST, read_pointer, set_pointer
from llmx.lifecycle.resume.rules import Change
from llmx.lifecycle.resume.run_state import committed
from llmx.run.provenance.differences import Difference
from llmx.run.rundir import RunDir, write_json


def archive_run(
    run: RunDir,
    *,
    found: Sequence[Change],
    differs: Sequence[Difference],
    words: Sequence[str],
    step: int,
) -> Path:
    """Copy the former snapshot into a new numbered directory, with ``changes.json``; returns it.

    ``step``: where the run goes on with the new values. ``differs``: what is not as it was in
    code, packages and devices.
    """
    taken = [int(path.name) for path in history(run)]
    directory = run.root / "history" / f"{max(taken, default=0) + 1:03d}"
    directory.mkdir(parents=True)
    for path in (
        run.config, run.plan, run.ds_config, run.overrides, run.provenance, run.result,
        run.resume, run.metrics,
    ):  # fmt: skip
        if path.is_file():
            shutil.copy2(path, directory / path.name)
    write_json(
        directory / "changes.json",
        {
            "time": time.time(),
            "step": step,
            "words": list(words),
            "changes": {change.key: [change.old, change.new] for change in found},
            "effects": {change.key: change.rule.effect for change in found},
            "differs": [difference.to_dict() for difference in differs],
        },
    )
    return directory


def history(run: RunDir) -> list[Path]:
    """The numbered directories, oldest first."""
    parent = run.root / "history"
    found = parent.iterdir() if parent.is_dir() else iter(())
    return sorted(path for path in found if path.name.isdigit() and path.is_dir())


def roll_back(run: RunDir, rollbacks: Sequence[int], step: int) -> list[int]:
    """``went_back`` of ``resume.json``, with a rollback to ``step`` added.

    A checkpoint that was set aside, and was brought back by hand, is no longer given up.
    """
    manifest = read_manifest(run.checkpoint(step)) if step else None
    if isinstance(manifest, Manifest) and manifest.is_abandoned(rollbacks):
        rollbacks = [max(earlier, step) for earlier in rollbacks]
    return [*rollbacks, step]


def set_aside(run: RunDir, steps: Sequence[int], directory: Path) -> None:
    """Move newer checkpoints away: the run goes on from an earlier one, and must never take up
    the abandoned branch again by itself. Moved by a rename, nothing is copied or lost."""
    for step in steps:
        target = directory / "checkpoints" / run.checkpoint(step).name
        target.parent.mkdir(parents=True, exist_ok=True)
        run.checkpoint(step).rename(target)
    left = committed(run.checkpoints)
    for name in (LATEST, BEST):
        if read_pointer(run.checkpoints, name) in steps:
            if left and name == LATEST:
                set_pointer(run.checkpoints, name, left[-1])
            else:  # which of the others is the best is known to the ranks, at their next save
                (run.checkpoints / name).unlink()
