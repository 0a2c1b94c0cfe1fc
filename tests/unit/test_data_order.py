"""The sample order: a permutation an epoch, the same for every split over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.data.order import permutation, samples_of_step
from llmx.errors import DataError
from llmx.plan.types import BatchPlan


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
    missing=st.integers(0, 40),
)
def test_every_split_covers_the_step_once_in_order(micro_batches, accumulation, missing):
    batch = BatchPlan(sum(micro_batches) * accumulation, accumulation, micro_batches, 8)
    samples = max(0, batch.global_batch - missing)
    parts = [
        batch.places(rank, micro_step, samples=samples)
        for micro_step in range(accumulation)
        for rank in range(len(micro_batches))
    ]
    if not missing:
        assert [len(part) for part in parts] == [*micro_batches] * accumulation
    assert [place for part in parts for place in part] == list(range(samples))


@settings(deadline=None)
@given(
    sizes=st.lists(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
    ).map(tuple),
    missing=st.integers(0, 20),
)
def test_micro_steps_that_differ_cover_it_once_too(sizes, missing):
    whole = sum(map(sum, sizes))
    batch = BatchPlan(whole, max(map(len, sizes)), tuple(map(max, sizes)), 8, sizes)
    samples = max(0, whole - missing)
    places = {
        (micro_step, rank): batch.places(rank, micro_step, samples=samples)
        for rank, own in enumerate(sizes)
        for micro_step in range(len(own))
    }
    if not missing:
        assert all(len(part) == sizes[rank][step] for (step, rank), part in places.items())
    assert [place for _, part in sorted(places.items()) for place in part] == list(range(samples))


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
    batch = BatchPlan(4, 2, (2,), 8)
    with pytest.raises(ValueError, match="5 samples of a step are more than 4"):
        batch.places(0, 0, samples=5)
    with pytest.raises(ValueError, match="micro_step 2"):
        batch.places(0, 2, samples=4)
