"""Which rank the others wait for: idle shares, and stragglers that are named once; where forward
passes wait for each other, by a small piece of work of each rank's own that changes nothing."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llmx.train.step_log as module
from llmx.config import AdapterConfig, OptimConfig, TaskConfig
from llmx.tasks import Loss
from llmx.train import step_times
from llmx.train.loop import log_interval
from llmx.train.step_log import RankValues, StepLog
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


# --- What a train line covers: every step since the last one, no evaluation -----------------------


class Recorded:
    """A log of one rank and a model of one weight, by a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[dict[str, Any]] = []
        main = SimpleNamespace(
            module=torch.nn.Linear(1, 1),
            spec=SimpleNamespace(trained=True),
            attention=SimpleNamespace(causal=True),
            routing=SimpleNamespace(measure=lambda **_: {}),
        )
        engine = SimpleNamespace(
            device=torch.device("cpu"),
            dtype=torch.float32,
            stage=0,
            config=SimpleNamespace(hidden_size=1),
            precision="fp32",
            main=main,
            models={"policy": main},
            engine=SimpleNamespace(skipped_steps=0),
            last_norm=lambda: torch.tensor(1.0),
            grad_norm=lambda: 1.0,
            loss_scale=lambda: 1.0,
        )
        self.session: Any = SimpleNamespace(
            engine=engine,
            servers=None,
            task=SimpleNamespace(updates=1),
            exp=SimpleNamespace(
                task=SimpleNamespace(spike_factor=None),
                optim=OptimConfig(),
                adapter=AdapterConfig(),
                batch=SimpleNamespace(balance="off"),
            ),
            plan=SimpleNamespace(world_size=1, peak_tflops=0.0),
            resume_point=SimpleNamespace(tokens_seen=0, target_tokens_seen=0, losses=[]),
            length=SimpleNamespace(steps=1000, samples_at=lambda step: 4 * step),
            train_store=range(100),
            metrics=SimpleNamespace(write=lambda kind, **line: self.lines.append(line)),
            log=lambda text: None,
        )

    def perf_counter(self) -> float:
        return self.now

    def open(self) -> StepLog:
        self.log = StepLog(self.session)
        return self.log

    def add(self, number: int, *, targets: int, loss: float, takes_s: float) -> Any:
        counts = {"tokens": 10, "target_tokens": targets, "square_tokens": 100, "work": 7}
        step = SimpleNamespace(step=number, weight=targets, **counts)
        self.now += takes_s
        self.log.add(step, torch.tensor(loss))
        return step


@pytest.fixture
def recorded(group: None, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made, flops = Recorded(), SimpleNamespace(of_step=lambda **_: 0.0)
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "network_flops", lambda _engine: [(flops, 1.0)])
    return made


def test_a_line_covers_its_interval(recorded: Recorded) -> None:
    """An evaluation in the middle takes its own time away and no step."""
    log = recorded.open()
    for number, (targets, loss) in enumerate([(10, 40.0), (30, 60.0), (10, 10.0)]):
        one = recorded.add(number, targets=targets, loss=loss, takes_s=2.0)
        if number == 0:
            with log.paused():
                recorded.now += 100.0
    log.write(one)
    line = recorded.lines[-1]
    assert line["loss"] == 1.0  # of the newest step
    assert line["loss_mean"] == pytest.approx(110 / 50)  # of the interval's target tokens
    assert line["step_time_s"] == 2.0
    assert line["tokens_per_s"] == 30 / 6
    # The next interval knows nothing of this one.
    log.write(recorded.add(2, targets=10, loss=20.0, takes_s=1.0))
    line = recorded.lines[-1]
    assert line["loss_mean"] == line["loss"] == 2.0
    assert line["step_time_s"] == 1.0


def test_metrics_of_the_loss_are_means_over_the_interval(recorded: Recorded) -> None:
    """By the loss's own weight, or by one of their own; nothing of the interval before."""
    log = recorded.open()
    for number, right in enumerate([3.0, 1.0]):
        metrics = {
            "accuracy": torch.tensor(right),
            "margin": (torch.tensor(6.0), 2.0),
            "nothing": (torch.tensor(0.0), 0.0),
        }
        log.metrics.add(Loss(torch.tensor(2.0), 4.0, metrics))
        one = recorded.add(number, targets=4, loss=2.0, takes_s=1.0)
    log.write(one)
    log.metrics.add(Loss(torch.tensor(2.0), 4.0, {"accuracy": torch.tensor(4.0)}))
    log.write(recorded.add(2, targets=4, loss=2.0, takes_s=1.0))
    first, second = recorded.lines
    assert [first[name] for name in ("accuracy", "margin", "nothing")] == [0.5, 3.0, None]
    assert second["accuracy"] == 1.0
    assert "margin" not in second


def test_where_forward_passes_wait_each_rank_times_work_of_its_own(recorded, monkeypatch) -> None:
    """At ZeRO-3 rank 1 is throttled after a while: it is named once, with its host."""
    slow, events, said = [1.0], [], []

    def all_gather(mine: RankValues) -> list[RankValues]:
        probe_s = 0.1 if mine.probe_s else 0.0
        return [replace(mine, probe_s=probe_s), replace(mine, probe_s=probe_s * slow[0])]

    monkeypatch.setattr(module, "all_gather", all_gather)
    monkeypatch.setitem(step_times.PIECE_S, "cpu", 0.001)
    session = recorded.session
    session.engine.stage, session.task = 3, SimpleNamespace(joint=False, updates=1)
    session.exp.batch, session.rebalance = SimpleNamespace(balance="auto"), None
    session.plan.world_size, session.plan.balance = 2, None
    session.plan.hosts = [SimpleNamespace(name="host-a"), SimpleNamespace(name="host-b")]
    session.plan.ranks = [SimpleNamespace(host=at, device="cpu") for at in (0, 1)]
    session.metrics.event = lambda name, **values: events.append((name, values))
    session.log = said.append
    log = recorded.open()
    for number in range(60):
        slow[0] = 1.0 if number < 30 else 2.0
        # Nothing that batch.rebalance could go by:
        assert log.write(recorded.add(number, targets=1, loss=1.0, takes_s=10.0)) is None
    probed = [line for line in recorded.lines if "probe_s" in line]
    assert 18 <= len(probed) <= 22  # of 60 lines, every 30 s
    assert "idle_share" not in recorded.lines[0]
    assert probed[0]["probe_s"] == [0.1, 0.1]
    ((name, event),) = events
    assert name == "straggler"
    assert (event["rank"], event["host"], event["factor"]) == (1, "host-b", 2.0)
    assert event["probe_s"] == [0.1, 0.2]
    assert 31 + 6 <= event["step"] <= 31 + 12
    (warning,) = [text for text in said if "WARNING" in text]
    assert "rank 1 (host-b) takes 2.0 times as long for a matrix product" in warning
    assert "rank 1 0.2 s, rank 0 0.1 s" in warning
    session.exp.batch.balance = "off"
    assert recorded.open().probe is None


@pytest.mark.parametrize(
    ("key", "total", "every"),
    [
        (None, 8, 1),
        (None, 120, 2),
        (None, 499, 9),
        (None, 500, 10),
        (None, 10**6, 10),
        (20, 60, 20),
    ],
)
def test_a_short_run_logs_fifty_lines(key: int | None, total: int, every: int) -> None:
    assert log_interval(TaskConfig(log_every_steps=key), total) == every
