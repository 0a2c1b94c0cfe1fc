"""Times how long a rank computes: wall times of all ranks are equal, as they wait for each other.

The three phases of a step are timed: forward passes, backward passes, updates. Up to ZeRO stage 2
forward passes communicate nothing, so a rank that takes longer for them is a slower one; in the
other two, ranks wait for each other.

At stage 3, and in tasks with a joint loss, forward passes wait as well. There ``SpeedProbe`` times
a small fixed piece of work beside a ``train`` line now and then: products of two matrices of the
run's dtype, about as wide as the model. They take 10 ms on a GPU and 100 ms on a CPU (a whole
period of a CPU quota), twice a minute at most, so 0.03 and 0.3 % of the time. No communication, no
random numbers, nothing of the model.

Tried by ``python -m pytest tests/unit/test_train_step_times.py``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import torch

TIMES_LONGER = 1.5
"""Factor of the expected time from which on a rank is reported."""
LINES = 3
"""Lines in a row at which a rank is that slow, before it is reported."""
LEAST_S = 30.0
"""Seconds for which a rank is that slow, before it is reported: a neighbour comes and goes."""


PHASES = ("forward", "backward", "update")


class StepTimes:
    """Seconds of the phases of this rank's steps. Nothing here waits for the device but ``take``.

    On CUDA, two events a phase and micro step; they cost microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, one of ``PHASES`` of a micro step."""
        if self._device.type == "cuda":
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            yield
            pair[1].record()
            self._events.append((name, *pair))
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        if self._events:
            synchronize(self._device)
            for name, begin, end in self._events:
                self._seconds[name] += begin.elapsed_time(end) / 1e3
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        self._events = []
        return seconds


def idle_share(seconds: Sequence[float]) -> float:
    """The mean part of the slowest rank's time that ranks wait for it."""
    slowest = max(seconds)
    return sum(1.0 - rank_s / slowest for rank_s in seconds) / len(seconds) if slowest > 0 else 0.0


class StragglerWatch:
    """Finds ranks that compute longer than they should."""

    def __init__(self, expected: Sequence[float]) -> None:
        """``expected``: what each rank should compute in a step, in any unit."""
        self._expected = expected
        self._lines = [0] * len(expected)
        self._since = [0.0] * len(expected)
        self._named: set[int] = set()

    def see(
        self, seconds: Sequence[float], work: Sequence[float] = (), *, now: float
    ) -> list[tuple[int, float]]:
        """Ranks that are stragglers ``now`` (in seconds) and were not before, each with how many
        times longer it takes than the others, by the median of all ranks.

        ``work``: what each had to compute this time, in any unit. By it, too, a straggler takes
        longer: one that was given longer samples is none.
        """
        factors = _times_longer(seconds, self._expected)
        if work:
            factors = [
                min(pair) for pair in zip(factors, _times_longer(seconds, work), strict=True)
            ]
        stragglers = []
        for rank, factor in enumerate(factors):
            if factor <= TIMES_LONGER:
                self._lines[rank] = 0
                self._named.discard(rank)
                continue
            if not self._lines[rank]:
                self._since[rank] = now
            self._lines[rank] += 1
            lasts = self._lines[rank] >= LINES and now - self._since[rank] >= LEAST_S
            if lasts and rank not in self._named:
                self._named.add(rank)
                stragglers.append((rank, factor))
        return stragglers


def _times_longer(seconds: Sequence[float], expected: Sequence[float]) -> list[float]:
    """How many times as long each rank takes as the median one, for its expected work; else 0."""
    rates = [
        rank_s / planned if planned else 0.0
        for rank_s, planned in zip(seconds, expected, strict=True)
    ]
    usual = _typical(rates)
    return [rate / usual if usual > 0 else 0.0 for rate in rates]


EVERY_S = 30.0
"""Shortest time between two probes."""
PIECE_S = {"cuda": 0.01, "cpu": 0.1}
"""Duration of a probe when it is first timed."""
LEAST_WIDTH, MOST_WIDTH = 256, 2048
"""Three matrices of 2048 x 2048 take 24 MiB in 16 bits."""
MOST_PRODUCTS = 10_000
FIRST = 3
"""Probes from which the usual time of each rank follows."""


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Products:
    """A small fixed piece of work: products of two matrices. It communicates nothing and draws no
    random numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, width: int) -> None:
        self._device = device
        size = min(MOST_WIDTH, max(LEAST_WIDTH, width))
        values = torch.arange(size * size, device=device).remainder(17).sub(8).div(8 * size)
        self._one = values.view(size, size).to(dtype)
        self._other, self._product = self._one.t().contiguous(), torch.empty_like(self._one)
        self.count = 1
        self.seconds()  # a kernel is chosen
        count = PIECE_S[device.type] / max(self.seconds(), 1e-7)
        self.count = min(MOST_PRODUCTS, max(1, round(count)))
        self.flops = 2.0 * size**3 * self.count

    @torch.no_grad()
    def run(self) -> None:
        """Multiply, and wait for the result."""
        for _ in range(self.count):
            torch.mm(self._one, self._other, out=self._product)
        synchronize(self._device)

    def seconds(self) -> float:
        """Seconds that one product takes now."""
        synchronize(self._device)
        began = time.perf_counter()
        self.run()
        return (time.perf_counter() - began) / self.count


class SpeedProbe:
    """Times the same matrix products now and then."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._due = True
        self._probed = self._before = -math.inf

    def at_line(self) -> float:
        """Seconds of one product, where a probe is due; else 0."""
        return self._products.seconds() if self._due else 0.0

    def after_line(self, now: float) -> None:
        """``now``: seconds by the clock of rank 0, so that all ranks probe at the same lines."""
        if self._due:
            self._probed = now
        # By when the next line comes, if it takes as long as this one.
        gap = now - self._before if math.isfinite(self._before) else 0.0
        self._before = now
        self._due = now + gap - self._probed >= EVERY_S


def usual_probes(
    probes: Sequence[Sequence[float]], devices: Sequence[str], planned: Sequence[float]
) -> list[float]:
    """The time of a probe that each rank should take, by the first of all ranks: its own, but not
    more than ranks on the same type of device take, for their planned speeds.

    Args:
        probes: the first lines, each with a time for every rank.
        devices: the type of each rank's device.
        planned: how long each rank takes for the same work by the plan, in any unit.
    """
    typical = [_typical(values) for values in zip(*probes, strict=True)]
    rates = [seconds / plan for seconds, plan in zip(typical, planned, strict=True)]
    alike = {
        name: _typical([r for r, device in zip(rates, devices, strict=True) if device == name])
        for name in devices
    }
    return [
        min(seconds, alike[name] * plan)
        for seconds, name, plan in zip(typical, devices, planned, strict=True)
    ]


def _typical(values: Sequence[float]) -> float:
    """The median; of two the smaller."""
    return sorted(values)[(len(values) - 1) // 2]
