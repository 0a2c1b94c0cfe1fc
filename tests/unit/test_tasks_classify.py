"""task=classify: labels from the data, losses of transformers, metrics of scikit-learn however the
examples lie on ranks, and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from llmx.cli.evaluate import load, measure
from llmx.cli.target import Target
from llmx.config import Experiment
from llmx.data import SampleStore, collate
from llmx.errors import ConfigError, DataError
from llmx.models.model import Models
from llmx.models.pooling import give_pooled_forward
from llmx.tasks import prepare, tokenizer_of
from llmx.tasks.base import Gathered
from llmx.tasks.class_metrics import Classes, Labels, Numbers, roc_auc
from llmx.tasks.classify import Classify, class_weights, multi_label_losses, single_label_losses
from tests.data_rows import (
    Row,
    assert_rejected,
    batch_of,
    experiment_on,
    prepared,
    sequences_of,
    write_rows,
)
from tests.rundirs import TINY_LLAMA
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_models_classification import model_of

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")

LABELS: dict[str, Any] = {
    "single_label": lambda n: ("good", "bad", "so")[n % 3],
    "multi_label": lambda n: [["a"], ["b", "a"], []][n % 3],
    "regression": lambda n: n / 7 - 2,
}


def rows_of(problem: str, count: int = 30) -> list[Row]:
    return [{"text": f"row {n} of {n % 7}", "label": LABELS[problem](n)} for n in range(count)]


ROWS = rows_of("single_label")


def experiment_of(
    directory: Path, rows: list[Row], options: Row | None = None, **data: Any
) -> Experiment:
    columns = {"prompt": "text", "label": "label"}
    return experiment_on(
        directory, "classify", rows, options, form="labelled", data_map=columns, **data
    )


def seen(exp: Experiment) -> tuple[Classify, SampleStore, list[str]]:
    """The task after it has seen its data, as a rank does it."""
    task, store = prepared(exp)
    held_out = prepare(exp, task.tokenizer, split="eval") if exp.data.eval_path else None
    return task, store, task.see_data(store, held_out)


def network_of(task: Classify) -> Any:
    spec = task.models()["policy"]
    config = AutoConfig.for_model(
        "llama", **TINY_LLAMA, vocab_size=2000, num_labels=spec.num_labels, pad_token_id=None,
        problem_type=spec.problem,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def models_of(task: Classify) -> Models:
    network = network_of(task)
    give_pooled_forward(network)
    return Models(policy=model_of(network, "mask", "packed"))


@pytest.mark.parametrize("problem", sorted(LABELS))
def test_the_loss_is_that_of_transformers(problem: str, tmp_path: Path) -> None:
    """Of packed rows here, of each row alone there; metrics of an evaluation beside it."""
    rows = rows_of(problem)
    task, store, lines = seen(experiment_of(tmp_path, rows, {"problem": problem}))
    network = network_of(task)
    batch = batch_of(store)
    names = list(task.labels)
    total = 0.0
    for sample in (store[number] for number in range(len(store))):
        for (tokens, _), raw in zip(sample.sequences(), sample.columns["label"], strict=True):
            if problem == "regression":
                label = torch.tensor([float(raw)])
            elif problem == "single_label":
                label = torch.tensor([names.index(bytes(raw).rstrip(b"\0").decode())])
            else:
                there = json.loads(bytes(raw).rstrip(b"\0"))
                label = torch.tensor([[float(name in there) for name in names]])
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            with torch.no_grad():
                total += float(network(input_ids=ids, labels=label).loss)
    models = models_of(task)
    loss = task.loss(models, batch)
    assert loss.weight == len(rows)
    assert float(loss.sum.detach()) == pytest.approx(total, rel=1e-4)
    loss.sum.backward()
    with torch.no_grad():
        empty = collate([], seq_len=16, pad_id=0, layout="packed", columns=store.batch_columns)
        found = task.evaluate(models, [batch, empty])
    assert found["loss"].value == pytest.approx(total / len(rows), rel=1e-4)
    measured = {*found["measured"].values(), *found} - {"loss", "measured"}
    assert measured == task.metrics.keys()
    assert lines[0].startswith("Labels: ")


def test_labels_are_found_named_and_in_a_stable_order(tmp_path: Path) -> None:
    task, _, lines = seen(experiment_of(tmp_path, ROWS))
    assert task.labels == ("bad", "good", "so")
    assert lines == ["Labels: bad (10), good (10), so (10)"]
    spec = task.models()["policy"]
    assert (spec.num_labels, spec.labels) == (3, task.labels)
    numbers = [{"text": "t", "label": n} for n in (10, 9, 0, 9)]
    assert seen(experiment_of(tmp_path, numbers))[0].labels == ("0", "9", "10")
    truth = [{"text": "t", "label": n} for n in (True, False)]
    assert seen(experiment_of(tmp_path, truth))[0].labels == ("false", "true")
    named = experiment_of(
        tmp_path, numbers, label_names={"10": "ten", "0": "none", "9": "nine", "8": "eight"}
    )
    task, _, lines = seen(named)
    assert task.labels == ("ten", "none", "nine", "eight")
    assert lines[1] == "WARNING: no row of the training data has the label 'eight'."


def test_a_label_of_the_evaluation_that_no_class_has(tmp_path: Path) -> None:
    held_out = [{"text": "t", "label": "good"}, {"text": "u", "label": "odd"}]
    exp = experiment_of(
        tmp_path, ROWS, eval_path=str(write_rows(tmp_path / "eval.jsonl", held_out))
    )
    with pytest.raises(
        DataError, match=r"1 row with labels that were not trained: 'odd' .trained: 'bad', 'good'"
    ):
        seen(exp)
    exp.data.on_bad_row = "skip"
    task, _, lines = seen(exp)
    assert "excluded from the evaluation" in lines[1]
    assert lines[2] == "No row of the evaluation data has the label 'bad', 'so'."
    store = prepare(exp, tokenizer_of(exp), split="eval")
    with torch.no_grad():
        found = task.evaluate(models_of(task), [batch_of(store)])
    assert found["loss"].weight == 1


@pytest.mark.parametrize(
    ("problem", "label", "reason"),
    [
        ("single_label", "", "a missing label"),
        ("single_label", ["a", "b"], "several labels"),
        ("single_label", "x" * 65, "a label that is too long"),
        ("multi_label", [{"a": 1}], "labels that are not names"),
        ("regression", "high", "a label that is not a number"),
        ("regression", 10**400, "a label that is not a number"),
        ("regression", "nan", "a label that is not a number"),
        ("regression", None, "a missing label"),
    ],
)
def test_wrong_labels_are_rejected_with_the_reason(problem, label, reason, tmp_path) -> None:
    rows = rows_of(problem, 6)
    rows.insert(2, {"text": "wrong", "label": label})
    store = assert_rejected(experiment_of(tmp_path, rows, {"problem": problem}), line=3)
    assert store.meta["rejected"] == {reason: 1}
    assert len(store.values_of("label")) == 6


def test_empty_texts_and_one_class_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the row has no text"):
        seen(experiment_of(tmp_path, [*ROWS, {"text": "  ", "label": "good"}]))
    with pytest.raises(DataError, match="every row has the label 'good'"):
        seen(experiment_of(tmp_path, [row for row in ROWS if row["label"] == "good"]))


def test_a_weight_is_that_of_a_label(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names 'nice', which is not a label"):
        seen(experiment_of(tmp_path, ROWS, {"class_weights": {"nice": 2.0}}))


def test_several_labels_in_a_text(tmp_path: Path) -> None:
    rows = [{"text": "t", "label": label} for label in ("a; b", "b", "", "c;a")]
    options = {"problem": "multi_label", "separator": ";"}
    task, store, _ = seen(experiment_of(tmp_path, rows, options))
    assert task.labels == ("a", "b", "c")
    assert len(store.values_of("label")) == 4


def test_weighted_and_focal_losses() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 0, 2])
    weights = torch.tensor([0.5, 2.0, 1.0])
    ours = single_label_losses(logits, target, weights=weights)
    theirs = torch.nn.functional.cross_entropy(logits, target, weight=weights, reduction="none")
    torch.testing.assert_close(ours, theirs)
    # Focal loss by its definition (Lin et al. 2017, equation 5).
    p = logits.softmax(-1)[torch.arange(6), target]
    focal = single_label_losses(logits, target, weights=torch.ones(3), gamma=2.0)
    torch.testing.assert_close(focal, -((1 - p) ** 2) * p.log())
    many = torch.tensor([[1.0, 0.0, 1.0]] * 6)
    ours = multi_label_losses(logits, many, weights=torch.ones(3), gamma=2.0)
    one = logits.sigmoid()
    own = torch.where(many > 0, one, 1 - one)
    torch.testing.assert_close(ours, (-((1 - own) ** 2) * own.log()).mean(-1))


def test_class_weights() -> None:
    sizes = np.array([90.0, 9.0, 0.0, 1.0])
    inverse = class_weights(sizes, beta=None)
    assert (inverse * sizes).sum() == pytest.approx(100)
    assert inverse[1] / inverse[0] == pytest.approx(10)
    assert inverse[2] == 0
    balanced = class_weights(sizes, beta=0.99)
    effective = (1 - 0.99 ** sizes[:2]) / 0.01
    assert balanced[1] / balanced[0] == pytest.approx(effective[0] / effective[1])
    np.testing.assert_allclose(class_weights(sizes, beta=0.0)[[0, 1, 3]], 1.0)
    sklearn, at = pytest.importorskip("sklearn.utils.class_weight"), np.array([0, 1, 3])
    labels = np.repeat(at, [90, 9, 1])
    ratio = inverse[at] / sklearn.compute_class_weight("balanced", classes=at, y=labels)
    np.testing.assert_allclose(ratio, ratio[0])


def test_weights_of_classes_do_not_prepare_anew(tmp_path: Path) -> None:
    _, store, _ = seen(experiment_of(tmp_path, ROWS))
    options = {"balance": "class_balanced", "loss": "focal"}
    _, again, lines = seen(experiment_of(tmp_path, ROWS[:-1] + ROWS[:1], options))
    assert lines[-1].startswith("Class weights: bad ")
    _, same, _ = seen(experiment_of(tmp_path, ROWS, options))
    assert same.fingerprint == store.fingerprint != again.fingerprint


def test_an_exported_classifier_is_measured_by_itself(tmp_path: Path) -> None:
    """``python -m llmx eval``: labels are those of the model, in its order, not of the rows."""
    exp = experiment_of(tmp_path, ROWS)
    network = network_of(seen(exp)[0])
    network.config.id2label = {1: "good", 0: "so", 2: "bad"}
    network.config.pad_token_id = 0
    network.save_pretrained(tmp_path / "model")
    task, store = prepared(exp, tokenizer := tokenizer_of(exp))
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert task.see_model(config, store) == []
    assert task.labels == ("so", "good", "bad")
    models = load(Target(tmp_path / "model", None, None, None), exp, task, tokenizer)
    found = measure(task, models, store, batch=3)
    assert {"loss", "plain_loss", "accuracy", "macro_f1", "auc"} == set(found)
    config.id2label = {0: "good", 1: "bad"}
    with pytest.raises(DataError, match="labels that were not trained: 'so'"):
        task.see_model(config, store)


@pytest.mark.parametrize("begin", [None, "<s>"])
def test_texts_are_exactly_what_the_tokenizer_gives(begin: str | None, tmp_path: Path) -> None:
    """The head looks at the last token, and `pipeline("text-classification")` adds no EOS token."""
    texts = ["x", "a text", "another text"]
    rows = [{"text": text, "label": str(number % 2)} for number, text in enumerate(texts)]
    tokenizer = byte_tokenizer(begin=begin)
    _, store = prepared(experiment_of(tmp_path, rows), tokenizer)
    assert sorted(sequences_of(store)) == sorted(map(tuple, tokenizer(texts)["input_ids"]))


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        ("single_label", {"class_weights": {"bad": 3.0}, "label_smoothing": 0.1}),
        ("multi_label", {"class_weights": {"b": 3.0}, "loss": "focal"}),
    ],
)
def test_the_cross_entropy_of_an_evaluation_compares_between_runs(
    problem: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The loss has weights of classes, smoothing and gamma; the cross entropy has none of them."""
    measured = []
    for more in ({}, options):
        exp = experiment_of(tmp_path, rows_of(problem), {"problem": problem, **more})
        task, store, _ = seen(exp)
        with torch.no_grad():
            means = task.evaluate(models_of(task), [batch_of(store)])
        measured.append((means["loss"].value, means["plain_loss"].value))
    (plain_loss, plain), (weighted_loss, weighted) = measured
    assert plain == pytest.approx(plain_loss, rel=1e-6)
    assert weighted == pytest.approx(plain, rel=1e-6)
    assert abs(weighted_loss - plain_loss) > 1e-2


# Metrics

RNG = np.random.default_rng(4)
COUNT = 200


def on_ranks(one: Gathered, *arrays: np.ndarray) -> Gathered:
    """Of five micro batches on three ranks, one of which has nothing."""
    ranks = [one, *(type(one)(**_options(one)) for _ in range(2))]
    for number, part in enumerate(np.array_split(np.arange(COUNT), 5)):
        ranks[number % 2].add(*(array[part] for array in arrays))
    for other in ranks[1:]:
        one.merge(other)
    return one


def _options(one: Gathered) -> dict[str, object]:
    return {key: value for key, value in vars(one).items() if not key.startswith("_")}


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_of_one_label(classes: int) -> None:
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


def test_a_class_that_is_not_there_does_not_count() -> None:
    """In scikit-learn, too, nor is it predicted."""
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


def test_ties_of_scores_count_half() -> None:
    labels = RNG.integers(0, 2, COUNT).astype(bool)
    scores = RNG.integers(0, 4, COUNT).astype(float)
    assert roc_auc(labels, scores) == pytest.approx(sklearn.roc_auc_score(labels, scores))
    assert roc_auc(np.ones(3, bool), np.zeros(3)) is None


def test_metrics_of_several_labels() -> None:
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


def test_metrics_of_numbers() -> None:
    wanted = RNG.normal(size=COUNT)
    found = wanted + RNG.normal(size=COUNT)
    values = on_ranks(Numbers(), found, wanted).values()
    assert values["mae"] == pytest.approx(sklearn.mean_absolute_error(wanted, found))
    assert values["r2"] == pytest.approx(sklearn.r2_score(wanted, found))
    assert values["pearson"] == pytest.approx(np.corrcoef(wanted, found)[0, 1])
    constant = Numbers()
    constant.add(np.ones(3), np.ones(3))
    assert constant.values() == {"mae": 0.0, "r2": None, "pearson": None}
