"""What the new run is: the snapshot with what may be changed, in a directory of its own."""

from __future__ import annotations

import dataclasses
import time
from fnmatch import fnmatchcase
from pathlib import Path

from llmx.compose.apply_overrides import RunCommand, apply
from llmx.compose.effects import check_effects
from llmx.config import Experiment, to_dict
from llmx.errors import ConfigError
from llmx.hardware.resolve import resolve_hardware
from llmx.lifecycle.resume.changed import with_same_batch
from llmx.lifecycle.resume.rules import Change, changes
from llmx.plan.types import Plan

ALLOWED = (
    "hardware.*", "launch.*", "tracking.*", "checkpoint.*", "name", "batch.micro_batch",
    "batch.accumulation", "data.path", "data.eval_path", "data.cache_dir", "data.num_workers",
    "model.path", "model.tokenizer", "task.save_model", "task.code_path",
    "dry_run",
)  # fmt: skip
"""Where and how it runs, and where its inputs lie; their content is compared."""


def next_experiment(
    exp: Experiment, plan: Plan, words: RunCommand, *, target: Path, to_step: int | None
) -> tuple[Experiment, list[Change]]:
    """The experiment of the reproduction, and every change; ConfigError for what may not be."""
    exp = dataclasses.replace(exp, dry_run=False)
    asked = apply(exp, words.overrides, config_dirs=words.config_dirs)
    check_effects(asked, words.overrides, command="reproduce")
    found = changes(to_dict(exp), to_dict(asked))
    refused = [
        f"{change.key}: {change.values}"
        for change in found
        if not any(fnmatchcase(change.key, pattern) for pattern in ALLOWED)
    ]
    if refused:
        raise ConfigError(
            "reproduce repeats a run, so these cannot change:\n  " + "\n  ".join(refused) + "\nMay "
            f"change: {', '.join(ALLOWED)}. For another run, start a new one."
        )
    keys = {change.key for change in found}
    new = dataclasses.replace(asked, run_dir=str(target), dry_run=False, name=asked.name)
    if any(key.startswith("hardware.") for key in keys):
        new = dataclasses.replace(new, hardware=resolve_hardware(new.hardware))
    new = with_same_batch(new, keys, plan)
    if to_step is not None:
        task = dataclasses.replace(new.task, stop_at_step=to_step)
        new = dataclasses.replace(new, task=task)
    return new, changes(to_dict(exp), to_dict(new))


def fresh_sibling(root: Path) -> Path:
    """A directory beside ``root`` that does not exist yet."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    target, number = root.parent / f"{root.name}_reproduced_{stamp}", 1
    while target.exists():
        number += 1
        target = root.parent / f"{root.name}_reproduced_{stamp}_{number}"
    return target
