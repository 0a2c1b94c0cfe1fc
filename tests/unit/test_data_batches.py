"""What a step takes: the order of the samples, and the tensors of a micro batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmx.data import IGNORE, Sample, collate
from llmx.data.order import permutation, samples_of_step
from llmx.errors import DataError
from llmx.plan.types import BatchPlan

# The order: a permutation an epoch, the same for every split over ranks


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
    assert (run.shape, run.dtype) == ((steps * global_batch,), np.int64)
    for start in range(0, len(run) - num_samples + 1, num_samples):
        epoch = run[start : start + num_samples]
        assert sorted(epoch.tolist()) == list(range(num_samples))


EQUAL = ((2, 2, 2), (0, 0, 0), (3, 3, 3), (1, 1, 1))


@pytest.mark.parametrize("sizes", [((3,), (1, 2, 1)), ((1, 4), (2, 2), (4,)), EQUAL])
@pytest.mark.parametrize("missing", [0, 1, 5, 40])
def test_every_split_covers_the_step_once_in_order(sizes: tuple, missing: int):
    whole, unequal = sum(map(sum, sizes)), () if sizes == EQUAL else sizes
    batch = BatchPlan(whole, max(map(len, sizes)), tuple(map(max, sizes)), 8, unequal)
    samples = max(0, whole - missing)
    parts = {
        (micro_step, rank): batch.places(rank, micro_step, samples=samples)
        for rank, own in enumerate(sizes)
        for micro_step in range(len(own))
    }
    if not missing:
        assert all(len(part) == sizes[rank][step] for (step, rank), part in parts.items())
    assert [place for _, part in sorted(parts.items()) for place in part] == list(range(samples))


def test_the_order_is_fixed_for_ever():
    """A change here would change every resumed run: the numbers are part of the contract."""
    found = samples_of_step(3, global_batch=5, num_samples=8, seed=42)
    assert found.tolist() == [6, 6, 0, 7, 2]
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, num_samples=8, seed=42)[0] = 1


def test_wrong_use_is_refused():
    with pytest.raises(DataError, match="no samples"):
        samples_of_step(0, global_batch=1, num_samples=0, seed=0)
    batch = BatchPlan(4, 2, (2,), 8)
    with pytest.raises(ValueError, match="5 samples of a step are more than 4"):
        batch.places(0, 0, samples=5)
    with pytest.raises(ValueError, match="micro_step 2"):
        batch.places(0, 2, samples=4)


# The tensors: nothing is predicted across rows, packed and padded agree


def sample(*rows: tuple[list[int], list[int]]) -> Sample:
    """Rows as (tokens, targets)."""
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in rows)])[:-1]
    return Sample(
        np.array([t for tokens, _ in rows for t in tokens], np.uint32),
        np.array([t for _, targets in rows for t in targets], np.bool_),
        starts.astype(np.int64),
    )


TWO = sample(([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1]))
ONE = sample(([4_000_000_000, 2], [0, 1]))


def test_packed_lines_and_padded_ones():
    batch = collate([TWO, ONE], seq_len=512, pad_id=2, layout="packed")
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 2, 2, 2], [4_000_000_000] + [2] * 7]
    # Padding has the id of the EOS token; the EOS token is learned all the same.
    first = [6, 7, IGNORE, 9, IGNORE, IGNORE, IGNORE, IGNORE]
    assert batch["labels"].tolist() == [first, [2] + [IGNORE] * 7]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1] + [0] * 6]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0], [1, 1] + [0] * 6]
    types = {name: tensor.dtype for name, tensor in batch.items()}
    assert types.pop("segment_ids") == torch.int32
    assert set(types.values()) == {torch.int64}
    padded = collate([TWO, ONE], seq_len=512, pad_id=0, layout="padded", pad_to=1)
    assert padded["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0], [4_000_000_000, 2, 0]]
    assert padded["segment_ids"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]


def test_length():
    def length(**options: int) -> int:
        return collate([TWO], pad_id=0, layout="packed", **options)["input_ids"].shape[1]

    assert length(seq_len=512) == 8
    assert length(seq_len=6) == 6
    with pytest.raises(DataError, match=r"5 tokens, data\.seq_len is 4"):
        length(seq_len=4)
    with pytest.raises(ValueError, match="loose"):
        collate([TWO], seq_len=8, pad_id=0, layout="loose")


TOKENS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=6)
ROW = TOKENS.map(lambda row: ([t for t, _ in row], [0, *(target for _, target in row[1:])]))
SAMPLES = st.lists(st.lists(ROW, min_size=1, max_size=4), min_size=1, max_size=4)


def pairs(batch: dict[str, torch.Tensor]) -> Counter:
    """(tokens of the same row up to here, token to predict), as attention sees them."""
    found: Counter = Counter()
    for b, t in zip(*torch.nonzero(batch["labels"] != IGNORE, as_tuple=True), strict=True):
        same = batch["segment_ids"][b] == batch["segment_ids"][b, t]
        context = batch["input_ids"][b, : t + 1][same[: t + 1]]
        assert batch["position_ids"][b, t] == len(context) - 1
        found[(tuple(context.tolist()), int(batch["labels"][b, t]))] += 1
    return found


@given(SAMPLES)
def test_packed_and_padded_hold_the_same_pairs(rows: list):
    some = [sample(*of_sample) for of_sample in rows]
    packed = collate(some, seq_len=64, pad_id=0, layout="packed")
    padded = collate(some, seq_len=64, pad_id=9, layout="padded")
    assert pairs(packed) == pairs(padded)
    assert sum(pairs(packed).values()) == sum(int(s.targets.sum()) for s in some)
