"""Early stopping: whether a metric has not improved for so many evaluations.

A pure function of the ``eval`` lines of ``metrics.jsonl``: there is no state to save, and a resumed
run decides as an uninterrupted one would. Tried by
``python -m pytest tests/unit/test_train_early_stopping.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmx.config import CheckpointConfig, EarlyStoppingConfig
from llmx.run.metrics.declared import Metric, check_checkpoint_metric, is_number


@dataclass(frozen=True)
class EarlyStop:
    """Why training stops."""

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
        wanted: EarlyStoppingConfig,
        checkpoint: CheckpointConfig,
        metrics: Mapping[str, Metric],
        *,
        task: str,
    ) -> EarlyStopping | None:
        """None where it is off.

        Raises:
            ConfigError: the task does not measure the metric, or does not say what is better.
        """
        if wanted.patience is None:
            return None
        name = wanted.metric or checkpoint.metric
        mode = checkpoint.mode if name == checkpoint.metric else "auto"
        better = check_checkpoint_metric(
            name, mode, metrics, task=task, key="task.early_stopping.metric"
        )
        return cls(name, better == "max", wanted.patience, wanted.min_delta)

    @property
    def name(self) -> str:
        """Of the metric in an ``eval`` line."""
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
