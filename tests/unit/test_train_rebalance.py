"""How ranks are timed; when a drift changes the split, to what, and that a recorded change is
repeated."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.lifecycle.reproduce import as_trained
from llmx.plan import make_plan
from llmx.plan.balance import corrected_speeds, evened, with_balance
from llmx.plan.types import Plan, RankSpeed
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.tasks import JointTask, OnlineTask
from llmx.train import speeds
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
from tests import forks
from tests.rundirs import experiment


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


def test_a_gain_below_the_noise_is_none() -> None:
    plan = planned()
    assert plan.balance is not None
    balance = replace(plan.balance, speeds=(RankSpeed(0, 1000), RankSpeed(0, 1200)))
    assert evened(plan, balance) == evened(plan, balance, noise=0.03) == balance
    assert len(set(evened(plan, balance, noise=0.06).speeds)) == 1


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
