"""Metrics of classifiers and of regression, exact over ranks: F1, ROC AUC, a confusion matrix.

Equal to scikit-learn's: ``python -m pytest tests/unit/test_tasks_class_metrics.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmx.tasks.base import Accumulator, Table

MOST_CLASSES_SHOWN = 50
"""Of more classes no confusion matrix is shown."""


def f1(right: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """F1 of each class, [classes]; 0 for one that is neither there nor predicted.

    Args:
        right, predicted, actual: how often a class was rightly predicted, predicted, and there.
    """
    total = predicted + actual
    scores = np.zeros(len(total))
    np.divide(2.0 * right, total, out=scores, where=total > 0)
    return scores


def roc_auc(positive: np.ndarray, scores: np.ndarray) -> float | None:
    """Area under the ROC curve: how often a positive has a higher score than a negative, ties
    half. None where there are not both. Args: bool [n], float [n]."""
    count = int(positive.sum())
    negatives = len(positive) - count
    if not count or not negatives:
        return None
    _, inverse, repeated = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(repeated)
    ranks = (last - (repeated - 1) / 2.0)[inverse]
    below = float(ranks[positive].sum()) - count * (count + 1) / 2.0
    return below / (count * negatives)


@dataclass
class Classes(Accumulator):
    """Of one label an example: accuracy, macro F1, AUC (one against the rest), confusion matrix."""

    names: tuple[str, ...]
    _scores: list[np.ndarray] = field(default_factory=list)
    _labels: list[np.ndarray] = field(default_factory=list)

    def add(self, probabilities: np.ndarray, labels: np.ndarray) -> None:
        """Args: float32 [n, classes], int64 [n]."""
        self._scores.append(probabilities)
        self._labels.append(labels)

    def merge(self, other: Classes) -> None:
        self._scores += other._scores
        self._labels += other._labels

    def _gathered(self) -> tuple[np.ndarray, np.ndarray]:
        empty = np.zeros((0, len(self.names)), np.float32)
        return (
            np.concatenate([empty, *self._scores]),
            np.concatenate([np.zeros(0, np.int64), *self._labels]),
        )

    def confusion(self) -> np.ndarray:
        """int64 [actual, predicted]."""
        scores, labels = self._gathered()
        count = len(self.names)
        counts = np.bincount(labels * count + scores.argmax(axis=1), minlength=count * count)
        return counts.reshape(count, count)

    def values(self) -> dict[str, float | None]:
        scores, labels = self._gathered()
        if not len(labels):
            return {"accuracy": None, "macro_f1": None, "auc": None}
        table = self.confusion()
        predicted, actual = table.sum(axis=0), table.sum(axis=1)
        there = predicted + actual > 0
        by_class = f1(np.diag(table), predicted, actual)
        columns = [1] if len(self.names) == 2 else range(len(self.names))
        areas = [roc_auc(labels == label, scores[:, label]) for label in columns]
        return {
            "accuracy": float(np.diag(table).sum()) / len(labels),
            "macro_f1": float(by_class[there].mean()),
            "auc": mean_of(areas),
        }

    def tables(self) -> list[Table]:
        if len(self.names) > MOST_CLASSES_SHOWN:
            return []
        values = tuple(tuple(map(float, row)) for row in self.confusion().tolist())
        return [Table("Confusion matrix: actual by predicted", self.names, self.names, values)]


@dataclass
class Labels(Accumulator):
    """Of any number of labels an example: subset accuracy, micro and macro F1, macro AUC."""

    names: tuple[str, ...]
    threshold: float
    _scores: list[np.ndarray] = field(default_factory=list)
    _labels: list[np.ndarray] = field(default_factory=list)

    def add(self, probabilities: np.ndarray, labels: np.ndarray) -> None:
        """Args: float32 [n, labels], bool [n, labels]."""
        self._scores.append(probabilities)
        self._labels.append(labels)

    def merge(self, other: Labels) -> None:
        self._scores += other._scores
        self._labels += other._labels

    def values(self) -> dict[str, float | None]:
        empty = np.zeros((0, len(self.names)))
        scores = np.concatenate([empty, *self._scores])
        actual = np.concatenate([empty.astype(bool), *self._labels])
        if not len(actual):
            return dict.fromkeys(("accuracy", "micro_f1", "macro_f1", "auc"))
        predicted = scores >= self.threshold
        counts = [(predicted & actual).sum(0), predicted.sum(0), actual.sum(0)]
        together = f1(*(np.array([by_label.sum()]) for by_label in counts))
        return {
            "accuracy": float((predicted == actual).all(axis=1).mean()),
            "micro_f1": float(together[0]),
            "macro_f1": float(f1(*counts).mean()),
            "auc": mean_of([roc_auc(actual[:, n], scores[:, n]) for n in range(len(self.names))]),
        }


@dataclass
class Numbers(Accumulator):
    """Of a number an example: mean absolute error, R² and Pearson's correlation."""

    _predicted: list[np.ndarray] = field(default_factory=list)
    _actual: list[np.ndarray] = field(default_factory=list)

    def add(self, predicted: np.ndarray, actual: np.ndarray) -> None:
        """Args: float [n] each."""
        self._predicted.append(predicted.astype(np.float64))
        self._actual.append(actual.astype(np.float64))

    def merge(self, other: Numbers) -> None:
        self._predicted += other._predicted
        self._actual += other._actual

    def values(self) -> dict[str, float | None]:
        predicted, actual = (
            np.concatenate([np.zeros(0), *parts]) for parts in (self._predicted, self._actual)
        )
        if not len(actual):
            return dict.fromkeys(("mae", "r2", "pearson"))
        spread, predicted_spread = actual - actual.mean(), predicted - predicted.mean()
        total, length = (
            float((spread**2).sum()),
            float(np.sqrt((spread**2).sum() * (predicted_spread**2).sum())),
        )
        return {
            "mae": float(np.abs(predicted - actual).mean()),
            "r2": 1 - float(((actual - predicted) ** 2).sum()) / total if total else None,
            "pearson": float((spread * predicted_spread).sum()) / length if length else None,
        }


def mean_of(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
