"""Metrics by name: declared by a task, written with ``start``, shown by their title and format."""

from __future__ import annotations

import json
import math

import pytest

from llmx.config import Experiment, TaskConfig
from llmx.config.tasks import shipped_tasks
from llmx.data import EvalPrompt
from llmx.errors import ConfigError
from llmx.run.metrics import Metric, declared_in, declared_of, measured, metric_of
from llmx.run.metrics.declared import check_checkpoint_metric, check_declared
from llmx.tasks import task_class
from tests.small_tokenizers import byte_tokenizer

F1 = Metric("macro F1", "percent", higher_is_better=True)
ACCURACY = Metric("accuracy", "percent", higher_is_better=True, kinds=("train", "eval"))
LENGTH = Metric("completion length", "integer")
DECLARED = {"f1/macro": F1, "accuracy": ACCURACY, "length": LENGTH}


def start_line(declared: dict[str, Metric]) -> dict:
    """As rank 0 writes it and a reader gets it."""
    values = {name: metric.to_dict() for name, metric in declared.items()}
    return json.loads(json.dumps({"kind": "start", "metrics": values}))


def test_a_declaration_survives_the_file() -> None:
    assert declared_in(start_line(DECLARED)) == DECLARED
    assert declared_in(start_line({})) == {}


def test_the_newest_declaration_counts() -> None:
    resumed = {**start_line({"f1/macro": F1}), "kind": "event", "event": "resumed", "step": 2}
    plain = {"kind": "event", "event": "resumed", "step": 4}
    assert declared_of([{"kind": "start"}, resumed, plain]) == {"f1/macro": F1}


@pytest.mark.parametrize(
    "metrics",
    [None, [], "f1", {"f1": None}, {"f1": {}}, {"f1": {"kinds": 3, "title": 7, "format": []}}],
)
def test_a_torn_declaration_ends_no_reader(metrics) -> None:
    declared = declared_in({"kind": "start", "metrics": metrics})
    assert metric_of("f1", declared).shown(0.5)


def test_an_eval_line_has_every_number_and_a_train_line_what_is_declared() -> None:
    line = {"step": 3, "time": 1.0, "loss": 1.0, "target_tokens": 9, "accuracy": 0.5}
    line |= {
        "weight": 8,
        "other": 7,
        "f1/macro": None,
        "flag": True,
        "note": "x",
        "nonfinite": True,
    }
    assert measured({**line, "kind": "eval"}, DECLARED) == {"accuracy": 0.5, "other": 7.0}
    assert measured({**line, "kind": "train", "mfu": 0.3}, DECLARED) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        (F1, 0.96875, "96.9 %"),
        (LENGTH, 1234.4, "1,234"),
        (Metric("reward"), -0.12345, "-0.1235"),
        (Metric("perplexity"), 123456.0, "123,456"),
        (Metric("reward"), math.nan, "nan"),
        (F1, math.inf, "inf"),
    ],
)
def test_values_are_shown_in_their_format(metric: Metric, value: float, text: str) -> None:
    assert metric.shown(value) == text
    assert F1.shown(0.97, decimals=1) == "97.0 %"


@pytest.mark.parametrize(
    ("wanted", "mode", "best"),
    [
        ("eval/loss", "auto", "min"),
        ("eval/loss", "max", "max"),
        ("train/loss", "auto", "min"),
        ("eval/f1/macro", "auto", "max"),
        ("eval/f1/macro", "min", "min"),
        ("train/accuracy", "auto", "max"),
        ("train/tokens_per_s", "auto", "max"),
        ("eval/length", "max", "max"),
    ],
)
def test_the_direction_of_best_is_the_declared_one(wanted: str, mode: str, best: str) -> None:
    assert check_checkpoint_metric(wanted, mode, DECLARED, task="rank") == best


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("eval/f1", "checkpoint.metric=eval/f1: task rank does not measure it here. It measures "
         "eval/accuracy, eval/f1/macro, eval/length, eval/loss, train/accuracy, train/loss."),
        ("train/f1/macro", "does not measure it"),
        ("eval/mfu", "does not measure it"),
        ("eval/weight", "does not measure it"),
        ("eval/length", "Set checkpoint.mode=min or checkpoint.mode=max."),
    ],
)  # fmt: skip
def test_a_metric_that_is_not_measured_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.metric") as caught:
        check_checkpoint_metric(wanted, "auto", DECLARED, task="rank")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "metric", "rule"),
    [
        ("loss", F1, "reserved; choose another, e.g. task_loss"),
        ("steps", F1, "reserved"),
        ("f1_before", F1, "reserved"),
        ("f 1", F1, "the name must begin with a letter"),
        ("f1", Metric("F1", "percentage"), "the format must be one of percent, number, integer"),
        ("f1", Metric("F1", kinds=("test",)), "kinds must be of train, eval, not test"),
        ("f1", Metric("F1", kinds=()), "not none"),
    ],
)
def test_a_declaration_that_readers_could_not_show_is_refused(name, metric, rule) -> None:
    check_declared(DECLARED, task="mine")
    with pytest.raises(ConfigError) as caught:
        check_declared({name: metric}, task="mine")
    assert rule in str(caught.value)


@pytest.mark.parametrize("kind", shipped_tasks())
def test_every_task_declares_what_it_scores(kind: str) -> None:
    options = {"teacher": "owner/name"} if kind == "distill" else {}  # it has no default
    exp = Experiment(task=TaskConfig(kind=kind, eval_generate=2, options=options))
    # Rewards read texts.
    task = task_class(kind)(exp, byte_tokenizer() if kind in ("grpo", "ppo") else None)
    check_declared(task.metrics, task=kind)
    prompts = [EvalPrompt((1, 2), "?", expected, 2) for expected in "ab"]
    scored = set(task.score(prompts, ["a", "c"]))
    assert scored <= set(task.metrics)
    exp.task.eval_generate = 0
    assert not [name for name in scored & set(task.metrics) if "eval" in task.metrics[name].kinds]
