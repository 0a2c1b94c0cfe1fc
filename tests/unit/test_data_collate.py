"""Tensors of a micro batch: nothing is predicted across rows, packed and padded agree."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.data import IGNORE, Sample, collate
from llmx.errors import DataError


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


def test_packed():
    batch = collate([TWO, ONE], seq_len=512, pad_id=2, layout="packed")
    assert batch["input_ids"].tolist() == [
        [5, 6, 7, 8, 9, 2, 2, 2],
        [4_000_000_000, 2, 2, 2, 2, 2, 2, 2],
    ]
    assert batch["labels"].tolist() == [
        [6, 7, IGNORE, 9, IGNORE, IGNORE, IGNORE, IGNORE],
        # Padding has the id of the EOS token; the EOS token is learned all the same.
        [2, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1] + [0] * 6]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0], [1, 1] + [0] * 6]
    types = {name: tensor.dtype for name, tensor in batch.items()}
    assert types.pop("segment_ids") == torch.int32
    assert set(types.values()) == {torch.int64}


def test_padded_gives_every_row_its_own_line():
    batch = collate([TWO, ONE], seq_len=512, pad_id=0, layout="padded", pad_to=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0], [4_000_000_000, 2, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]


def test_length():
    def length(**options: int | None) -> int:
        batch = collate([TWO], pad_id=0, layout="packed", **options)
        return batch["input_ids"].shape[1]

    assert length(seq_len=512) == 8
    assert length(seq_len=6) == 6
    assert length(seq_len=512, pad_to=None) == 512
    with pytest.raises(DataError, match=r"5 tokens, data\.seq_len is 4"):
        length(seq_len=4)
    with pytest.raises(ValueError, match="loose"):
        collate([TWO], seq_len=8, pad_id=0, layout="loose")


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_no_samples_give_a_line_without_targets(layout: str):
    batch = collate([], seq_len=512, pad_id=3, layout=layout)
    assert batch["input_ids"].tolist() == [[3] * 8]
    assert (batch["labels"] == IGNORE).all()
    assert (batch["segment_ids"] == 0).all()


@st.composite
def samples(draw) -> list[Sample]:
    def row() -> tuple[list[int], list[int]]:
        tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
        targets = draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
        return tokens, [0, *targets[1:]]

    return [
        sample(*[row() for _ in range(draw(st.integers(1, 4)))])
        for _ in range(draw(st.integers(1, 4)))
    ]


def pairs(batch: dict[str, torch.Tensor]) -> Counter:
    """(tokens of the same row up to here, token to predict), as attention sees them."""
    found: Counter = Counter()
    for b, t in zip(*torch.nonzero(batch["labels"] != IGNORE, as_tuple=True), strict=True):
        same = batch["segment_ids"][b] == batch["segment_ids"][b, t]
        context = batch["input_ids"][b, : t + 1][same[: t + 1]]
        assert batch["position_ids"][b, t] == len(context) - 1
        found[(tuple(context.tolist()), int(batch["labels"][b, t]))] += 1
    return found


@settings(deadline=None)
@given(samples())
def test_packed_and_padded_hold_the_same_pairs(some: list[Sample]):
    packed = collate(some, seq_len=64, pad_id=0, layout="packed")
    padded = collate(some, seq_len=64, pad_id=9, layout="padded")
    assert pairs(packed) == pairs(padded)
    assert sum(pairs(packed).values()) == sum(int(s.targets.sum()) for s in some)
