"""task=classify: labels from the data, losses of transformers, and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from llmx import data
from llmx.cli.evaluate import load, measure
from llmx.cli.target import Target
from llmx.config import Experiment
from llmx.data import SampleStore, collate
from llmx.errors import ConfigError, DataError
from llmx.models.model import Models
from llmx.models.pooling import give_pooled_forward
from llmx.tasks import prepare, task_of, tokenizer_of
from llmx.tasks.classify import Classify, class_weights, multi_label_losses, single_label_losses
from tests.rundirs import TINY_LLAMA, experiment
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_models_classification import model_of

ROWS = [{"text": f"row {n} of {n % 7}", "label": ("good", "bad", "so")[n % 3]} for n in range(30)]


def experiment_of(
    tmp_path: Path, rows: list[dict[str, Any]], *, eval_rows: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None, **data: Any,
) -> Experiment:  # fmt: skip
    def written(name: str, values: list[dict[str, Any]]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in values), encoding="utf-8")
        return str(path)

    more = {"eval_path": written("eval.jsonl", eval_rows)} if eval_rows is not None else {}
    return experiment(
        tmp_path / "run",
        data={
            "path": written("train.jsonl", rows), "form": "labelled",
            "data_map": {"prompt": "text", "label": "label"}, "max_rows": None, **more, **data,
        },
        task={"kind": "classify", "options": options or {}},
    )  # fmt: skip


def seen(exp: Experiment) -> tuple[Classify, SampleStore, list[str]]:
    """The task after it has seen its data, as a rank does it."""
    tokenizer = tokenizer_of(exp)
    task = task_of(exp, tokenizer)
    assert isinstance(task, Classify)
    store = prepare(exp, tokenizer)
    held_out = prepare(exp, tokenizer, split="eval") if exp.data.eval_path else None
    return task, store, task.see_data(store, held_out)


def network_of(task: Classify) -> Any:
    spec = task.models()["policy"]
    config = AutoConfig.for_model(
        "llama", **TINY_LLAMA, vocab_size=2000, num_labels=spec.num_labels, pad_token_id=None,
        problem_type=spec.problem,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def batch_of(store: SampleStore, *numbers: int) -> dict[str, torch.Tensor]:
    return collate(
        [store[number] for number in numbers], seq_len=store.seq_len, pad_id=0, layout="packed",
        columns=store.batch_columns,
    )  # fmt: skip


LABELS: dict[str, Any] = {
    "single_label": lambda n: ("good", "bad", "so")[n % 3],
    "multi_label": lambda n: [["a"], ["b", "a"], []][n % 3],
    "regression": lambda n: n / 7 - 2,
}


@pytest.mark.parametrize("problem", sorted(LABELS))
def test_the_loss_is_that_of_transformers(problem: str, tmp_path: Path) -> None:
    """Of packed rows here, of each row alone there; metrics of an evaluation beside it."""
    rows = [{"text": f"row {n} of {n % 7}", "label": LABELS[problem](n)} for n in range(30)]
    exp = experiment_of(tmp_path, rows, options={"problem": problem})
    task, store, lines = seen(exp)
    network = network_of(task)
    batch = batch_of(store, *range(len(store)))
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
    give_pooled_forward(network)
    models = Models(policy=model_of(network, "mask", "packed"))
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
    exp = experiment_of(tmp_path, ROWS, eval_rows=held_out)
    with pytest.raises(
        DataError, match=r"1 row with labels that were not trained: 'odd' .trained: 'bad', 'good'"
    ):
        seen(exp)
    exp.data.on_bad_row = "skip"
    task, _, lines = seen(exp)
    assert "excluded from the evaluation" in lines[1]
    assert lines[2] == "No row of the evaluation data has the label 'bad', 'so'."
    store = prepare(exp, tokenizer_of(exp), split="eval")
    network = network_of(task)
    give_pooled_forward(network)
    models = Models(policy=model_of(network, "mask", "packed"))
    with torch.no_grad():
        found = task.evaluate(models, [batch_of(store, *range(len(store)))])
    assert found["loss"].weight == 1


@pytest.mark.parametrize(
    ("problem", "label", "reason"),
    [
        ("single_label", "", "a missing label"),
        ("single_label", ["a", "b"], "several labels"),
        ("single_label", "x" * 65, "a label that is too long"),
        ("multi_label", [{"a": 1}], "labels that are not names"),
        ("regression", "high", "a label that is not a number"),
        ("regression", "nan", "a label that is not a number"),
        ("regression", None, "a missing label"),
    ],
)
def test_wrong_labels_are_rejected_with_the_reason(
    problem: str, label: Any, reason: str, tmp_path: Path
) -> None:
    good = LABELS[problem]
    rows = [{"text": f"row {n}", "label": good(n)} for n in range(6)]
    rows.insert(2, {"text": "wrong", "label": label})
    exp = experiment_of(tmp_path, rows, options={"problem": problem})
    with pytest.raises(DataError, match=r"train\.jsonl, line 3"):
        seen(exp)
    exp.data.on_bad_row = "skip"
    _, store, _ = seen(exp)
    assert store.meta["rejected"] == {reason: 1}
    assert len(store.values_of("label")) == 6


def test_empty_texts_and_one_class_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the row has no text"):
        seen(experiment_of(tmp_path, [*ROWS, {"text": "  ", "label": "good"}]))
    with pytest.raises(DataError, match="every row has the label 'good'"):
        seen(experiment_of(tmp_path, [row for row in ROWS if row["label"] == "good"]))


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for options, said in (
        ({"problem": "regression", "balance": "inverse"}, "has no classes"),
        ({"balance": "inverse", "class_weights": {"a": 2.0}}, "both weight the classes"),
        ({"problem": "multi_label", "label_smoothing": 0.1}, "applies to problem=single_label"),
        ({"class_weights": {"nice": 2.0}}, "names 'nice', which is not a label"),
        ({"class_weights": {"bad": -2.0}}, "weights must be 0 or more"),
        ({"los": "focal"}, "Did you mean"),
    ):
        with pytest.raises(ConfigError, match=said):
            seen(experiment_of(tmp_path, ROWS, options=options))


def test_several_labels_in_a_text(tmp_path: Path) -> None:
    rows = [{"text": "t", "label": label} for label in ("a; b", "b", "", "c;a")]
    task, store, _ = seen(
        experiment_of(tmp_path, rows, options={"problem": "multi_label", "separator": ";"})
    )
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
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    labels = np.repeat([0, 1, 3], [90, 9, 1])
    theirs = sklearn.compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels)
    ratio = inverse[[0, 1, 3]] / theirs
    np.testing.assert_allclose(ratio, ratio[0])


def test_weights_of_classes_do_not_prepare_anew(tmp_path: Path) -> None:
    _, store, _ = seen(experiment_of(tmp_path, ROWS))
    options = {"balance": "class_balanced", "loss": "focal"}
    _, again, lines = seen(experiment_of(tmp_path, ROWS[:-1] + ROWS[:1], options=options))
    assert lines[-1].startswith("Class weights: bad ")
    _, same, _ = seen(experiment_of(tmp_path, ROWS, options=options))
    assert same.fingerprint == store.fingerprint != again.fingerprint


def test_an_exported_classifier_is_measured_by_itself(tmp_path: Path) -> None:
    """``python -m llmx eval``: labels are those of the model, not those of the rows."""
    exp = experiment_of(tmp_path, ROWS, eval_rows=ROWS[:8])
    task, _, _ = seen(exp)
    network = network_of(task)
    network.config.id2label = dict(enumerate(task.labels))
    network.config.pad_token_id = 0
    network.save_pretrained(tmp_path / "model")
    tokenizer = tokenizer_of(exp)
    fresh = task_of(exp, tokenizer)
    store = prepare(exp, tokenizer, split="eval")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert fresh.see_model(config, store) == []
    models = load(Target(tmp_path / "model", None, None, None), exp, fresh, tokenizer)
    found = measure(fresh, models, store, tokenizer, batch=3)
    assert {"loss", "plain_loss", "accuracy", "macro_f1", "auc"} == set(found)
    config.id2label = {0: "good", 1: "bad"}
    with pytest.raises(DataError, match="labels that were not trained: 'so'"):
        fresh.see_model(config, store)


@pytest.mark.parametrize("begin", [None, "<s>"])
def test_texts_are_exactly_what_the_tokenizer_gives(begin: str | None, tmp_path: Path) -> None:
    """The head looks at the last token, and `pipeline("text-classification")` adds no EOS token."""
    texts = ["x", "a text", "another text"]
    rows = [{"text": text, "label": str(number % 2)} for number, text in enumerate(texts)]
    exp = experiment_of(tmp_path, rows)
    tokenizer = byte_tokenizer(begin=begin)
    store = data.prepare(exp.data, exp.seed, tokenizer, task_of(exp, tokenizer))
    trained = [s[0].tolist() for n in range(len(store)) for s in store[n].sequences()]
    assert sorted(trained) == sorted(tokenizer(texts)["input_ids"])


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
    rows = [{"text": row["text"], "label": LABELS[problem](n)} for n, row in enumerate(ROWS)]
    measured = []
    for more in ({}, options):
        exp = experiment_of(tmp_path, rows, options={"problem": problem, **more})
        task, store, _ = seen(exp)
        network = network_of(task)
        give_pooled_forward(network)
        models = Models(policy=model_of(network, "mask", "packed"))
        with torch.no_grad():
            means = task.evaluate(models, [batch_of(store, *range(len(store)))])
        measured.append((means["loss"].value, means["plain_loss"].value))
    (plain_loss, plain), (weighted_loss, weighted) = measured
    assert plain == pytest.approx(plain_loss, rel=1e-6)
    assert weighted == pytest.approx(plain, rel=1e-6)
    assert abs(weighted_loss - plain_loss) > 1e-2
