"""The learning rate as a pure function of the step.

No state to save and none to restore: a resumed run asks for the rate of its next step.
Shown by ``python -m pytest tests/unit/test_train_schedule.py``.
"""

from __future__ import annotations

import math

from llmx.config import OptimConfig, TaskConfig
from llmx.errors import ConfigError


def total_steps(task: TaskConfig, *, num_samples: int, global_batch: int) -> int:
    """Optimizer steps of the whole run: ``task.steps``, else enough to cover ``task.epochs``."""
    if task.steps is not None:
        return task.steps
    if task.epochs is not None:
        return max(1, math.ceil(task.epochs * num_samples / global_batch))
    raise ConfigError(
        "task.steps and task.epochs are both null: the length of the run is unknown. "
        "Set one of them, e.g. task.epochs=3."
    )


def warmup_steps(optim: OptimConfig, *, total: int) -> int:
    """Steps of linear warm-up; 0 starts at the full rate."""
    if optim.warmup_steps is not None:
        return min(optim.warmup_steps, total)
    return math.ceil((optim.warmup_fraction or 0.0) * total)


def lr_at(step: int, *, optim: OptimConfig, total: int) -> float:
    """The learning rate of the update number ``step`` (0 is the first one).

    Rises linearly over the warm-up (the first update already has ``lr / warmup``), then falls
    from ``lr`` to ``lr * min_lr_ratio``, which it reaches at ``decay_end_fraction * total``
    updates and keeps.
    """
    warmup = warmup_steps(optim, total=total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    decay_end = max(warmup + 1, round(optim.decay_end_fraction * total))
    progress = min(1.0, (step - warmup) / (decay_end - warmup))
    remaining = 1.0 - progress
    if optim.schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)
