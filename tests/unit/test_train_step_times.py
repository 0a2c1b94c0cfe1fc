"""Which rank the others wait for: idle shares, and stragglers that are named once; where forward
passes wait for each other, by a small piece of work of each rank's own that changes nothing."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from llmx.train import step_times
from llmx.train.step_times import (
    EVERY_S,
    LINES,
    Products,
    SpeedProbe,
    StepTimes,
    StragglerWatch,
    idle_share,
    usual_probes,
)

CPU = torch.device("cpu")


def test_only_phases_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timed = StepTimes(CPU)
    for _ in range(2):
        with timed.phase("forward"):
            now[0] += 0.25
        now[0] += 8.0
        with timed.phase("update"):
            now[0] += 0.125
    assert timed.take() == {"forward": 0.5, "backward": 0.0, "update": 0.25}
    assert set(timed.take().values()) == {0.0}


def test_the_idle_share() -> None:
    assert idle_share([2.0, 2.0]) == idle_share([0.0, 0.0]) == 0.0
    assert idle_share([1.0, 2.0]) == pytest.approx(0.25)
    assert idle_share([1.0, 4.0, 4.0, 4.0]) == pytest.approx(0.75 / 4)


class Seen:
    """What each of some lines of a watch says."""

    def __init__(self, watch: Any) -> None:
        self.watch, self.now = watch, 0.0

    def lines(self, *values: Any, times: int, every: float = EVERY_S) -> list[list[Any]]:
        found = []
        for _ in range(times):
            self.now += every
            named = self.watch.see(*values, now=self.now)
            found.append([(rank, round(factor, 1)) for rank, factor in named])
        return found

    def names(self, seconds: list[float], *, times: int) -> list[tuple[int, float]]:
        return [name for line in self.lines(seconds, times=times) for name in line]


def test_a_straggler_is_named_once_and_again_after_it_recovered() -> None:
    seen = Seen(StragglerWatch([1.0, 1.0, 1.0, 1.0]))
    slow, well = [1.0, 1.1, 2.0, 0.9], [1.0, 1.1, 1.2, 0.9]
    assert seen.lines(slow, times=LINES) == [[]] * (LINES - 1) + [[(2, 2.0)]]
    assert seen.lines(slow, times=3) == [[]] * 3
    assert seen.lines(well, times=1) == [[]]
    assert seen.lines(slow, times=LINES)[-1]


def test_a_moment_makes_no_straggler() -> None:
    seen = Seen(StragglerWatch([1.0, 1.0]))
    assert seen.lines([1.0, 9.0], times=2 * LINES, every=0.1) == [[]] * (2 * LINES)


@pytest.mark.parametrize(
    ("planned", "seconds", "work", "named"),
    [
        ([1.0, 3.0], [1.0, 3.1], (), []),  # as many samples as it can compute
        ([1.0, 3.0], [1.0, 6.0], (), [(1, 2.0)]),  # one of two is measured by the faster
        ([1.0, 1.0], [1.0, 3.0], (100.0, 300.0), []),  # longer samples
        ([1.0, 1.0], [1.0, 1.1], (300.0, 100.0), []),  # all its time is overhead
        ([1.0, 1.0], [1.0, 4.0], (100.0, 200.0), [(1, 2.0)]),
        ([1.0, 1.0], [1.0, 4.0], (100.0, 0.0), []),
    ],
)
def test_a_straggler_is_slow_for_what_it_has_to_compute(planned, seconds, work, named) -> None:
    found = Seen(StragglerWatch(planned)).lines(seconds, work, times=2 * LINES)
    assert [name for line in found for name in line] == named


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_times.PIECE_S, "cpu", 0.002)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_probe_takes_time_and_nothing_else(short: None, dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    products = Products(CPU, dtype, width=64)
    assert 0 < SpeedProbe(products).at_line() < 1
    assert products.flops == 2 * 256**3 * products.count
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.isfinite(products._product).all()
    assert not products._product.requires_grad


def test_a_probe_looks_at_few_lines_and_all_ranks_at_the_same(short: None) -> None:
    """Whatever clocks of their own say: that of rank 0 counts."""
    probe = SpeedProbe(Products(CPU, torch.float32, width=64))
    looked = []
    for number in range(100):
        if probe.at_line():
            looked.append(number)
        probe.after_line(1000.0 + 7.0 * number)
    assert looked[0] == 0
    gaps = {b - a for a, b in itertools.pairwise(looked)}
    assert min(gaps) * 7.0 >= EVERY_S
    assert max(gaps) <= EVERY_S // 7 + 1


def test_the_usual_probe_of_a_rank_is_its_own_first_one_or_that_of_ranks_like_it() -> None:
    noisy = [[1.0, 3.0], [9.0, 3.1], [1.1, 2.9]]
    assert usual_probes(noisy, ["a100", "v100"], [1.0, 1.0]) == [1.1, 3.0]
    # Slow from the start: named by others on the same type of device.
    devices, planned = ["v100"] * 3 + ["a100"], [1.0] * 4
    usual = usual_probes([[3.0, 3.0, 6.0, 1.0]], devices, planned)
    assert usual == [3.0, 3.0, 3.0, 1.0]
    assert Seen(StragglerWatch(usual)).names([3.0, 3.0, 6.0, 1.0], times=LINES) == [(2, 2.0)]
    # Ranks that were measured as slow have less to do.
    assert usual_probes([[1.0, 2.1]], ["cpu", "cpu"], [1.0, 2.0]) == pytest.approx([1.0, 2.0])


def test_all_slower_together_or_for_a_moment_is_no_straggler() -> None:
    seen = Seen(StragglerWatch([1.0, 1.0]))
    assert seen.names([2.0, 2.0], times=4 * LINES) == []
    assert seen.names([2.0, 9.0], times=LINES - 1) == []
    assert seen.names([2.0, 2.0], times=LINES) == []
