"""The learning rate as a pure function of the step.

No state to save and none to restore: a resumed run computes the rate of its next step.
Shown by ``python -m pytest tests/unit/test_train_schedule.py``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from llmx.config import AdapterConfig, OptimConfig, TaskConfig
from llmx.errors import ConfigError
from llmx.text import plural


@dataclass(frozen=True)
class RunLength:
    """The optimizer steps of a run, and the samples that they train."""

    steps: int
    samples: int
    """Samples of all steps together, a sample counted in each epoch anew."""
    global_batch: int

    def samples_at(self, step: int) -> int:
        """Samples of the first ``step`` steps."""
        return min(step * self.global_batch, self.samples)

    @property
    def stop(self) -> int | None:
        """The end of the samples, where the last step has fewer than the others."""
        return self.samples if self.samples < self.steps * self.global_batch else None


def run_length(
    task: TaskConfig, *, num_samples: int, global_batch: int, last_batch: str = "wrap"
) -> RunLength:
    """``task.steps``, else what covers ``task.epochs``; there, ``last_batch``
    (``data.last_batch``) decides on a last step that is not filled.

    Raises ConfigError where neither is set, or where ``drop`` leaves no step.
    """
    if task.steps is not None:
        return RunLength(task.steps, task.steps * global_batch, global_batch)
    if task.epochs is None:
        raise ConfigError(
            "task.steps and task.epochs are both null: the length of the run is unknown. "
            "Set one of them, e.g. task.epochs=3."
        )
    total = task.epochs * num_samples
    if last_batch == "short":
        # Rounded first: 0.07 epochs of 100 samples are 7, not 7.000000000000001.
        samples = max(1, math.ceil(round(total, 6)))
        return RunLength(math.ceil(samples / global_batch), samples, global_batch)
    steps = max(1, math.ceil(total / global_batch))
    if last_batch == "drop":
        steps = math.floor(total / global_batch)
        if steps < 1:
            raise ConfigError(
                f"data.last_batch=drop: {plural(task.epochs, 'epoch')} of "
                f"{plural(num_samples, 'sample')} do not fill one batch of {global_batch:,}, so no "
                "step is left. Use data.last_batch=short, more epochs or a smaller batch."
            )
    return RunLength(steps, steps * global_batch, global_batch)


def warmup_steps(optim: OptimConfig, *, total: int) -> int:
    """Steps of linear warm-up; 0 starts at the full rate."""
    if optim.warmup_steps is not None:
        return min(optim.warmup_steps, total)
    return math.ceil((optim.warmup_fraction or 0.0) * total)


def optim_of(optim: OptimConfig, adapter: AdapterConfig) -> OptimConfig:
    """``optim`` with the peak learning rate that applies: an adapter may have its own."""
    if adapter.kind == "none" or adapter.lr is None:
        return optim
    return dataclasses.replace(optim, lr=adapter.lr)


def lr_at(step: int, *, optim: OptimConfig, total: int) -> float:
    """The learning rate of the update number ``step`` (0 is the first one).

    Rises linearly over the warm-up (the first update already has ``lr / warmup``), then follows
    ``optim.schedule`` from ``lr`` to ``lr * min_lr_ratio``, which it reaches at
    ``decay_end_fraction * total`` updates and keeps. ``one_cycle`` is PyTorch's ``OneCycleLR``:
    both halves are cosines, and the last update before that end has the floor.
    """
    warmup = warmup_steps(optim, total=total)
    decay_end = max(warmup + 1, round(optim.decay_end_fraction * total))
    if optim.schedule == "one_cycle":
        return optim.lr * _one_cycle(step, optim=optim, warmup=warmup, end=decay_end)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    begin = warmup
    if optim.schedule == "wsd":
        begin = max(warmup, decay_end - max(1, round(optim.decay_fraction * total)))
        if step < begin:
            return optim.lr
    progress = min(1.0, (step - begin) / (decay_end - begin))
    remaining = _remaining(progress, optim)
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)


def _remaining(progress: float, optim: OptimConfig) -> float:
    """1 at the start of the decay (``progress`` 0), 0 at its end."""
    shape = optim.decay_shape if optim.schedule == "wsd" else optim.schedule
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(progress)
    if shape == "polynomial":
        return float((1.0 - progress) ** optim.decay_power)
    if shape == "cosine_restarts":
        if progress >= 1.0:
            return 0.0
        return 0.5 * (1.0 + math.cos(math.pi * (optim.cycles * progress % 1.0)))
    return 1.0 - progress


def _one_cycle(step: int, *, optim: OptimConfig, warmup: int, end: int) -> float:
    def between(start: float, stop: float, progress: float) -> float:
        return stop + 0.5 * (start - stop) * (1.0 + math.cos(math.pi * min(1.0, progress)))

    if step < warmup:
        return between(optim.start_lr_ratio, 1.0, step / (warmup - 1) if warmup > 1 else 1.0)
    return between(1.0, optim.min_lr_ratio, (step + 1 - warmup) / (end - warmup))
