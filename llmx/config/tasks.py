"""The tasks of llmx by name, found without importing them (they import torch).

A task is a file ``llmx/tasks/NAME.py`` whose first line says ``task=NAME`` and what is learned;
nothing lists them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "tasks"
DEFAULT = "sft"


@functools.cache
def shipped_tasks() -> tuple[str, ...]:
    """The values of ``task.kind`` beside a class of the user's own; the default first."""
    names = [path.stem for path in DIRECTORY.glob("*.py") if _is_task(path)]
    return (DEFAULT, *sorted(set(names) - {DEFAULT}))


def _is_task(path: Path) -> bool:
    with path.open(encoding="utf-8") as stream:
        return re.match(rf'"""``task={re.escape(path.stem)}``:', stream.readline()) is not None


@dataclass(frozen=True)
class TaskDefaults:
    """The defaults of a task: learning rates for AdamW, and samples of a step."""

    full: float = 2e-5
    """Pretrained weights, all of them trained."""
    adapter: float = 2e-4
    scratch: float = 3e-4
    batch: int = 32
    """Samples of a step, where weights are pretrained."""
    scratch_batch: int | None = None
    """The same from scratch; None: one micro step of all ranks."""
