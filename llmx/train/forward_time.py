"""How long a rank computes: wall times of all ranks are equal, since they wait for each other.

Forward passes are timed. Up to ZeRO stage 2 they communicate nothing, so a rank that takes longer
for them is a slower one; the backward pass, in which ranks wait for each other, is about as much
longer. At stage 3, and in tasks whose loss is one of all ranks, nothing is measured.

``python -m pytest tests/unit/test_train_forward_time.py``
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


class ForwardTime:
    """Seconds of forward passes of this rank. Nothing here waits for the device but ``take``."""

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self._device = device
        self.active = active
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, one forward pass."""
        if not self.active:
            yield
        elif self._device.type == "cuda":
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds since the last call."""
        if self._events:
            torch.cuda.synchronize(self._device)
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        seconds, self._seconds, self._events = self._seconds, 0.0, []
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

    def see(self, seconds: Sequence[float], *, now: float) -> list[tuple[int, float]]:
        """Ranks that are stragglers ``now`` (in seconds) and were not before, each with how many
        times longer it takes than the others, by the median of all ranks."""
        rates = [each / planned for each, planned in zip(seconds, self._expected, strict=True)]
        usual = sorted(rates)[(len(rates) - 1) // 2]
        found = []
        for rank, rate in enumerate(rates):
            slow = usual > 0 and rate > TIMES_LONGER * usual
            if not slow:
                self._lines[rank] = 0
                self._named.discard(rank)
                continue
            if not self._lines[rank]:
                self._since[rank] = now
            self._lines[rank] += 1
            lasts = self._lines[rank] >= LINES and now - self._since[rank] >= LEAST_S
            if lasts and rank not in self._named:
                self._named.add(rank)
                found.append((rank, rate / usual))
        return found
