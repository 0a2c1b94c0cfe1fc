"""The hash of weights: the same however they are cut, another one for a single bit.

``python -m pytest tests/unit/test_train_state_hash.py``
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.checkpoint.state import engine_state as state_hash
from llmx.checkpoint.state.engine_state import combine, lanes

MASK = (1 << 64) - 1


def splitmix(bits: int, position: int) -> tuple[int, int]:
    """One element's two lanes in exact integers, for comparison."""
    x = (bits + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return x, ((x ^ (x >> 32)) * 0xBF58476D1CE4E5B9) & MASK


def test_it_is_splitmix64_of_bits_and_position() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3e30, float("nan")])
    expected = [0, 0]
    for position, bits in enumerate(values.view(torch.int32).tolist()):
        one, two = splitmix(bits & MASK, position + 10)
        expected = [(expected[0] + one) & MASK, (expected[1] + two) & MASK]
    assert [x & MASK for x in lanes(values, 10).tolist()] == expected


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 300),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]),
)
def test_parts_add_up_to_the_whole(size: int, cuts: list[int], dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [lanes(values[a:b], a) for a, b in itertools.pairwise(edges)]
    assert torch.equal(sum(parts), lanes(values, 0))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = lanes(values, 5)
    monkeypatch.setitem(state_hash.CHUNK, "cpu", 7)
    assert torch.equal(lanes(values, 5), whole)


def test_every_single_bit_and_every_exchange_changes_it() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    seen = {tuple(lanes(values, 0).tolist())}
    for element in range(64):
        for bit in range(32):
            changed = values.numpy().copy().view(np.uint32)
            changed[element] ^= np.uint32(1 << bit)
            seen.add(tuple(lanes(torch.from_numpy(changed.view(np.float32)), 0).tolist()))
    exchanged = values.clone()
    exchanged[[3, 9]] = exchanged[[9, 3]]
    seen.add(tuple(lanes(exchanged, 0).tolist()))
    assert len(seen) == 64 * 32 + 2
    # Either lane alone tells them apart, too.
    assert len({first for first, _ in seen}) == len({second for _, second in seen}) == len(seen)


def test_names_count_and_their_order_does_not() -> None:
    sums = torch.tensor([[1, 2], [3, 4]])
    assert combine(["a", "b"], sums) == combine(["b", "a"], sums.flip(0))
    assert combine(["a", "b"], sums) != combine(["a", "c"], sums)
    assert combine(["a", "b"], sums) != combine(["b", "a"], sums)
    assert len(combine(["a", "b"], sums)) == 32
