"""The batch algebra: exact, or an error that lists the nearest exact values."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.config import BatchConfig
from llmx.errors import ConfigError
from llmx.plan.batch import apportion, solve_batch
from tests.effort import at_most


def test_accumulation_follows_from_the_global_batch() -> None:
    plan = solve_batch(BatchConfig(global_batch=96, micro_batch=4), seq_len=512, world=4)
    assert plan.accumulation == 6
    assert plan.micro_batches == (4, 4, 4, 4)
    assert plan.tokens_per_step == 96 * 512


def test_without_a_target_it_is_one_micro_step() -> None:
    plan = solve_batch(BatchConfig(micro_batch=3), seq_len=8, world=2)
    assert (plan.global_batch, plan.accumulation) == (6, 1)


def test_tokens_per_step_are_rounded_to_whole_micro_steps() -> None:
    batch = BatchConfig(tokens_per_step=2_097_152, micro_batch=4)
    plan = solve_batch(batch, seq_len=2048, world=14)
    assert plan.global_batch % (14 * 4) == 0
    assert abs(plan.tokens_per_step - 2_097_152) <= 14 * 4 * 2048 / 2


def test_a_batch_that_does_not_divide_is_shared_out() -> None:
    plan = solve_batch(BatchConfig(global_batch=64, micro_batch=16), seq_len=8, world=14)
    assert plan.accumulation == 1
    assert sorted(plan.micro_batches) == [4] * 6 + [5] * 8


def test_a_batch_that_cannot_be_cut_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Use batch.global_batch=12 or 16"):
        solve_batch(BatchConfig(global_batch=13, micro_batch=2), seq_len=8, world=2)
    with pytest.raises(ConfigError, match=r"less than the 4 ranks"):
        solve_batch(BatchConfig(global_batch=3, micro_batch=2), seq_len=8, world=4)


def test_three_numbers_that_disagree() -> None:
    batch = BatchConfig(global_batch=16, micro_batch=2, accumulation=3)
    with pytest.raises(ConfigError, match=r"4 x 3 = 12"):
        solve_batch(batch, seq_len=8, world=2)


@given(target=st.integers(1, 400), micro=st.integers(1, 20), world=st.integers(1, 9))
def test_the_smallest_accumulation_that_fits_is_found(target, micro, world) -> None:
    """Against trying every accumulation in turn."""
    expected = None
    for accumulation in range(1, target + 1):
        if target % accumulation == 0:
            shares = (micro,) * world
            if micro * world * accumulation != target:
                shares = apportion(target // accumulation, [1.0] * world)
            if min(shares) >= 1 and max(shares) <= micro:
                expected = (accumulation, shares)
                break
    try:
        plan = solve_batch(
            BatchConfig(global_batch=target, micro_batch=micro), seq_len=8, world=world
        )
    except ConfigError:
        assert expected is None
    else:
        assert (plan.accumulation, plan.micro_batches) == expected


@pytest.mark.parametrize("size", [2**24, 2**24 - 3, 16_777_199])
def test_a_large_batch_is_solved_at_once(size) -> None:
    """Divisors, not every number up to the batch."""
    plan = None
    with at_most(lines=10_000), contextlib.suppress(ConfigError):
        plan = solve_batch(BatchConfig(global_batch=size), seq_len=8, world=3)
    assert (plan is not None) == (size % 3 == 0)
    assert plan is None or plan.global_batch == size


def test_a_step_of_too_many_samples_is_refused() -> None:
    batch = BatchConfig(tokens_per_step=10**12, micro_batch=8)
    with pytest.raises(ConfigError, match="at most 16777216 are possible"):
        solve_batch(batch, seq_len=2, world=2)


@given(target=st.integers(1, 300), micro=st.integers(1, 16), world=st.integers(1, 8))
def test_every_solution_is_exact(target, micro, world) -> None:
    batch = BatchConfig(global_batch=target, micro_batch=micro)
    try:
        plan = solve_batch(batch, seq_len=8, world=world)
    except ConfigError:
        return
    assert plan.global_batch == target == sum(plan.micro_batches) * plan.accumulation
    assert len(plan.micro_batches) == world
    assert all(1 <= size <= micro for size in plan.micro_batches)


@given(st.integers(0, 500), st.lists(st.floats(0.1, 100.0), min_size=1, max_size=9))
def test_apportion_shares_everything(total, weights) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1.0 + 1e-6
