"""The step at which training went wrong, exactly."""

from __future__ import annotations

import math

import pytest
import torch

from llmx.train.stopping import (
    NEVER,
    SPIKE_LEAST,
    SPIKE_WINDOW,
    LossSpike,
    NonFiniteLoss,
    NonFiniteWatch,
    SpikeWatch,
    raise_if_not_finite,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_the_first_bad_step_of_loss_and_gradient_is_kept(bad: float, as_tensor: bool) -> None:
    watch = NonFiniteWatch(CPU, gradients=True)
    for step in range(1, 20):
        norm = bad if step in (9, 12) else 0.5
        loss = bad if step in (7, 8, 15) else 2.0
        watch.record(step, torch.tensor(loss), torch.tensor(norm) if as_tensor else norm)
        assert watch.first() == [7 if step >= 7 else NEVER, 9 if step >= 9 else NEVER]


def test_a_gradient_that_overflows_in_fp16_is_no_divergence() -> None:
    watch = NonFiniteWatch(CPU, gradients=False)
    watch.record(1, torch.tensor(2.0), torch.tensor(math.inf))
    watch.record(2, torch.tensor(2.0), None)
    assert watch.first() == [NEVER, NEVER]


def test_the_earlier_one_is_named_with_its_step() -> None:
    raise_if_not_finite(NEVER, NEVER, lr=0.1)
    with pytest.raises(NonFiniteLoss, match="loss of step 7 .*optim.lr .now 0.1.") as caught:
        raise_if_not_finite(7, 7, lr=0.1)
    assert caught.value.step == 7
    with pytest.raises(NonFiniteLoss, match="gradient of step 6") as caught:
        raise_if_not_finite(7, 6, lr=0.1)
    assert caught.value.step == 6


def test_a_jump_over_the_median_is_a_spike_and_a_slow_rise_is_none() -> None:
    watch = SpikeWatch(2.0)
    for step in range(1, 200):
        watch.check(step, 1.01**step)
    with pytest.raises(LossSpike, match="step 200 .*task.spike_factor=2 ") as caught:
        watch.check(200, 2.1 * 1.01**200)
    assert caught.value.step == 200


def test_spikes_need_a_median_and_a_factor() -> None:
    watch = SpikeWatch(2.0)
    for step in range(SPIKE_LEAST):
        watch.check(step, 10.0**step)
    with pytest.raises(LossSpike):
        watch.check(SPIKE_LEAST, 1e9)
    off = SpikeWatch(None)
    for step in range(3 * SPIKE_LEAST):
        off.check(step, 10.0**step)


def test_a_resumed_run_judges_as_the_uninterrupted_one_would() -> None:
    losses = [3.0 + math.sin(step) for step in range(120)]
    whole = SpikeWatch(1.7)
    for step, loss in enumerate(losses):
        whole.check(step, loss)
    resumed = SpikeWatch(1.7, losses=losses[-SPIKE_WINDOW:])
    said = []
    for watch in (whole, resumed):
        with pytest.raises(LossSpike) as caught:
            watch.check(120, 5.6)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "times the median 2.996 of the last 50 logged ones" in said[0]
