"""The sample order: a permutation an epoch, the same for every split over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.data import permutation, rank_slice, samples_of_step
from llmx.errors import DataError


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 60),
    global_batch=st.integers(1, 90),
    seed=st.integers(0, 2**64 - 1),
    steps=st.integers(1, 6),
)
def test_steps_are_the_epochs_cut_into_batches(num_samples, global_batch, seed, steps):
    run = np.concatenate(
        [
            samples_of_step(k, global_batch=global_batch, num_samples=num_samples, seed=seed)
            for k in range(steps)
        ]
    )
    assert run.shape == (steps * global_batch,)
    assert run.dtype == np.int64
    for start in range(0, len(run) - num_samples + 1, num_samples):
        epoch = run[start : start + num_samples]
        assert sorted(epoch.tolist()) == list(range(num_samples))


@settings(deadline=None)
@given(
    micro_batches=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any).map(tuple),
    accumulation=st.integers(1, 5),
    step=st.integers(0, 40),
    num_samples=st.integers(1, 100),
)
def test_every_split_covers_the_step_once_in_order(micro_batches, accumulation, step, num_samples):
    samples = samples_of_step(
        step,
        global_batch=sum(micro_batches) * accumulation,
        num_samples=num_samples,
        seed=1,
    )
    parts = [
        rank_slice(
            samples,
            micro_batches=micro_batches,
            accumulation=accumulation,
            rank=rank,
            micro_step=micro_step,
        )
        for micro_step in range(accumulation)
        for rank in range(len(micro_batches))
    ]
    sizes = [len(part) for part in parts]
    assert sizes == [*micro_batches] * accumulation
    assert np.concatenate(parts).tolist() == samples.tolist()


def test_the_order_is_fixed_for_ever():
    """A change here would change every resumed run: the numbers are part of the contract."""
    assert samples_of_step(3, global_batch=5, num_samples=8, seed=42).tolist() == FIXED


FIXED = [6, 6, 0, 7, 2]


def test_epochs_and_seeds_differ_and_the_permutation_cannot_be_changed():
    first = permutation(0, num_samples=100, seed=0)
    assert first.tolist() != permutation(1, num_samples=100, seed=0).tolist()
    assert first.tolist() != permutation(0, num_samples=100, seed=1).tolist()
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_wrong_use_is_refused():
    with pytest.raises(DataError, match="no samples"):
        samples_of_step(0, global_batch=1, num_samples=0, seed=0)
    with pytest.raises(ValueError, match="are more than sum"):
        rank_slice(np.arange(5), micro_batches=(2,), accumulation=2, rank=0, micro_step=0)
    with pytest.raises(ValueError, match="micro_step 2"):
        rank_slice(np.arange(4), micro_batches=(2,), accumulation=2, rank=0, micro_step=2)
