"""The step at which training went wrong, exactly; and when it ends early, by its evaluations."""

from __future__ import annotations

import math

import pytest
import torch

from llmx.config import CheckpointConfig, EarlyStoppingConfig
from llmx.errors import ConfigError
from llmx.run.metrics import Metric
from llmx.train import stopping
from llmx.train.metrics import lines_until
from llmx.train.stopping import NEVER, EarlyStopping, LossSpike, NonFiniteWatch, SpikeWatch
from tests.composing import composed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bad", "kind"), [(math.nan, float), (math.inf, torch.tensor), (-math.inf, torch.tensor)]
)
def test_the_first_bad_step_of_loss_and_gradient_is_kept(bad, kind) -> None:
    watch = NonFiniteWatch(CPU, gradients=True)
    for step in range(1, 20):
        norm = bad if step in (9, 12) else 0.5
        loss = bad if step in (7, 8, 15) else 2.0
        watch.record(step, torch.tensor(loss), kind(norm))
        assert watch.first() == [7 if step >= 7 else NEVER, 9 if step >= 9 else NEVER]
    fp16 = NonFiniteWatch(CPU, gradients=False)  # a gradient that overflows there
    fp16.record(1, torch.tensor(2.0), torch.tensor(math.inf))
    fp16.record(2, torch.tensor(2.0), None)
    assert fp16.first() == [NEVER, NEVER]


def test_the_earlier_one_is_named_with_its_step() -> None:
    stopping.raise_if_not_finite(NEVER, NEVER, lr=0.1)
    for gradient, message in (
        (7, "loss of step 7 .*optim.lr .now 0.1."),
        (6, "gradient of step 6"),
    ):
        with pytest.raises(stopping.NonFiniteLoss, match=message) as caught:
            stopping.raise_if_not_finite(7, gradient, lr=0.1)
        assert caught.value.step == gradient


def test_a_jump_over_the_median_is_a_spike_and_a_slow_rise_is_none() -> None:
    watch = SpikeWatch(2.0)
    for step in range(1, 200):
        watch.check(step, 1.01**step)
    with pytest.raises(LossSpike, match="step 200 .*task.spike_factor=2 ") as caught:
        watch.check(200, 2.1 * 1.01**200)
    assert caught.value.step == 200
    watch, off = SpikeWatch(2.0), SpikeWatch(None)
    for step in range(stopping.SPIKE_LEAST):
        watch.check(step, 10.0**step)
    with pytest.raises(LossSpike):
        watch.check(stopping.SPIKE_LEAST, 1e9)
    for step in range(3 * stopping.SPIKE_LEAST):
        off.check(step, 10.0**step)


def test_a_resumed_run_judges_spikes_as_the_uninterrupted_one_would() -> None:
    losses = [3.0 + math.sin(step) for step in range(120)]
    whole = SpikeWatch(1.7)
    for step, loss in enumerate(losses):
        whole.check(step, loss)
    for watch in (whole, SpikeWatch(1.7, losses=losses[-stopping.SPIKE_WINDOW :])):
        with pytest.raises(LossSpike, match="the median 2.996 of the last 50 logged ones"):
            watch.check(120, 5.6)


METRICS = {
    "exact_match": Metric("exact match", "percent", higher_is_better=True),
    "length": Metric("length"),
}


def rule(metric: str = "eval/loss", **values: object) -> EarlyStopping:
    wanted, checkpoint = EarlyStoppingConfig(patience=2, **values), CheckpointConfig(metric=metric)
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
        ((3.0, 2.0, 2.0), None),
        ((3.0, 2.0, 2.0, 2.5), (10, 2.0)),
        ((3.0, 2.0, 2.5, 1.9, 1.9, 2.0), (30, 1.9)),
        ((3.0, None, None), (0, 3.0)),
        ((None, None), (0, None)),
    ],
)
def test_it_stops_after_two_evaluations_without_an_improvement(values, stops) -> None:
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

    def of(checkpoint: CheckpointConfig, **values: object) -> EarlyStopping | None:
        return EarlyStopping.of(EarlyStoppingConfig(**values), checkpoint, METRICS, task="sft")

    own = of(CheckpointConfig(mode="min"), patience=1, metric="eval/exact_match")
    assert own is not None
    assert own.more_is_better
    assert of(CheckpointConfig()) is None
    for metric, problem in (
        ("eval/f1", "task.early_stopping.metric=eval/f1: task sft does not measure it"),
        ("eval/length", "does not say which direction.*checkpoint.metric=eval/length and"),
    ):
        with pytest.raises(ConfigError, match=problem):
            of(CheckpointConfig(metric="eval/loss"), patience=1, metric=metric)
    with pytest.raises(ConfigError, match=r"looks at train/reward, which no evaluation measures"):
        of(CheckpointConfig(metric="train/reward"), patience=1)
    with pytest.raises(ConfigError, match=r"eval/loss: task own does not measure it"):
        EarlyStopping.of(
            EarlyStoppingConfig(patience=1, metric="eval/loss"), CheckpointConfig(),
            METRICS, task="own", evaluates_loss=False,
        )  # fmt: skip


def test_a_resumed_run_stops_where_the_uninterrupted_one_would() -> None:
    """What stands after its step is cut off; so is the end itself."""
    lines = [
        *evaluations(3.0, 2.0, 2.5, 2.5),
        {"kind": "event", "event": "early_stopped", "step": 30},
        {"kind": "end", "step": 30},
    ]
    assert rule().decide(lines_until(lines, 20)) is None
    assert [line["kind"] for line in lines_until(lines, 30)] == ["eval"] * 4
    assert rule().decide(lines_until(lines, 30)) is not None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["task.eval_every_steps=0"], "needs evaluations on the way.*task.eval_every_steps=100"),
        (["data=alpaca", "data.path=x.json"], "needs evaluation data. Set data.eval_path"),
        (["checkpoint.metric=train/loss"], "which no evaluation measures.*metric=eval/loss"),
        (["task.evaluate=false"], "patience=2: task.evaluate=false measures nothing"),
        (["task.early_stopping.metric=train/loss"], "must be eval/NAME"),
        (["task.early_stopping.metric=eval/f1"], "eval/f1: task sft does not measure it here"),
    ],
)
def test_what_it_needs_is_said_while_composing(words, problem) -> None:
    base = ["experiment=demo", "task.eval_every_steps=5", "task.early_stopping.patience=2"]
    with pytest.raises(ConfigError, match=problem):
        composed([*base, *words])
