"""Metrics that are no means: equal to scikit-learn's, however the examples lie on ranks."""

from __future__ import annotations

import numpy as np
import pytest

from llmx.tasks.class_metrics import Accumulator, Classes, Labels, Numbers, roc_auc

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
RNG = np.random.default_rng(4)
COUNT = 200


def on_ranks(one: Accumulator, *arrays: np.ndarray) -> Accumulator:
    """Of five micro batches on three ranks, one of which has nothing."""
    ranks = [one, *(type(one)(**_options(one)) for _ in range(2))]
    for number, part in enumerate(np.array_split(np.arange(COUNT), 5)):
        ranks[number % 2].add(*(array[part] for array in arrays))
    for other in ranks[1:]:
        one.merge(other)
    return one


def _options(one: Accumulator) -> dict[str, object]:
    return {key: value for key, value in vars(one).items() if not key.startswith("_")}


@pytest.mark.parametrize("classes", [2, 4])
def test_of_one_label(classes: int) -> None:
    labels = RNG.integers(0, classes, COUNT)
    scores = RNG.random((COUNT, classes)).round(2) + 0.5 * np.eye(classes)[labels]
    scores = (scores / scores.sum(1, keepdims=True)).astype(np.float32)
    found = on_ranks(Classes(tuple("abcd"[:classes])), scores, labels)
    values = found.values()
    predicted = scores.argmax(1)
    assert values["accuracy"] == pytest.approx(sklearn.accuracy_score(labels, predicted))
    macro = sklearn.f1_score(labels, predicted, average="macro")
    assert values["macro_f1"] == pytest.approx(macro)
    # One against the rest, of the same numbers: its multi_class="ovr" wants rows that sum to 1 in
    # float64, where what is equal in float32 may no longer be.
    each = [1] if classes == 2 else range(classes)
    area = np.mean([sklearn.roc_auc_score(labels == kind, scores[:, kind]) for kind in each])
    assert values["auc"] == pytest.approx(area, abs=1e-6)
    (table,) = found.tables()
    # The order of the ranks is not that of the rows: the counts are the same.
    assert np.array_equal(table.values, sklearn.confusion_matrix(labels, predicted))
    assert table.rows == table.columns == tuple("abcd"[:classes])


def test_a_class_that_is_not_there() -> None:
    """As in scikit-learn, a class that is neither there nor predicted does not count."""
    labels, scores = np.array([0, 0, 1]), np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0, 1, 0]])
    one = Classes(("a", "b", "never"))
    one.add(scores.astype(np.float32), labels)
    wanted = sklearn.f1_score(labels, scores.argmax(1), average="macro")
    assert one.values()["macro_f1"] == pytest.approx(wanted)
    assert one.values()["auc"] == pytest.approx(roc_auc(labels == 1, scores[:, 1]))
    only = Classes(("a", "b"))
    only.add(np.array([[0.9, 0.1]], np.float32), np.array([0]))
    assert only.values() == {"accuracy": 1.0, "macro_f1": 1.0, "auc": None}
    assert Classes(("a", "b")).values() == {"accuracy": None, "macro_f1": None, "auc": None}
    assert Classes(tuple(map(str, range(60)))).tables() == []


def test_ties_count_half() -> None:
    labels = RNG.integers(0, 2, COUNT).astype(bool)
    scores = RNG.integers(0, 4, COUNT).astype(float)
    assert roc_auc(labels, scores) == pytest.approx(sklearn.roc_auc_score(labels, scores))
    assert roc_auc(np.ones(3, bool), np.zeros(3)) is None


def test_of_several_labels() -> None:
    labels = RNG.random((COUNT, 3)) < 0.3
    scores = (RNG.random((COUNT, 3)) * 0.6 + 0.4 * labels).astype(np.float32)
    values = on_ranks(Labels(("a", "b", "c"), 0.5), scores, labels).values()
    predicted = scores >= 0.5
    assert values["accuracy"] == pytest.approx(sklearn.accuracy_score(labels, predicted))
    for average in ("micro", "macro"):
        wanted = sklearn.f1_score(labels, predicted, average=average)
        assert values[f"{average}_f1"] == pytest.approx(wanted)
    assert values["auc"] == pytest.approx(sklearn.roc_auc_score(labels, scores))
    assert set(Labels(("a",), 0.5).values().values()) == {None}


def test_of_numbers() -> None:
    wanted = RNG.normal(size=COUNT)
    found = wanted + RNG.normal(size=COUNT)
    values = on_ranks(Numbers(), found, wanted).values()
    assert values["mae"] == pytest.approx(sklearn.mean_absolute_error(wanted, found))
    assert values["r2"] == pytest.approx(sklearn.r2_score(wanted, found))
    assert values["pearson"] == pytest.approx(np.corrcoef(wanted, found)[0, 1])
    constant = Numbers()
    constant.add(np.ones(3), np.ones(3))
    assert constant.values() == {"mae": 0.0, "r2": None, "pearson": None}
