"""Metrics of classifiers and of regression, exact over ranks: F1, ROC AUC, a confusion matrix.

Equal to scikit-learn's: ``python -m pytest tests/unit/test_tasks_classify.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmx.tasks.base import Gathered, Table

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
class Classes(Gathered):
    """Metrics of one label per example: accuracy, macro F1, AUC (one against the rest), confusion
    matrix. Of probabilities float32 [n, classes] and labels int64 [n]."""

    names: tuple[str, ...]

    def confusion(self) -> np.ndarray:
        """The number of examples by class: int64 [actual, predicted]."""
        count = len(self.names)
        counts = np.zeros(count * count, np.int64)
        for scores, labels in self._parts:
            pairs = labels * count + scores.argmax(axis=1)
            counts += np.bincount(pairs, minlength=count * count)
        return counts.reshape(count, count)

    def values(self) -> dict[str, float | None]:
        if not self._parts:
            return {"accuracy": None, "macro_f1": None, "auc": None}
        scores, labels = self.arrays()
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
class Labels(Gathered):
    """Metrics of any number of labels per example: subset accuracy, micro and macro F1, macro AUC.
    Of probabilities float32 [n, labels] and labels bool [n, labels]."""

    names: tuple[str, ...]
    threshold: float

    def values(self) -> dict[str, float | None]:
        if not self._parts:
            return dict.fromkeys(("accuracy", "micro_f1", "macro_f1", "auc"))
        scores, actual = self.arrays()
        predicted = scores.astype(np.float64) >= self.threshold
        counts = [(predicted & actual).sum(0), predicted.sum(0), actual.sum(0)]
        together = f1(*(np.array([by_label.sum()]) for by_label in counts))
        return {
            "accuracy": float((predicted == actual).all(axis=1).mean()),
            "micro_f1": float(together[0]),
            "macro_f1": float(f1(*counts).mean()),
            "auc": mean_of([roc_auc(actual[:, n], scores[:, n]) for n in range(len(self.names))]),
        }


@dataclass
class Numbers(Gathered):
    """Metrics of a number per example: mean absolute error, R² and Pearson's correlation. Of
    predictions and labels, float [n]."""

    def values(self) -> dict[str, float | None]:
        if not self._parts:
            return dict.fromkeys(("mae", "r2", "pearson"))
        predicted, actual = (numbers.astype(np.float64) for numbers in self.arrays())
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
