"""Who has become slower where forward passes wait for each other: a small piece of work of each
rank's own, at few lines, that changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

from llmx.train import step_times
from llmx.train.step_times import EVERY_S, FIRST, LINES, DriftWatch, SpeedProbe


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_times.PIECE_S, "cpu", 0.002)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_time_and_nothing_else(short: None, dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    probe = SpeedProbe(torch.device("cpu"), dtype, width=64, active=True)
    assert 0 < probe.at_line() < 1
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.isfinite(probe._product).all()
    assert not probe._product.requires_grad


def test_it_looks_at_few_lines_and_all_ranks_at_the_same(short: None) -> None:
    """Whatever clocks of their own say: that of rank 0 counts."""
    probe = SpeedProbe(torch.device("cpu"), torch.float32, width=64, active=True)
    looked = []
    for number in range(100):
        if probe.at_line():
            looked.append(number)
        probe.after_line(1000.0 + 7.0 * number)
    assert looked[0] == 0
    gaps = {b - a for a, b in itertools.pairwise(looked)}
    assert min(gaps) * 7.0 >= EVERY_S
    assert max(gaps) <= EVERY_S // 7 + 1
    off = SpeedProbe(torch.device("cpu"), torch.float32, width=64, active=False)
    assert off.at_line() == 0
    off.after_line(10.0**6)
    assert off.at_line() == 0


def names(watch: DriftWatch, seconds: list[float], *, lines: int) -> list[tuple[int, float]]:
    clock = watch.__dict__.setdefault("clock", [0.0])
    found = []
    for _ in range(lines):
        clock[0] += EVERY_S
        found += watch.see(seconds, now=clock[0])
    return [(rank, round(factor, 1)) for rank, factor in found]


def test_a_rank_that_becomes_slower_is_named() -> None:
    """Against its own first values, where no other rank has its type of device; once."""
    watch = DriftWatch(["a100", "v100"], [1.0, 1.0])
    assert names(watch, [1.0, 3.0], lines=FIRST + LINES) == []
    assert names(watch, [1.0, 6.0], lines=LINES - 1) == []
    assert names(watch, [1.0, 6.0], lines=LINES) == [(1, 2.0)]
    assert names(watch, [1.0, 3.0], lines=LINES) == []
    assert names(watch, [2.0, 3.0], lines=LINES) == [(0, 2.0)]


def test_a_rank_that_was_slow_from_the_start_is_named_by_others_like_it() -> None:
    watch = DriftWatch(["v100"] * 3 + ["a100"], [1.0] * 4)
    assert names(watch, [3.0, 3.0, 6.0, 1.0], lines=LINES) == [(2, 2.0)]


def test_what_the_plan_knows_is_no_drift() -> None:
    """Ranks that were measured as slow have less to do."""
    watch = DriftWatch(["cpu", "cpu"], [1.0, 2.0])
    assert names(watch, [1.0, 2.1], lines=4 * LINES) == []


def test_all_slower_together_or_for_a_moment_is_no_straggler() -> None:
    watch = DriftWatch(["cpu", "cpu"], [1.0, 1.0])
    assert names(watch, [1.0, 1.0], lines=FIRST) == []
    assert names(watch, [2.0, 2.0], lines=4 * LINES) == []
    assert names(watch, [2.0, 9.0], lines=LINES - 1) == []
    assert names(watch, [2.0, 2.0], lines=LINES) == []
