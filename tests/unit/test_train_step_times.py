"""Which rank the others wait for: idle shares, and stragglers that are named once."""

from __future__ import annotations

import time

import pytest
import torch

from llmx.train.step_times import LINES, StepTimes, StragglerWatch, idle_share


def test_only_phases_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timed = StepTimes(torch.device("cpu"), active=True)
    off = StepTimes(torch.device("cpu"), active=False)
    for _ in range(2):
        with timed.phase("forward"), off.phase("forward"):
            now[0] += 0.25
        now[0] += 8.0
        with timed.phase("update"):
            now[0] += 0.125
    assert timed.take() == (0.5, 0.0, 0.25)
    assert timed.take() == (0.0, 0.0, 0.0)
    assert off.take() == (0.0, 0.0, 0.0)


def test_the_idle_share() -> None:
    assert idle_share([2.0, 2.0]) == 0.0
    assert idle_share([1.0, 2.0]) == pytest.approx(0.25)
    assert idle_share([1.0, 4.0, 4.0, 4.0]) == pytest.approx(0.75 / 4)
    assert idle_share([0.0, 0.0]) == 0.0


def seen(
    watch: StragglerWatch,
    seconds: list[float],
    work: tuple[float, ...] = (),
    *,
    times: int,
    every: float = 20.0,
):
    """What each of some lines says."""
    clock = seen.__dict__.setdefault("clock", [0.0])
    found = []
    for _ in range(times):
        clock[0] += every
        found.append(watch.see(seconds, work, now=clock[0]))
    return found


def test_a_straggler_is_named_once_and_again_after_it_recovered() -> None:
    watch = StragglerWatch([1.0, 1.0, 1.0, 1.0])
    slow, well = [1.0, 1.1, 2.0, 0.9], [1.0, 1.1, 1.2, 0.9]
    *before, ((rank, factor),) = seen(watch, slow, times=LINES)
    assert before == [[]] * (LINES - 1)
    assert (rank, round(factor, 1)) == (2, 2.0)
    assert seen(watch, slow, times=3) == [[]] * 3
    assert seen(watch, well, times=1) == [[]]
    assert seen(watch, slow, times=LINES)[-1]


def test_a_moment_makes_no_straggler() -> None:
    watch = StragglerWatch([1.0, 1.0])
    assert seen(watch, [1.0, 9.0], times=2 * LINES, every=0.1) == [[]] * (2 * LINES)


def test_what_a_rank_should_take_counts() -> None:
    """A slow device that was given as many samples as it can compute is no straggler; one of two
    ranks is measured by the faster."""
    watch = StragglerWatch([1.0, 3.0])
    assert seen(watch, [1.0, 3.1], times=2 * LINES) == [[]] * (2 * LINES)
    assert seen(watch, [1.0, 6.0], times=LINES)[-1] == [(1, 2.0)]


def test_a_rank_with_longer_samples_is_no_straggler() -> None:
    """One that is slow for what it has to compute is, and not one whose time is all overhead."""
    watch = StragglerWatch([1.0, 1.0])
    assert seen(watch, [1.0, 3.0], (100.0, 300.0), times=2 * LINES) == [[]] * (2 * LINES)
    assert seen(watch, [1.0, 1.1], (300.0, 100.0), times=2 * LINES) == [[]] * (2 * LINES)
    assert seen(watch, [1.0, 4.0], (100.0, 200.0), times=LINES)[-1] == [(1, 2.0)]
    assert seen(watch, [1.0, 4.0], (100.0, 0.0), times=LINES) == [[]] * LINES
