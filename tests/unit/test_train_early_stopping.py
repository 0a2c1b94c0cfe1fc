"""When training ends early: a pure function of the evaluations, in the metric's direction."""

from __future__ import annotations

import pytest

from llmx.config import CheckpointConfig, EarlyStoppingConfig
from llmx.errors import ConfigError
from llmx.run.metrics import Metric
from llmx.train.metrics import lines_until
from llmx.train.stopping import EarlyStopping
from tests.composing import composed

METRICS = {
    "exact_match": Metric("exact match", "percent", higher_is_better=True),
    "length": Metric("length"),
}
OFF = CheckpointConfig()


def rule(metric: str | None = None, mode: str = "auto", **values: object) -> EarlyStopping:
    wanted = EarlyStoppingConfig(**{"patience": 2, **values})
    checkpoint = CheckpointConfig(metric=metric or "eval/loss", mode=mode)
    found = EarlyStopping.of(wanted, checkpoint, METRICS, task="sft")
    assert found is not None
    return found


def evaluations(*values: float | None, name: str = "loss") -> list[dict[str, object]]:
    return [
        {"kind": "eval", "step": 10 * at, name: value, **({} if value else {"nonfinite": True})}
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ((), None),
        ((3.0,), None),
        ((3.0, 2.0, 1.0), None),
        ((3.0, 2.0, 2.0), None),
        ((3.0, 2.0, 2.0, 2.5), (10, 2.0)),
        ((3.0, 2.0, 2.5, 1.9), None),
        ((3.0, 2.0, 2.5, 1.9, 1.9, 2.0), (30, 1.9)),
        ((3.0, None, None), (0, 3.0)),
        ((None, None), (0, None)),
    ],
)
def test_it_stops_after_two_evaluations_without_an_improvement(
    values: tuple[float, ...], stops: tuple[int, float] | None
) -> None:
    found = rule().decide(evaluations(*values))
    assert (found and (found.best_step, found.best)) == stops


def test_more_may_be_better_and_an_improvement_has_a_size() -> None:
    more = rule("eval/exact_match", min_delta=0.05)
    assert more.decide(evaluations(0.1, 0.14, 0.15, name="exact_match")) is not None
    assert more.decide(evaluations(0.1, 0.14, 0.16, name="exact_match")) is None
    # An evaluation that does not measure it does not count.
    between = [
        *evaluations(0.5, name="exact_match"),
        {"kind": "eval", "step": 20, "loss": 1.0, "exact_match": None},
        {"kind": "eval", "step": 30, "loss": 1.0},
        {"kind": "train", "step": 30, "exact_match": 0.1},
    ]
    assert more.decide(between) is None
    assert str(rule().decide(evaluations(3.0, 4.0, 4.0))) == (
        "eval/loss has not improved in 2 evaluations; the best was 3 at step 0"
    )


def test_the_direction_is_that_of_the_checkpoints_or_of_the_task() -> None:
    assert not rule().more_is_better
    assert rule("eval/exact_match").more_is_better
    assert rule(metric=None).metric == "eval/loss"
    own = EarlyStoppingConfig(patience=1, metric="eval/exact_match")
    found = EarlyStopping.of(own, CheckpointConfig(mode="min"), METRICS, task="sft")
    assert found is not None
    assert found.more_is_better
    assert EarlyStopping.of(EarlyStoppingConfig(), CheckpointConfig(), METRICS, task="sft") is None
    for metric, problem in (
        ("eval/f1", "task.early_stopping.metric=eval/f1: task sft does not measure it"),
        ("eval/length", "does not say which direction.*checkpoint.metric=eval/length and"),
    ):
        wanted = EarlyStoppingConfig(patience=1, metric=metric)
        with pytest.raises(ConfigError, match=problem):
            EarlyStopping.of(wanted, CheckpointConfig(), METRICS, task="sft")


def test_a_resumed_run_decides_as_one_that_was_not_interrupted() -> None:
    """What stands after its step is cut off; so is the end itself."""
    lines = [
        *evaluations(3.0, 2.0, 2.5, 2.5),
        {"kind": "event", "event": "early_stopped", "step": 30},
        {"kind": "end", "step": 30},
    ]
    assert rule().decide(lines) is not None
    assert rule().decide(lines_until(lines, 20)) is None
    assert [line["kind"] for line in lines_until(lines, 30)] == ["eval"] * 4
    assert rule().decide(lines_until(lines, 30)) is not None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["task.eval_every_steps=0"], "needs evaluations on the way.*task.eval_every_steps=100"),
        (["data=alpaca", "data.path=x.json"], "needs evaluation data. Set data.eval_path"),
        (["checkpoint.metric=train/loss"], "which no evaluation measures.*metric=eval/loss"),
        (["task.early_stopping.metric=train/loss"], "must be eval/NAME"),
        (["task.early_stopping.metric=eval/f1"], "eval/f1: task sft does not measure it here"),
        (["checkpoint.metric=eval/f1"], "It measures eval/exact_match, eval/loss, train/loss"),
        (["task.early_stopping.patience=0"], "patience=0: must be a whole number"),
    ],
)
def test_what_it_needs_is_said_while_composing(words: list[str], problem: str) -> None:
    base = ["experiment=demo", "task.eval_every_steps=5", "task.early_stopping.patience=2"]
    with pytest.raises(ConfigError, match=problem):
        composed([*base, *words])
