"""How long a rank computes: wall times of all ranks are equal, since they wait for each other.

The three phases of a step are timed: forward passes, backward passes, updates. Up to ZeRO stage 2
forward passes communicate nothing, so a rank that takes longer for them is a slower one; in the
other two, ranks wait for each other. At stage 3, and in tasks whose loss is one of all ranks,
nothing is measured.

``python -m pytest tests/unit/test_train_step_times.py``
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

TIMES_LONGER = 1.5
"""A rank that computes so many times as long as it should is reported."""
LINES = 3
LEAST_S = 30.0
"""... in so many lines in a row, and for so long: a neighbour that comes and goes is none."""


PHASES = ("forward", "backward", "update")


class StepTimes:
    """Seconds of the phases of this rank's steps. Nothing here waits for the device but ``take``.

    On CUDA, two events a phase and micro step; they cost microseconds.
    """

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self._device = device
        self.active = active
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, one of ``PHASES`` of a micro step."""
        if not self.active:
            yield
        elif self._device.type == "cuda":
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            yield
            pair[1].record()
            self._events.append((name, *pair))
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began

    def take(self) -> tuple[float, ...]:
        """Seconds of each phase since the last call, in the order of ``PHASES``."""
        if self._events:
            torch.cuda.synchronize(self._device)
            for name, begin, end in self._events:
                self._seconds[name] += begin.elapsed_time(end) / 1e3
        seconds = tuple(self._seconds[name] for name in PHASES)
        self._seconds, self._events = dict.fromkeys(PHASES, 0.0), []
        return seconds


def idle_share(seconds: Sequence[float]) -> float:
    """The mean part of the slowest rank's time that ranks wait for it."""
    slowest = max(seconds)
    return sum(1.0 - each / slowest for each in seconds) / len(seconds) if slowest > 0 else 0.0


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
                min(both) for both in zip(factors, _times_longer(seconds, work), strict=True)
            ]
        found = []
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
                found.append((rank, factor))
        return found


def _times_longer(seconds: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Than the median rank, each against what is expected of it; 0 where nothing is known."""
    rates = [
        each / planned if planned else 0.0 for each, planned in zip(seconds, expected, strict=True)
    ]
    usual = sorted(rates)[(len(rates) - 1) // 2]
    return [rate / usual if usual > 0 else 0.0 for rate in rates]
