"""Samples of different lengths: every one is trained once, and ranks finish together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.plan.balance import Rows, balanced_batch, even_work, share_out
from llmx.plan.types import BalancePlan, BatchPlan, RankSpeed

SEQ_LEN = 512


def planned(
    total: int, speeds: list[RankSpeed], limit: int, *, same_steps: bool
) -> tuple[BatchPlan, BalancePlan]:
    balance = BalancePlan("measured", tuple(speeds), (limit,) * len(speeds), same_steps=same_steps)
    return balanced_batch(total, balance, seq_len=SEQ_LEN), balance


def times(places, rows: Rows, balance: BalancePlan, pad_to: int = 8) -> list[list[int]]:
    """Femtoseconds of each micro step of each rank."""
    found = []
    for own, speed in zip(places, balance.speeds, strict=True):
        found.append([])
        for part in own:
            longest = max((rows.lengths[at] for at in part), default=0)
            length = min(SEQ_LEN, -(-longest // pad_to) * pad_to)
            lines = sum(rows.lines[at] for at in part)
            squares = lines * length**2
            if rows.squares is not None:
                squares = sum(rows.squares[at] for at in part)
            found[-1].append(speed.time_fs(lines * length, squares) if part else 0)
    return found


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, SEQ_LEN), min_size=4, max_size=40),
    factors=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    limit=st.integers(2, 8),
    same_steps=st.booleans(),
    whole=st.booleans(),
    short=st.integers(0, 3),
)
def test_every_sample_is_trained_once(lengths, factors, limit, same_steps, whole, short) -> None:
    speeds = [RankSpeed(1000, 10 * factor, factor) for factor in factors]
    batch, balance = planned(len(lengths), speeds, limit, same_steps=same_steps)
    lengths = lengths[: len(lengths) - short]  # the last step may have fewer
    squares = None if whole else [n * n for n in lengths]
    rows = Rows([1] * len(lengths), lengths, squares)
    places = even_work(rows, batch=batch, balance=balance, seq_len=SEQ_LEN, pad_to=8)
    if places is None:
        assert len(set(lengths)) == 1
        return
    assert sorted(at for own in places for part in own for at in part) == list(range(len(lengths)))
    assert [len(own) for own in places] == [len(batch.sizes_of(r)) for r in range(len(speeds))]
    for part in (part for own in places for part in own if part):
        longest = max(lengths[at] for at in part)
        assert len(part) * min(SEQ_LEN, -(-longest // 8) * 8) <= limit * SEQ_LEN
    assert places == even_work(rows, batch=batch, balance=balance, seq_len=SEQ_LEN, pad_to=8)


@pytest.mark.parametrize("same_steps", [False, True])
@pytest.mark.parametrize("factors", [(1, 1), (1, 2), (2, 5, 8), (1, 4, 4, 1)])
def test_ranks_finish_together(factors, same_steps) -> None:
    """Chats of all lengths: less of a step is spent in waiting than with slices of as many samples;
    what is left are whole samples, of which a slow rank takes four a micro step."""
    draw = random.Random(3)
    speeds = [RankSpeed(0, 10 * factor, factor // 2) for factor in factors]
    total = 48 * len(factors)
    batch, balance = planned(total, speeds, 16, same_steps=same_steps)
    idle = {"work": 0.0, "samples": 0.0}
    for _ in range(5):
        lengths = [min(SEQ_LEN, int(draw.lognormvariate(4.5, 0.9)) + 4) for _ in range(total)]
        rows = Rows([1] * total, lengths)
        work = even_work(rows, batch=batch, balance=balance, seq_len=SEQ_LEN, pad_to=8)
        steps = [range(len(batch.sizes_of(rank))) for rank in range(len(speeds))]
        slices = tuple(
            tuple(tuple(batch.places(rank, step, samples=total)) for step in own)
            for rank, own in enumerate(steps)
        )
        for name, places in (("work", work), ("samples", slices)):
            found = times(places, rows, balance)
            if same_steps:
                longest = sum(map(max, zip(*found, strict=True)))
            else:
                longest = max(map(sum, found))
            idle[name] += 1 - sum(map(sum, found)) / (longest * len(found))
    assert idle["work"] / 5 < 0.15
    assert idle["work"] < 0.7 * idle["samples"]


def test_equal_samples_are_left_to_the_plan() -> None:
    batch, balance = planned(8, [RankSpeed(0, 1), RankSpeed(0, 3)], 8, same_steps=True)
    assert batch.micro_batches == (6, 2)
    rows = Rows([1] * 8, [SEQ_LEN] * 8)
    assert even_work(rows, batch=batch, balance=balance, seq_len=SEQ_LEN, pad_to=8) is None


def test_the_squared_part_counts() -> None:
    """Two long rows cost as much attention as many short ones with more tokens."""
    speeds = [RankSpeed(0, 1, 10)] * 2
    balance = BalancePlan("measured", tuple(speeds), (34, 34), same_steps=True)
    sizes = share_out(34, speeds=speeds, limits=(34, 34), seq_len=SEQ_LEN, same_steps=True)
    batch = BatchPlan(34, 1, (17, 17), SEQ_LEN, sizes)
    rows = Rows([1] * 34, [512] * 2 + [128] * 32)
    (first,), (second,) = even_work(rows, batch=batch, balance=balance, seq_len=SEQ_LEN, pad_to=8)
    assert set(first) == {0, 1}, (first, second)
