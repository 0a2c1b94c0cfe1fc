"""Metrics of classifiers and of regression, exact over ranks: F1, ROC AUC, a confusion matrix.

Equal to scikit-learn's: ``python -m pytest tests/unit/test_tasks_classify.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmx.tasks.base import Accumulator, Table

MOST_CLASSES_SHOWN = 50
"""The most classes for which a confusion matrix is shown."""


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
class Measured(Accumulator):
    """The scores of held-out examples and their labels: arrays [n, ...] in equal order."""

    _scores: list[np.ndarray] = field(default_factory=list, init=False)
    _labels: list[np.ndarray] = field(default_factory=list, init=False)

    def add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        """Add the examples of a micro batch."""
        self._scores.append(scores)
        self._labels.append(labels)

    def merge(self, other: Measured) -> None:
        self._scores += other._scores
        self._labels += other._labels

    def _gathered(self, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All of them behind these, which are empty and have the shape and type."""
        return np.concatenate([scores, *self._scores]), np.concatenate([labels, *self._labels])


@dataclass
class Classes(Measured):
    """Metrics of one label per example: accuracy, macro F1, AUC (one against the rest), confusion
    matrix. Scores are probabilities float32 [n, classes], labels int64 [n]."""

    names: tuple[str, ...]

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self._gathered(np.zeros((0, len(self.names)), np.float32), np.zeros(0, np.int64))

    def confusion(self) -> np.ndarray:
        """The number of examples by class: int64 [actual, predicted]."""
        scores, labels = self._arrays()
        count = len(self.names)
        counts = np.bincount(labels * count + scores.argmax(axis=1), minlength=count * count)
        return counts.reshape(count, count)

    def values(self) -> dict[str, float | None]:
        scores, labels = self._arrays()
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
class Labels(Measured):
    """Metrics of any number of labels per example: subset accuracy, micro and macro F1, macro AUC.
    Scores are probabilities float32 [n, labels], labels bool [n, labels]."""

    names: tuple[str, ...]
    threshold: float

    def values(self) -> dict[str, float | None]:
        empty = np.zeros((0, len(self.names)))
        scores, actual = self._gathered(empty, empty.astype(bool))
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
class Numbers(Measured):
    """Metrics of a number per example: mean absolute error, R² and Pearson's correlation. Scores
    and labels are float [n]."""

    def values(self) -> dict[str, float | None]:
        predicted, actual = self._gathered(np.zeros(0), np.zeros(0))
        if not len(actual):
            return dict.fromkeys(("mae", "r2", "pearson"))
        spread, predicted_spread = actual - actual.mean(), predicted - predicted.mean()
        total = float((spread**2).sum())
        length = float(np.sqrt((spread**2).sum() * (predicted_spread**2).sum()))
        return {
            "mae": float(np.abs(predicted - actual).mean()),
            "r2": 1 - float(((actual - predicted) ** 2).sum()) / total if total else None,
            "pearson": float((spread * predicted_spread).sum()) / length if length else None,
        }


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None without any."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
