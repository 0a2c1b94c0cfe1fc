"""Which rank the others wait for: idle shares, and stragglers that are named once; where forward
passes wait for each other, by a small piece of work of each rank's own that changes nothing."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llmx.train.step_log as module
from llmx.config import AdapterConfig, OptimConfig, TaskConfig
from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.lifecycle.reproduce import as_trained
from llmx.plan import make_plan
from llmx.plan.balance import corrected_speeds, evened, with_balance
from llmx.plan.types import Plan, RankSpeed
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.tasks import JointTask, Loss, OnlineTask
from llmx.train import speeds, step_times
from llmx.train.loop import log_interval
from llmx.train.rebalance import Line, Rebalance, open_rebalance, record_change
from llmx.train.speeds import (
    BLOCK_S,
    LEAST_BLOCKS,
    LONGEST_S,
    Change,
    Job,
    mean_time,
    record,
    time_together,
)
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
from tests import forks
from tests.rundirs import experiment

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
    assert idle_share([2.0, 2.0]) == idle_share([0.0, 0.0]) == 0.0
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
    pair = Seen(StragglerWatch([1.0, 1.0]))
    assert pair.lines([1.0, 9.0], times=2 * LINES, every=0.1) == [[]] * (2 * LINES)  # a moment
    assert pair.names([2.0, 2.0], times=4 * LINES) == []  # all are slower together
    assert pair.names([2.0, 9.0], times=LINES - 1) == []


@pytest.mark.parametrize(
    ("planned", "seconds", "work", "named"),
    [
        ([1.0, 3.0], [1.0, 3.1], (), []),  # as many samples as it can compute
        ([1.0, 3.0], [1.0, 6.0], (), [(1, 2.0)]),  # one of two is measured by the faster
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
    torch.testing.assert_close(products._product, products._one @ products._other)
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


# --- What a train line covers: every step since the last one, no evaluation -----------------------


class Recorded:
    """A log of one rank and a model of one weight, by a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[dict[str, Any]] = []
        engine = SimpleNamespace(
            device=torch.device("cpu"),
            dtype=torch.float32,
            stage=0,
            config=SimpleNamespace(hidden_size=1),
            precision="fp32",
            main=SimpleNamespace(routing=SimpleNamespace(measure=lambda **_: {})),
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
    [(None, 8, 1), (None, 120, 2), (None, 499, 9), (None, 10**6, 10), (20, 60, 20)],
)
def test_a_short_run_logs_fifty_lines(key: int | None, total: int, every: int) -> None:
    assert log_interval(TaskConfig(log_every_steps=key), total) == every


# --- When a drift changes the split, to what; a recorded change is repeated -----------------------


def on_rank(rank: int, place: Path, goes_on: Event) -> None:
    """Rank 0 is fast and times three jobs; rank 1 is slow and fails at its second one.

    Rank 1 does not begin before rank 0 knows its time and goes on (``goes_on``).
    """
    now, calls = [0.0], [0]
    speeds.mean_time = functools.partial(mean_time, clock=lambda: now[0])

    def run() -> None:
        calls[0] += 1
        if rank == 1:
            assert goes_on.wait(timeout=60)
        elif now[0] > (LEAST_BLOCKS + 1) * (BLOCK_S + 0.02):
            goes_on.set()
        now[0] += (0.02, 1.0)[rank]

    def jobs() -> Iterator[Job]:
        for number in range(3):
            if (rank, number) == (1, 1):
                raise MemoryError("no room")
            yield Job(run, 10.0, 100.0)

    problem, table = time_together(jobs(), group=None)
    found = {"problem": problem, "took": [[timing.seconds for timing in each] for each in table]}
    (place / f"{rank}.json").write_text(json.dumps(found))


def test_a_fast_rank_goes_on_and_none_waits_for_one_that_failed(tmp_path: Path) -> None:
    forks.group(on_rank, tmp_path, forks.context.Event(), world=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["problem"] == "rank 1: MemoryError: no room"
        assert found["took"] == [pytest.approx([0.02] * 3), pytest.approx([1.0])]


@pytest.mark.parametrize(("burst_ms", "run_ms"), [(100, 3), (50, 3), (25, 20)])
def test_a_rank_under_a_cpu_quota_is_measured(burst_ms: int, run_ms: int) -> None:
    """Full speed for a part of each 100 ms, then nothing: the mean is what counts."""
    now = [13]  # ms

    def run() -> None:
        for _ in range(run_ms):
            if now[0] % 100 >= burst_ms:
                now[0] += 100 - now[0] % 100
            now[0] += 1

    seconds, noise = mean_time(run, clock=lambda: now[0] / 1000)
    took = (now[0] - 13) / 1000
    assert seconds == pytest.approx(run_ms * 100 / burst_ms / 1000, rel=0.09)
    if burst_ms == 100:
        assert noise < 1e-3
        assert took < (LEAST_BLOCKS + 2) * BLOCK_S
    assert took < LONGEST_S + 2 * BLOCK_S


def test_calls_go_on_until_all_ranks_know_their_time() -> None:
    now, asked = [0.0], []

    def run() -> None:
        now[0] += 0.125 if now[0] < 1 else 0.25  # another rank begins to compute, too

    def ready() -> Callable[[], bool]:
        asked.append(now[0])
        return lambda: now[0] >= 3

    seconds, noise = mean_time(run, ready=ready, clock=lambda: now[0])
    assert asked == [0.5]
    assert seconds == 3 / 16
    assert noise > 0.05


@functools.cache
def planned(*, ranks: int = 2, stage: int = 1) -> Plan:
    batch = {"global_batch": 24, "micro_batch": 24, "accumulation": None, "rebalance": True}
    plan = make_plan(experiment(Path("run"), ranks=ranks, batch=batch, zero={"stage": stage}))
    assert plan.balance is not None
    assert plan.balance.method == "even"
    return plan


def line_of(plan: Plan, factors: list[float], *, now: float) -> Line:
    """Of ranks that take so many times what they should."""
    assert plan.balance is not None
    work = [
        float(sum(plan.batch.sizes_of(rank))) * speed.token_fs
        for rank, speed in enumerate(plan.balance.speeds)
    ]
    return Line([each * factor for each, factor in zip(work, factors, strict=True)], work, now)


def run_on(
    rebalance: Rebalance, factors: list[float], *, steps: int, begin: int = 1, every: float = 20
) -> list[int]:
    """Steps at which the split changes, with a line after each, so many seconds apart."""
    found = []
    for step in range(begin, begin + steps):
        line = line_of(rebalance.plan, factors, now=step * every)
        if rebalance.after_step(step, line) is not None:
            found.append(step)
    return found


def samples(plan: Plan) -> list[int]:
    return [sum(plan.batch.sizes_of(rank)) for rank in range(plan.world_size)]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_drift_changes_the_split_once(stage: int) -> None:
    rebalance = Rebalance(planned(stage=stage), [], step=0)
    assert samples(rebalance.plan) == [12, 12]
    # A line of warming up, then three that agree.
    assert run_on(rebalance, [1e-15, 3e-15], steps=4) == [4]
    assert samples(rebalance.plan) == [18, 6]
    sizes = [rebalance.plan.batch.sizes_of(rank) for rank in range(2)]
    assert stage == 1 or len(sizes[0]) == len(sizes[1])
    # By the new speeds all is as it should be.
    assert run_on(rebalance, [1e-15, 1e-15], steps=10, begin=5) == []
    # It gets well again.
    assert run_on(rebalance, [3e-15, 1e-15], steps=4, begin=20) == [22]
    assert samples(rebalance.plan) == [12, 12]


def test_noise_moments_and_small_drifts_change_nothing() -> None:
    rebalance = Rebalance(planned(), [], step=0)
    assert run_on(rebalance, [1.0, 1.08], steps=20) == []
    for step in range(20, 40):  # never three lines in a row
        assert run_on(rebalance, [1.0, 3.0 if step % 3 < 2 else 1.0], steps=1, begin=step) == []
    assert run_on(rebalance, [1.0, 3.0], steps=20, begin=40, every=1.0) == []  # of moments


def test_a_pause_of_another_rank_is_no_part_of_a_drift() -> None:
    alone = Rebalance(planned(), [], step=0)
    assert run_on(alone, [1.0, 3.0], steps=4) == [4]
    rebalance = Rebalance(planned(), [], step=0)
    assert run_on(rebalance, [1.0, 1.0], steps=1) == []
    assert run_on(rebalance, [2.0, 1.0], steps=1, begin=2) == []
    # With the pause these are three lines, and by their sum rank 1 is 1.75 times as slow.
    assert run_on(rebalance, [1.0, 3.0], steps=3, begin=3) == [5]
    assert samples(rebalance.plan) == samples(alone.plan) == [18, 6]


def test_what_was_decided_is_repeated_at_its_step(tmp_path: Path) -> None:
    plan = planned()
    first = Rebalance(plan, [], step=0)
    (step,) = run_on(first, [1.0, 3.0], steps=4)
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    events: list[dict[str, Any]] = []
    metrics = SimpleNamespace(event=lambda _, **values: events.append(values))
    session: Any = SimpleNamespace(
        plan=first.plan, run_dir=run, rebalance=first, metrics=metrics, log=lambda text: None
    )
    record_change(session, plan, step=step)
    assert events == [{"step": step, "sizes": [[18], [6]], "time_factor": pytest.approx(0.5)}]
    assert Plan.from_dict(read_json(run.plan)) == first.plan
    changes = [
        Change(one["step"], tuple(RankSpeed(**speed) for speed in one["speeds"]))
        for one in read_json(run.balance)["changes"]
    ]
    assert changes == first.changes
    again = Rebalance(plan, changes, step=0)
    # Nothing is measured, not even a line is there: the same change, at the same step.
    assert [number for number in range(1, 9) if again.after_step(number, None)] == [step]
    assert again.plan == first.plan
    # Up to it, nothing else is decided.
    other = Rebalance(plan, [Change(9, changes[0].speeds)], step=0)
    assert run_on(other, [1.0, 3.0], steps=8) == []
    # Nor at steps that an earlier attempt has trained without a change.
    later = Rebalance(plan, [], step=2, trained=20)
    assert run_on(later, [1.0, 3.0], steps=18, begin=3) == []
    assert run_on(later, [1.0, 3.0], steps=4, begin=21) == [24]


def test_equal_ranks_of_a_host_keep_one_speed() -> None:
    plan = planned(ranks=3)
    speeds = corrected_speeds(plan, [1.0, 1.02, 1.8], [100, 100, 100])
    assert speeds[0] == speeds[1]
    assert speeds[2].token_fs == pytest.approx(1.8 / 1.02 * speeds[0].token_fs, rel=1e-3)
    # What all of them lose changes nothing for one against another.
    assert corrected_speeds(plan, [2.0, 2.04, 3.6], [100, 100, 100]) == speeds
    pair = planned()  # a gain below the noise is none
    assert pair.balance is not None
    balance = replace(pair.balance, speeds=(RankSpeed(0, 1000), RankSpeed(0, 1200)))
    assert evened(pair, balance) == evened(pair, balance, noise=0.03) == balance
    assert len(set(evened(pair, balance, noise=0.06).speeds)) == 1


@pytest.mark.parametrize(
    ("groups", "words"),
    [({"zero": {"stage": 3}}, "remove balance.json"), ({"batch": {"balance": "off"}}, "measures")],
)
def test_what_cannot_be_rebalanced_is_refused(groups, words, tmp_path) -> None:
    exp = experiment(tmp_path, **groups)
    exp.batch.rebalance = True
    with pytest.raises(ConfigError, match=words):
        validate(exp)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(JointTask, "has a joint loss over the step"), (OnlineTask, "generates its samples")],
)
def test_a_task_that_cannot_be_rebalanced_says_so(kind, why, tmp_path) -> None:
    exp = experiment(tmp_path, batch={"rebalance": True})
    task, said = kind.__new__(type("Mine", (kind,), {"name": "mine"})), []
    session: Any = SimpleNamespace(plan=make_plan(exp), task=task, log=said.append)
    assert open_rebalance(session) is None
    (text,) = said
    assert f"batch.rebalance=true has no effect: task=mine {why}" in text


def test_a_reproduction_is_compared_with_the_split_that_its_ranks_will_take(tmp_path: Path) -> None:
    """That of ``balance.json``: what is composed before the start does not know it."""
    run, plan = RunDir(tmp_path / "run"), planned()
    assert plan.balance is not None
    speeds = (RankSpeed(10, 10), RankSpeed(10, 30))
    trained = with_balance(plan, replace(plan.balance, speeds=speeds))
    write_json(run.plan, trained.to_dict())
    assert trained.batch != plan.batch
    assert as_trained(run, plan) == plan.to_dict(), "without a record they measure or share evenly"
    write_json(run.balance, record(trained))
    assert as_trained(run, plan)["batch"] == read_json(run.plan)["batch"]
    assert as_trained(run, plan)["ranks"] == plan.to_dict()["ranks"]
    for other in (planned(ranks=3), replace(plan, balance=None)):
        assert as_trained(run, other) == other.to_dict()
