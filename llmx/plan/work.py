"""Which samples of a step go to which rank, where they differ in length: even work. Pure.

The unit is time, not samples: a micro batch takes what its lines take, padded to the longest of
them, attention with its squared length included. A function of the step's samples and the plan, in
whole numbers, so that every rank computes the same, and a resumed run what the first one did.

``python -m pytest tests/unit/test_plan_work.py``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmx.plan.balance import sample_fs
from llmx.plan.types import BalancePlan, BatchPlan

Places = tuple[tuple[tuple[int, ...], ...], ...]
"""Places among the samples of a step, of each micro step of each rank."""
PRECISION = 1024
"""The longest time is found to one part in so many."""


@dataclass(frozen=True)
class Rows:
    """What the samples of a step look like in a micro batch."""

    lines: Sequence[int]
    """Lines of each sample."""
    lengths: Sequence[int]
    """Tokens of its longest line."""
    squares: Sequence[int] | None = None
    """Squared tokens that attention computes of it; None: those of whole lines, padding included.
    """

    @property
    def alike(self) -> bool:
        """Every sample takes the same."""
        found = (self.lines, self.lengths, self.squares or ())
        return all(len(set(values)) <= 1 for values in found)


def even_work(
    rows: Rows, *, batch: BatchPlan, balance: BalancePlan, seq_len: int, pad_to: int
) -> Places | None:
    """The samples of each micro step of each rank, such that the slowest micro batch is as fast as
    it can be. None where all samples are alike: then the sizes of the plan are right.

    Samples are put in the order of their lengths, so that a micro batch has little padding, and
    each micro batch takes consecutive ones; the fastest ranks have the longest, since a slow rank
    is filled more exactly with short ones. A micro batch has at most the tokens, padding included,
    of as many whole samples as the plan allows, and may have none.
    """
    if rows.alike:
        return None
    return _Filling(rows, batch, balance, seq_len=seq_len, pad_to=pad_to).places()


class _Filling:
    def __init__(
        self, rows: Rows, batch: BatchPlan, balance: BalancePlan, *, seq_len: int, pad_to: int
    ) -> None:
        count = len(rows.lengths)
        squares = rows.squares or [0] * count
        self.order = sorted(range(count), key=lambda at: (-rows.lengths[at], -squares[at], at))
        self.lengths = [
            min(seq_len, -(-max(1, rows.lengths[at]) // pad_to) * pad_to) for at in self.order
        ]
        self.lines = [0, *accumulate(rows.lines[at] for at in self.order)]
        self.whole_rows = rows.squares is None
        self.squares = [0, *accumulate(squares[at] for at in self.order)]
        self.balance = balance
        # So that as many samples of any form as the plan allows always have room.
        widest = max(seq_len, max(rows.lines) * max(self.lengths))
        self.room = [limit * widest for limit in balance.limits]
        self.steps = [len(batch.sizes_of(rank)) for rank in range(len(balance.speeds))]
        by_speed = sorted(
            range(len(self.steps)),
            key=lambda rank: (sample_fs(balance.speeds[rank], seq_len), rank),
        )
        self.bins = [(rank, step) for rank in by_speed for step in range(self.steps[rank])]

    def time(self, rank: int, first: int, size: int) -> int:
        """Of a micro batch of ``size`` samples from ``first`` on, in the order of lengths."""
        tokens = self.tokens(first, size)
        squares = self.squares[first + size] - self.squares[first]
        if self.whole_rows:
            squares = tokens * self.lengths[first]
        return self.balance.speeds[rank].time_fs(tokens, squares)

    def tokens(self, first: int, size: int) -> int:
        """Of such a micro batch, padding included."""
        return (self.lines[first + size] - self.lines[first]) * self.lengths[first]

    def fill(self, time: int) -> list[int] | None:
        """Samples of each bin where no rank computes longer in a step; None: they do not fit."""
        first, sizes = 0, []
        for rank, _ in self.bins:
            low, high = 0, len(self.order) - first
            budget = time // self.steps[rank]
            while low < high:
                middle = (low + high + 1) // 2
                if (
                    self.tokens(first, middle) <= self.room[rank]
                    and self.time(rank, first, middle) <= budget
                ):
                    low = middle
                else:
                    high = middle - 1
            sizes.append(low)
            first += low
        return sizes if first == len(self.order) else None

    def places(self) -> Places:
        low, high = 0, 1
        while (sizes := self.fill(high)) is None:
            low, high = high, 2 * high
        while high - low > max(1, high // PRECISION):
            middle = (low + high) // 2
            found = self.fill(middle)
            if found is None:
                low = middle
            else:
                high, sizes = middle, found
        places: list[list[tuple[int, ...]]] = [[()] * steps for steps in self.steps]
        first = 0
        for (rank, step), size in zip(self.bins, sizes, strict=True):
            places[rank][step] = tuple(sorted(self.order[first : first + size]))
            first += size
        return tuple(map(tuple, places))
