"""Unequal devices: the samples of each rank, so that none waits for another. Pure.

``share_out`` plans the micro batches of every rank from what each of them takes for a micro batch
(``RankSpeed``), ``fit_speed`` finds that from measured times. All in whole numbers: ranks on
different machines compute the same. The method, and what it gains: docs/unequal.md.

``python -m pytest tests/unit/test_plan_balance.py``
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations
from typing import Any

from llmx.config.schema import BatchConfig
from llmx.errors import ConfigError
from llmx.plan.batch import evenly, no_solution, solve_batch
from llmx.plan.types import BalancePlan, BatchPlan, Plan, RankSpeed

Sizes = tuple[tuple[int, ...], ...]
"""Samples of each micro step, by rank."""

FS = 10**15
"""Femtoseconds of a second."""
MICRO_STEP_COST = 200
"""A further micro step in which all ranks wait for each other must save more than this part of a
full one: its communication is in no measurement."""
FACTOR = 1 << 20
"""Corrections of speeds are whole parts of this."""
EXACT_SAMPLES = 1 << 12
"""Up to so many samples of a step, and of a micro step, every way to cut it is looked at."""
NOT_HIDDEN = 10
"""One part in so many of an exchange behind computing is not hidden: the first and the last bucket.
"""
LEAST_GAIN = 0.02
"""A measured split must save this part of the time of the even one: less is noise."""
TIMES_NOISE = 2.0
"""The time that it must save, in relative standard errors of what was measured."""
RECORD_FORMAT = 1
"""The version of ``balance.json``."""
ALIKE = 0.05
"""Ranks of one device type on one host that differ by less count as equally fast."""


def sample_fs(speed: RankSpeed, seq_len: int) -> int:
    """Femtoseconds of a sample that fills one row; at least 1."""
    return max(1, speed.token_fs * seq_len + speed.square_fs * seq_len * seq_len)


def share_out(global_batch: int, balance: BalancePlan, *, seq_len: int) -> Sizes:
    """Micro batches of every rank with the least predicted step time, for whole samples.

    Where it is not known what a micro step exchanges, that counts as a little, so that there are no
    more of them than are of use. ConfigError where the step cannot be cut so, with each rank at
    least one sample in a micro step.
    """
    costs = [(speed.fixed_fs, sample_fs(speed, seq_len)) for speed in balance.speeds]
    limits, accumulation = balance.limits, balance.accumulation
    if not balance.same_steps and accumulation is None:
        return _by_rank(global_batch, costs, limits)
    step = _MicroStep(costs, limits)
    if accumulation is None:
        parts = _cut(global_batch, step, balance.micro_step_fs, balance.overlap)
    else:
        parts = evenly(global_batch, accumulation)
        if not step.least <= parts[-1] <= parts[0] <= step.most:
            raise ConfigError(
                f"batch: global_batch={global_batch} in batch.accumulation={accumulation} micro "
                f"steps is {parts[-1]} samples a micro step; the {len(limits)} ranks take "
                f"{step.least} to {step.most}. Leave accumulation out; it is computed."
            )
    shares = {part: step.shares(part) for part in set(parts)}  # most are alike
    return tuple(zip(*(shares[part] for part in parts), strict=True))


class _MicroStep:
    """A micro step in which all ranks wait for the slowest: the least time for each number of
    samples, each rank taking one at least."""

    def __init__(self, costs: Sequence[tuple[int, int]], limits: Sequence[int]) -> None:
        self.least, self.most = len(costs), sum(limits)
        self._first = max(fixed + sample for fixed, sample in costs)
        # The next sample goes where the micro batch is then shortest.
        self._next = sorted(
            (fixed + count * sample, rank)
            for rank, ((fixed, sample), limit) in enumerate(zip(costs, limits, strict=True))
            for count in range(2, limit + 1)
        )

    def time(self, samples: int) -> int:
        """Femtoseconds, of ``least`` to ``most`` samples."""
        further = samples - self.least
        return max(self._first, self._next[further - 1][0]) if further else self._first

    def shares(self, samples: int) -> list[int]:
        """How many of so many samples each rank takes."""
        counts = [1] * self.least
        for _, rank in self._next[: samples - self.least]:
            counts[rank] += 1
        return counts


def with_exchange(computing_fs: int, exchange_fs: int, *, overlap: bool) -> int:
    """A micro step in which ranks meet."""
    if not overlap:
        return computing_fs + exchange_fs
    return max(computing_fs + exchange_fs // NOT_HIDDEN, exchange_fs)


def _cut(global_batch: int, step: _MicroStep, cost: int | None, overlap: bool) -> Sequence[int]:
    """Samples of each micro step, with the least time of all; largest first."""
    smallest, largest = step.least, min(step.most, global_batch)
    if global_batch < smallest:
        raise _impossible(global_batch, step.least, step.most)
    if largest > EXACT_SAMPLES:
        parts = evenly(global_batch, -(-global_batch // largest))
        if parts[-1] < smallest:
            raise _impossible(global_batch, step.least, step.most)
        return parts
    times = [step.time(samples) for samples in range(smallest, largest + 1)]

    def fastest() -> int:
        return min(range(smallest, largest + 1), key=lambda n: (times[n - smallest] / n, -n))

    if cost is None:
        cost, overlap = times[fastest() - smallest] // MICRO_STEP_COST + 1, False
    times = [with_exchange(time_fs, cost, overlap=overlap) for time_fs in times]
    # Far from the end, the micro step with the most samples a second; then all ways are tried.
    best = fastest()
    repeated = max(0, (global_batch - max(EXACT_SAMPLES, 8 * largest)) // best)
    remaining = global_batch - repeated * best
    return sorted([best] * repeated + _exact(remaining, smallest, times, step), reverse=True)


def _exact(total: int, least: int, times: list[int], step: _MicroStep) -> list[int]:
    """The micro steps of ``total`` samples with the least sum of times."""
    import numpy as np

    span = len(times)
    step_times = np.array(times, dtype=np.float64)  # sums and least ones alike on all machines
    shortest = np.full(total + 1, np.inf)
    shortest[0] = 0.0
    chosen = np.zeros(total + 1, dtype=np.int64)
    for samples in range(least, total + 1):
        # With the last micro step of least, least + 1, ... samples.
        before = shortest[max(0, samples - least - span + 1) : samples - least + 1][::-1]
        sums = before + step_times[: len(before)]
        at = len(sums) - 1 - int(np.argmin(sums[::-1]))  # of equal ones, the largest micro step
        shortest[samples], chosen[samples] = sums[at], least + at
    if not np.isfinite(shortest[total]):
        raise _impossible(total, step.least, step.most)
    parts = []
    while total:
        parts.append(int(chosen[total]))
        total -= parts[-1]
    return parts


def _impossible(total: int, least: int, most: int) -> ConfigError:
    rule = f"micro steps of {least} to {most} samples, one at least for each rank"
    return no_solution(total, ranks=least, most=most, rule=rule)


def _by_rank(total: int, costs: Sequence[tuple[int, int]], limits: Sequence[int]) -> Sizes:
    """Ranks that wait for each other once a step: each has as many micro steps as it needs."""
    if total < len(costs):
        raise _impossible(total, len(costs), sum(limits))

    everyone = range(len(costs))

    def within(time: int) -> list[int]:
        """Samples that each rank computes in this time."""
        counts = []
        for (fixed, sample), limit in zip(costs, limits, strict=True):
            full, remaining = divmod(time, fixed + limit * sample)
            counts.append(int(full * limit + max(0, (remaining - fixed) // sample)))
        return counts

    def time(rank: int) -> int:
        fixed, sample = costs[rank]
        return -(-counts[rank] // limits[rank]) * fixed + counts[rank] * sample

    least = max(fixed + sample for fixed, sample in costs)
    counts = within(_least(lambda time: sum(within(time)) >= total, least))
    surplus = sum(counts) - total
    latest = [(-time(rank), -rank) for rank in everyone if counts[rank] > 1] if surplus else []
    heapq.heapify(latest)
    for _ in range(surplus):
        rank = -heapq.heappop(latest)[1]
        counts[rank] -= 1
        if counts[rank] > 1:
            heapq.heappush(latest, (-time(rank), -rank))
    return tuple(
        evenly(count, -(-count // limit)) for count, limit in zip(counts, limits, strict=True)
    )


def _least(is_enough: Callable[[int], bool], first: int, *, precision: int = 0) -> int:
    """The smallest number from ``first`` on that is enough; all larger ones are, too. To one part
    in ``precision``, where it is given."""
    low, high = first - 1, first
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > max(1, high // precision if precision else 1):
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def busy_fs(sizes: Sizes, speeds: Sequence[RankSpeed], seq_len: int) -> list[int]:
    """Femtoseconds that each rank computes in a step."""
    return [
        sum(speed.fixed_fs + size * sample_fs(speed, seq_len) for size in rank_sizes)
        for rank_sizes, speed in zip(sizes, speeds, strict=True)
    ]


def step_fs(sizes: Sizes, balance: BalancePlan, *, seq_len: int) -> int:
    """Predicted time of a step, with what ranks exchange in each micro step in which all meet."""
    if not balance.same_steps:
        return max(busy_fs(sizes, balance.speeds, seq_len))
    return sum(
        with_exchange(
            max(
                speed.fixed_fs + size * sample_fs(speed, seq_len)
                for size, speed in zip(together, balance.speeds, strict=True)
            ),
            balance.micro_step_fs or 0,
            overlap=balance.overlap,
        )
        for together in zip(*sizes, strict=True)
    )


def even_batch(plan: Plan) -> BatchPlan | None:
    """The even split of a balanced plan's batch; None where there is none."""
    assert plan.balance is not None
    smallest = min(plan.balance.limits)  # fits on all
    config = BatchConfig(global_batch=plan.batch.global_batch, micro_batch=smallest)
    try:
        return solve_batch(config, seq_len=plan.batch.seq_len, world=plan.world_size)
    except ConfigError:
        return None


def balanced_batch(global_batch: int, balance: BalancePlan, *, seq_len: int) -> BatchPlan:
    """The batch plan of a balance."""
    sizes = share_out(global_batch, balance, seq_len=seq_len)
    steps = max(len(rank_sizes) for rank_sizes in sizes)
    alike = all(len(rank_sizes) == steps and len(set(rank_sizes)) == 1 for rank_sizes in sizes)
    return BatchPlan(
        global_batch=sum(map(sum, sizes)),
        accumulation=steps,
        micro_batches=tuple(max(rank_sizes) for rank_sizes in sizes),
        seq_len=seq_len,
        sizes=() if alike else tuple(tuple(rank_sizes) for rank_sizes in sizes),
    )


def with_balance(plan: Plan, balance: BalancePlan) -> Plan:
    """The plan with these speeds, and the micro batches that follow from them."""
    batch = balanced_batch(plan.batch.global_batch, balance, seq_len=plan.batch.seq_len)
    ranks = tuple(replace(rank, micro_batch=batch.micro_batches[rank.rank]) for rank in plan.ranks)
    return replace(plan, batch=batch, balance=balance, ranks=ranks)


def identity(plan: Plan) -> dict[str, Any]:
    """The facts of a run that its speeds depend on, as values of JSON."""
    assert plan.balance is not None
    values: dict[str, Any] = {
        "format": RECORD_FORMAT,
        "devices": [rank.device for rank in plan.ranks],
        "seq_len": plan.batch.seq_len,
        "precision": plan.precision,
        "limits": list(plan.balance.limits),
        "same_steps": plan.balance.same_steps,
    }
    if plan.checkpointing:
        values["checkpointing"] = [list(entry) for entry in plan.checkpointing]
    return values


def is_of(record: Mapping[str, Any], plan: Plan) -> bool:
    """Whether what ``balance.json`` holds is for these ranks."""
    if plan.balance is None:
        return False
    expected: dict[str, Any] = {"checkpointing": None, **identity(plan)}
    return all(record.get(key) == value for key, value in expected.items())


def planned_fs(plan: Plan, speeds: Sequence[RankSpeed]) -> int:
    """Predicted time of a step of a balanced plan, if these are the speeds."""
    assert plan.balance is not None
    sizes = tuple(plan.batch.sizes_of(rank) for rank in range(plan.world_size))
    balance = replace(plan.balance, speeds=tuple(speeds))
    return step_fs(sizes, balance, seq_len=plan.batch.seq_len)


def evened(plan: Plan, balance: BalancePlan, *, noise: float = 0.0) -> BalancePlan:
    """Give all ranks the same speed where the even split would hardly be slower.

    ``noise``: relative standard error of the speeds. A split that follows noise is slower than the
    even one by about as much as it seems to be faster.
    """
    speeds, count = balance.speeds, len(balance.speeds)
    mean = RankSpeed(
        sum(speed.fixed_fs for speed in speeds) // count,
        sum(speed.token_fs for speed in speeds) // count,
        sum(speed.square_fs for speed in speeds) // count,
    )
    even_balance = replace(balance, speeds=(mean,) * count)
    balanced_fs, even_fs = (
        planned_fs(with_balance(plan, variant), speeds) for variant in (balance, even_balance)
    )
    return (
        balance
        if balanced_fs <= (1 - max(LEAST_GAIN, TIMES_NOISE * noise)) * even_fs
        else even_balance
    )


def corrected_speeds(
    plan: Plan, seconds: Sequence[float], work: Sequence[float]
) -> list[RankSpeed]:
    """The speeds of a balanced plan after a drift.

    Args:
        seconds: what each rank has taken for its forward passes.
        work: what it should have taken for its micro batches, in any unit.
    """
    assert plan.balance is not None
    usual = sum(seconds) / sum(work)
    rates = [measured / planned / usual for measured, planned in zip(seconds, work, strict=True)]
    places = [(rank.host, rank.device) for rank in plan.ranks]
    corrected = []
    for rate, place, speed in zip(rates, places, plan.balance.speeds, strict=True):
        alike = sorted(r for r, other in zip(rates, places, strict=True) if other == place)
        typical = alike[(len(alike) - 1) // 2]
        factor = round((typical if abs(rate / typical - 1) < ALIKE else rate) * FACTOR)
        parts = (speed.fixed_fs, speed.token_fs, speed.square_fs)
        fixed, token, square = (part * factor // FACTOR for part in parts)
        corrected.append(RankSpeed(fixed, max(1, token), square))
    return corrected


def fit_speed(points: Sequence[tuple[float, float, float]]) -> RankSpeed:
    """The speed that fits measured (tokens, squared tokens, seconds) best, none of its parts
    negative: least squares of the relative error, over all choices of parts that are zero."""
    import numpy as np

    if not points or min(seconds for *_, seconds in points) <= 0:
        raise ValueError(f"{points}: seconds of at least one micro batch, all above 0, are needed")
    seconds = np.array([point[2] for point in points])
    columns = np.array([(1.0, tokens, squares) for tokens, squares, _ in points]) / seconds[:, None]
    best, fitted = np.inf, np.zeros(3)
    for count in (1, 2, 3):
        for used in combinations((1, 0, 2), count):
            if 1 not in used or len(points) < count:
                continue
            part = columns[:, used]
            scale = np.linalg.norm(part, axis=0)
            if not scale.all():
                continue
            values = np.linalg.lstsq(part / scale, np.ones(len(points)), rcond=1e-9)[0] / scale
            error = float(np.sum((part @ values - 1.0) ** 2))
            if (values >= 0).all() and error < best * 0.999 - 1e-15:
                best, fitted = error, np.zeros(3)
                fitted[list(used)] = values
    fixed, token, square = (round(float(value) * FS) for value in fitted)
    return RankSpeed(fixed, max(1, token), square)


# --- Samples of different lengths ----------------------------------------------------------------

# Even work: the unit is time, not samples. A micro batch takes what its lines take, padded to the
# longest of them, attention with its squared length included. A function of the step's samples and
# the plan, in whole numbers, so that every rank computes the same, and a resumed run what the first
# one did (``python -m pytest tests/unit/test_plan_balance.py``).

Places = tuple[tuple[tuple[int, ...], ...], ...]
"""Places among the samples of a step, of each micro step of each rank."""
PRECISION = 1024
"""The longest time is found to one part in so many."""


@dataclass(frozen=True)
class Rows:
    """The shapes of the samples of a step."""

    lines: Sequence[int]
    """Lines of each sample."""
    lengths: Sequence[int]
    """Tokens of its longest line."""
    squares: Sequence[int] | None = None
    """Squared tokens that attention computes of it; None: those of whole lines, padding included.
    """

    @property
    def alike(self) -> bool:
        """Whether every sample takes the same time."""
        columns = (self.lines, self.lengths, self.squares or ())
        return all(len(set(values)) <= 1 for values in columns)


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
        """Femtoseconds of a micro batch of ``size`` samples from ``first`` on, in the order of
        lengths."""
        tokens = self.tokens(first, size)
        squares = self.squares[first + size] - self.squares[first]
        if self.whole_rows:
            squares = tokens * self.lengths[first]
        return self.balance.speeds[rank].time_fs(tokens, squares)

    def tokens(self, first: int, size: int) -> int:
        """Tokens of such a micro batch, padding included."""
        return (self.lines[first + size] - self.lines[first]) * self.lengths[first]

    def _is_too_long(self, rank: int, first: int, budget: int, size: int) -> bool:
        """Whether a micro batch has no room on a rank, or takes longer than ``budget``."""
        has_no_room = self.tokens(first, size) > self.room[rank]
        return has_no_room or self.time(rank, first, size) > budget

    def fill(self, time: int) -> list[int] | None:
        """Samples of each bin where no rank computes longer in a step; None: they do not fit."""
        first, sizes = 0, []
        for rank, _ in self.bins:
            too_long = partial(self._is_too_long, rank, first, time // self.steps[rank])
            sizes.append(bisect_left(range(1, len(self.order) - first + 1), True, key=too_long))
            first += sizes[-1]
        return sizes if first == len(self.order) else None

    def places(self) -> Places:
        sizes = self.fill(_least(lambda time: self.fill(time) is not None, 1, precision=PRECISION))
        assert sizes is not None
        places: list[list[tuple[int, ...]]] = [[()] * steps for steps in self.steps]
        first = 0
        for (rank, step), size in zip(self.bins, sizes, strict=True):
            places[rank][step] = tuple(sorted(self.order[first : first + size]))
            first += size
        return tuple(map(tuple, places))
