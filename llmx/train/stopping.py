"""Why training stops before its last step: it diverges, or a metric no longer improves.

Divergence is a loss or a gradient that is not finite, or a loss that jumps. The step is known
exactly, without waiting for the device at each one: the device itself keeps the smallest step at
which something was not finite, and it is read where the loop waits for the device already.

Early stopping is a pure function of the ``eval`` lines of ``metrics.jsonl``: there is no state to
save, and a resumed run decides as an uninterrupted one would.

Tried by ``python -m pytest tests/unit/test_train_stopping.py``.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmx.config import CheckpointConfig, EarlyStoppingConfig
from llmx.errors import ConfigError
from llmx.run.metrics.declared import Metric, check_checkpoint_metric, is_number

NEVER = 2**52
"""Larger than any step, and exact in fp64."""
SPIKE_WINDOW = 50
SPIKE_LEAST = 5
"""A median of fewer losses is not reliable."""


class Diverged(FloatingPointError):
    """Training has diverged: the weights are not usable. ``step`` is counted from 1."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class NonFiniteLoss(Diverged):
    """The loss or the gradient is NaN or infinite."""


class LossSpike(Diverged):
    """The loss is far above the recent losses."""


class NonFiniteWatch:
    """The first steps at which this rank's loss, and the gradient, were not finite."""

    def __init__(self, device: torch.device, *, gradients: bool) -> None:
        self._first = torch.full((2,), NEVER, dtype=torch.int64, device=device)
        self._gradients = gradients
        """False in fp16, where a gradient that overflows is part of seeking the scale."""

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor | float | None) -> None:
        """Record a step, counted from 1. Nothing here waits for the device."""
        pair = torch.zeros(2, dtype=torch.float32, device=self._first.device)
        pair[0] = loss
        if self._gradients and norm is not None:
            pair[1].fill_(norm)  # an assignment would copy a number from the host, and wait
        now = torch.where(torch.isfinite(pair), NEVER, step)
        torch.minimum(self._first, now, out=self._first)

    def first(self) -> list[float]:
        """``[step of the loss, step of the gradient]`` on this rank. Waits for the device."""
        return [float(step) for step in self._first.tolist()]

    def check(self, *, lr: float) -> None:
        """Raise NonFiniteLoss on every rank alike if any rank has seen one. Collective."""
        first = self._first.clone()
        torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MIN)
        raise_if_not_finite(*first.tolist(), lr=lr)


def raise_if_not_finite(loss_step: float, gradient_step: float, *, lr: float) -> None:
    """Raise NonFiniteLoss that names the earlier step; ``NEVER`` is no step."""
    step = int(min(loss_step, gradient_step))
    if step >= NEVER:
        return
    if loss_step <= gradient_step:
        raise NonFiniteLoss(
            f"The loss of step {step} is not finite: the weights have grown too large, or a "
            f"sample of that step is at fault. Lower optim.lr (now {lr:g}), or set precision=bf16 "
            "or fp32 if this is fp16.",
            step=step,
        )
    # DeepSpeed skips such an update and continues, and the next one fails in the same way.
    raise NonFiniteLoss(
        f"The gradient of step {step} is not finite, though its loss is: the weights have grown "
        f"too large. Lower optim.lr (now {lr:g}).",
        step=step,
    )


class SpikeWatch:
    """Compares each logged loss with the median of those before it. The same on every rank."""

    def __init__(self, factor: float | None, *, losses: Iterable[float] = ()) -> None:
        self._factor = factor
        self._losses = deque(losses, maxlen=SPIKE_WINDOW)

    def check(self, step: int, loss: float) -> None:
        """Raise LossSpike, or remember the loss."""
        if self._factor is not None and len(self._losses) >= SPIKE_LEAST:
            median = statistics.median(self._losses)
            if loss > self._factor * median:
                raise LossSpike(
                    f"The loss of step {step} is {loss:.4g}, over task.spike_factor="
                    f"{self._factor:g} times the median {median:.4g} of the last "
                    f"{len(self._losses)} logged ones. Lower optim.lr or look at that step's data; "
                    "task.on_divergence=skip skips such steps.",
                    step=step,
                )
        self._losses.append(loss)


@dataclass(frozen=True)
class EarlyStop:
    """Why training stops early: the metric that no longer improves."""

    metric: str
    """``eval/loss``."""
    best: float | None
    """None where it was never a number."""
    best_step: int
    evaluations: int
    """Without an improvement, in a row."""

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.metric} was not a finite number in {self.evaluations} evaluations"
        return (
            f"{self.metric} has not improved in {self.evaluations} evaluations; the best was "
            f"{self.best:.6g} at step {self.best_step}"
        )


@dataclass(frozen=True)
class EarlyStopping:
    """The rule of a run (``task.early_stopping``)."""

    metric: str
    """``eval/NAME``."""
    more_is_better: bool
    patience: int
    min_delta: float

    @classmethod
    def of(
        cls,
        config: EarlyStoppingConfig,
        checkpoint: CheckpointConfig,
        metrics: Mapping[str, Metric],
        *,
        task: str,
        evaluates_loss: bool = True,
    ) -> EarlyStopping | None:
        """The rule of these settings; None where it is off.

        Raises:
            ConfigError: the task does not measure the metric, or does not say what is better.
        """
        if config.patience is None:
            return None
        name = config.metric or checkpoint.metric
        mode = checkpoint.mode if name == checkpoint.metric else "auto"
        key = "task.early_stopping.metric"
        if name.startswith("train/"):  # an own task is judged by what no evaluation measures
            raise ConfigError(
                f"task.early_stopping.patience={config.patience} looks at {name}, which no "
                f"evaluation measures. Set {key}=eval/NAME of a metric of the task."
            )
        better = check_checkpoint_metric(
            name, mode, metrics, task=task, key=key, evaluates_loss=evaluates_loss
        )
        return cls(name, better == "max", config.patience, config.min_delta)

    @property
    def name(self) -> str:
        """The key of the metric in an ``eval`` line."""
        return self.metric.partition("/")[2]

    def decide(self, lines: Iterable[Mapping[str, Any]]) -> EarlyStop | None:
        """Why training stops after these lines; None where it goes on.

        A value that is not finite (null) is no improvement; an evaluation that does not measure the
        metric at all does not count.
        """
        best: float | None = None
        best_step = waited = 0
        for line in lines:
            if line.get("kind") != "eval" or self.name not in line:
                continue
            value = line[self.name]
            if value is None and not line.get("nonfinite"):
                continue
            if is_number(value) and self._improves(float(value), best):
                best, best_step, waited = float(value), int(line["step"]), 0
            else:
                waited += 1
        if waited < self.patience:
            return None
        return EarlyStop(self.metric, best, best_step, waited)

    def _improves(self, value: float, best: float | None) -> bool:
        if best is None:
            return True
        gain = value - best if self.more_is_better else best - value
        return gain > self.min_delta
