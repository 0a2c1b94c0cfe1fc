"""Saving and choosing on a real disk, by the real protocol, in a group of one rank."""

from __future__ import annotations

import errno
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.checkpoint import commit
from llmx.checkpoint import save as save_job
from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.disk import Disk
from llmx.checkpoint.distributed import find_topology
from llmx.checkpoint.fragments import FragmentIndex
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.pointers import pin, read_pointer
from llmx.checkpoint.save import SaveFailed, SaveJob
from llmx.checkpoint.selection import list_steps, newest_usable, verify
from llmx.checkpoint.state.engine_state import StateTensor, combine, lanes
from llmx.config import CheckpointConfig, KeepConfig
from llmx.plan import make_plan
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.train import saver as saver_module
from llmx.train.metrics import MetricsWriter
from llmx.train.resume import ResumePoint, find_resume_point
from llmx.train.saver import Consensus, Flags
from llmx.train.status import RankStatus, ShutdownRequest
from tests.resumed_runs import events
from tests.rundirs import experiment

MINE = {"global_batch": 8}


def state_of(step: int, metric: float | None = None) -> dict[str, Any]:
    return {
        "format": 1,
        "step": step,
        "tokens_seen": 100 * step,
        **MINE,
        "world_size": 1,
        "zero_stage": 2,
        "parameters": {
            "w": {"shape": [2, 3], "trained": True, "tied_to": None},
            "head": {"shape": [2, 3], "trained": True, "tied_to": "w"},
        },
        "metric": None if metric is None else {"name": "eval/loss", "value": metric},
    }


def save(
    run: RunDir,
    step: int,
    *,
    values: torch.Tensor | None = None,
    metric: float | None = None,
    damaged: frozenset[int] = frozenset(),
    num_rollbacks: int = 0,
    **keep: int,
) -> SaveJob:
    ended: list[SaveJob] = []
    job = make_job(run, step, ended.append, values, metric, damaged, **keep)
    job.num_rollbacks = num_rollbacks
    job.start()
    assert job.wait(60)
    assert ended == [job]
    assert job.fragments == (), "the copy is given back"
    return job


def make_job(
    run: RunDir,
    step: int,
    on_end: Callable[[SaveJob], Any],
    values: torch.Tensor | None = None,
    metric: float | None = None,
    damaged: frozenset[int] = frozenset(),
    **keep: int,
) -> SaveJob:
    values = torch.arange(6.0) + step if values is None else values
    return SaveJob(
        step=step,
        fragments=[
            StateTensor("master", "w", 0, values[:4]),
            StateTensor("master", "w", 4, values[4:]),
        ],
        state=state_of(step, metric),
        small_files={"config.yaml": b"a: 1\n", "model/config.json": b"{}"},
        topology=find_topology(run.checkpoints, create=True, group=None),
        group=None,
        hosts=["here"],
        run_id="ab",
        config=CheckpointConfig(keep=KeepConfig(**keep)),
        damaged=damaged,
        on_end=on_end,
    )


def start_of(run: RunDir) -> ResumePoint:
    topology = find_topology(run.checkpoints, create=False, group=None)
    return find_resume_point(run, MINE, topology=topology, stage=2, group=None)


def damage(run: RunDir, step: int) -> None:
    path = committed_dir(run.checkpoints, step) / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def log_saved(run: RunDir, *steps: int) -> None:
    with run.metrics.open("a") as stream:
        for step in steps:
            stream.write(f'{{"kind": "event", "event": "saved", "step": {step}}}\n')


def test_what_is_saved_is_chosen_and_reads_back(group: None, memory: Path) -> None:
    run = RunDir(memory / "run")
    assert start_of(run) == ResumePoint()
    assert not run.checkpoints.exists(), "nothing is made where nothing is saved"
    values = torch.randn(6)
    job = save(run, 4, values=values)
    assert job.error is None
    directory = run.checkpoint(4)
    assert not verify(directory)
    assert job.num_bytes == sum(
        path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
    assert (directory / "model/config.json").read_bytes() == b"{}"
    assert read_pointer(run.checkpoints, "latest") == 4
    assert read_pointer(run.checkpoints, "best") is None
    start = start_of(run)
    assert (start.step, start.tokens_seen, start.damaged) == (4, 400, ())
    assert start.state["weights_hash"] == combine(["w"], lanes(values, 0)[None])
    index, read = FragmentIndex(start.files), torch.zeros(6)
    index.check(start.state["parameters"])
    index.read_range("master", "w", 0, 6, read.numpy())
    assert torch.equal(read, values)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_never_committed(
    group: None, memory: Path, bad: float
) -> None:
    run = RunDir(memory / "run")
    save(run, 4)
    values = torch.arange(6.0)
    values[5] = bad
    job = save(run, 8, values=values)
    assert isinstance(job.error, SaveFailed)
    assert not job.error.disk_full
    assert "master of w is not finite" in str(job.error)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "latest",
        run.checkpoint(4).name,
    ]
    assert read_pointer(run.checkpoints, "latest") == 4


def test_what_is_not_trained_may_be_infinite(group: None, memory: Path) -> None:
    run, ended = RunDir(memory / "run"), []
    job = make_job(run, 4, ended.append)
    mask = torch.tensor([0.0, -math.inf])
    job.fragments = [*job.fragments, StateTensor("buffer", "mask", 0, mask)]
    job.state = {**job.state, "buffers": {"mask": {"shape": [2]}}}
    job.start()
    assert job.wait(60)
    assert [each.error for each in ended] == [None]
    assert not verify(run.checkpoint(4))


def test_a_shape_that_is_not_covered_is_never_committed(
    group: None, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(disk: Disk, descriptor: int) -> None:
        os.close(descriptor)
        raise OSError(errno.EIO, "also this fails, as over NFS")

    run = RunDir(memory / "run")
    job = make_job(run, 4, lambda _: None, torch.arange(5.0))
    monkeypatch.setattr(Disk, "close", close)
    job.start()
    assert job.wait(60)
    assert isinstance(job.error, SaveFailed)
    assert "master of w lacks elements 5 to 6 of 6" in str(job.error)
    assert list(run.checkpoints.iterdir()) == []


def test_what_fails_after_the_commit_is_a_warning(group: None, memory: Path) -> None:
    run = RunDir(memory / "run")
    save(run, 4)
    (run.checkpoints / "latest").unlink()
    (run.checkpoints / "latest").mkdir()
    (run.checkpoints / "latest" / "in-the-way").touch()
    job = save(run, 8)
    assert job.error is None, "committed, though the pointer could not be set"
    assert "latest" in job.warning
    assert newest_usable(run.checkpoints) == 8


def test_keep_counts_usable_ones_and_leaves_the_damaged(group: None, memory: Path) -> None:
    run = RunDir(memory / "run")
    metrics = {4: 3.0, 8: 1.0, 12: 2.0, 16: None, 20: 2.5}
    for step, metric in metrics.items():
        if step == 16:
            damage(run, 4)
        save(run, step, metric=metric, damaged=frozenset({4}), last=2, best=1, every=0)
    assert list_steps(run.checkpoints) == [4, 8, 16, 20]
    assert read_pointer(run.checkpoints, "best") == 8
    assert read_pointer(run.checkpoints, "latest") == 20


def test_what_is_being_copied_elsewhere_stays_until_it_is_not(group: None, memory: Path) -> None:
    run = RunDir(memory / "run")
    save(run, 4, last=1)
    pin(run.checkpoints, [4])
    save(run, 8, last=1)
    assert list_steps(run.checkpoints) == [4, 8]
    pin(run.checkpoints, [])
    save(run, 12, last=1)
    assert list_steps(run.checkpoints) == [12]
    pin(run.checkpoints, [12])
    save(run, 6, last=1)  # sent back: step 12 is of a past that was given up
    assert list_steps(run.checkpoints) == [6]


def test_after_going_back_the_past_that_was_given_up_is_removed(group: None, memory: Path) -> None:
    run = RunDir(memory / "run")
    for step in (4, 8, 12, 16):
        save(run, step, last=9)
    write_json(run.resume, {"step": 8, "skip_steps": [9, 10], "attempt": 2})
    start = start_of(run)
    assert (start.step, start.attempt, start.skip_steps) == (8, 2, {9, 10})
    save(run, 10, last=2)
    assert list_steps(run.checkpoints) == [8, 10]
    write_json(run.resume, {"step": 0})
    assert start_of(run).step == 0
    write_json(run.resume, {"step": 9})
    with pytest.raises(CheckpointError, match=r"step 9, but only \[10, 8\] exist"):
        start_of(run)


def test_a_past_that_was_given_up_is_not_chosen_where_it_was_left(
    group: None, memory: Path
) -> None:
    """On the disk of a host that was away, or before the first save of the new course."""
    run = RunDir(memory / "run")
    for step in (4, 8, 12):
        save(run, step, last=9)
    write_json(run.resume, {"step": None, "went_back": [8]})
    start = start_of(run)
    assert (start.step, start.num_rollbacks, start.damaged) == (8, 1, ())
    save(run, 10, last=9, damaged=frozenset({12}), num_rollbacks=start.num_rollbacks)
    assert list_steps(run.checkpoints) == [4, 8, 10, 12], "12 as if it had just come back"
    assert start_of(run).step == 10
    save(run, 14, last=9, damaged=frozenset({12}), num_rollbacks=1)
    write_json(run.resume, {"step": None, "went_back": [8, 10]})
    assert start_of(run).step == 10
    write_json(run.resume, {"step": None, "went_back": [8, 10, 0]})
    assert (start_of(run).step, start_of(run).num_rollbacks) == (0, 3)
    write_json(run.resume, {"step": 12, "went_back": [8]})
    with pytest.raises(CheckpointError, match=r"step 12, but only \[14, 10, 8, 4\] exist"):
        start_of(run)


def test_damage_falls_back_and_never_past_what_was_removed(group: None, memory: Path) -> None:
    run = RunDir(memory / "run")
    for step in (4, 8):
        save(run, step)
        log_saved(run, step)
    damage(run, 8)
    start = start_of(run)
    assert (start.step, [bad.step for bad in start.damaged]) == (4, [8])
    assert "rank-00000.safetensors" in start.damaged[0].reason
    damage(run, 4)
    start = start_of(run)
    assert (start.step, [bad.step for bad in start.damaged]) == (0, [8, 4]), "nothing was removed"
    log_saved(run, 2)
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints"):
        start_of(run)
    assert list_steps(run.checkpoints) == [4, 8]


def test_a_save_that_was_cut_short_is_cleared_away(group: None, memory: Path) -> None:
    run = RunDir(memory / "run")
    save(run, 4)
    partial = run.checkpoints / ".step-00000008.partial"
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(b"half")
    assert start_of(run).step == 4
    assert not partial.exists()
    assert read_json(run.checkpoint(4) / "state.json")["step"] == 4


def make_saver(run: RunDir, log: Callable[[str], None]) -> saver_module.Saver:
    exp = experiment(run.root, ranks=1, checkpoint={"on_signal": False})
    return saver_module.Saver(
        exp.checkpoint,
        make_plan(exp),
        run,
        lr=exp.optim.lr,
        engine=None,  # nothing is saved before it is asked for a state
        tokenizer=None,
        identity={},
        consensus=Consensus(timeout_s=60),
        topology=find_topology(run.checkpoints, create=True, group=None),
        metrics=MetricsWriter(run.metrics, enabled=True),
        status=RankStatus(run, rank=0),
        stop=ShutdownRequest(),
        resume_point=ResumePoint(),
        log=log,
    )


def test_to_wait_for_a_slow_disk_at_the_end_does_not_look_like_a_hang(
    group: None, memory: Path
) -> None:
    run = RunDir(memory / "run")
    saver = make_saver(run, print)
    saver.status.enter("training")
    seen = []

    def until_seen(_: SaveJob) -> None:
        deadline = time.monotonic() + 30
        while "saving" not in seen and time.monotonic() < deadline:
            seen.append(read_json(run.rank_status(0))["state"])

    saver._job = make_job(run, 2, until_seen)
    saver._job.start()
    saver.config.at_end = False
    progress: Any = None
    saver.at_end(3, progress)
    assert seen[-1] == "saving"
    assert read_json(run.rank_status(0))["state"] == "training"
    assert not saver.busy


def test_a_save_that_broke_on_one_rank_is_not_taken_for_a_slow_disk(
    group: None, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others still wait for its part, so together they are busy: it must not go on."""

    def breaks(value: Any, *, group: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    saver = make_saver(RunDir(memory / "run"), print)
    saver._job = make_job(RunDir(memory / "run"), 2, lambda _: None)
    monkeypatch.setattr(save_job, "all_gather", breaks)
    saver._job.start()
    assert saver._job.wait(60)
    progress: Any = None
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        saver.at_boundary(3, Flags(busy=True), progress)


def test_a_disk_that_is_too_slow_is_waited_for_once(
    group: None, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save in flight does not end: training waits a moment, then checkpoints are passed over
    without waiting again."""
    monkeypatch.setattr(saver_module, "PATIENCE_S", 0.3)
    run, release, said = RunDir(memory / "run"), threading.Event(), []
    saver = make_saver(run, said.append)
    config = saver.config
    assert saver.flags() == Flags()
    job = make_job(run, 2, on_end=lambda _: release.wait(60))
    job.start()
    saver._job = job
    config.every_steps = 2
    progress: Any = None  # a checkpoint that is passed over asks for nothing
    waited: list[tuple[int, float]] = []
    wait = job.wait
    monkeypatch.setattr(job, "wait", lambda s: [waited.append((step, s)), wait(s)][1])
    for step in (3, 4, 6):
        assert saver.flags().busy
        saver.at_boundary(step, Flags(busy=True), progress)
    assert [each for each in waited if each[1]] == [(4, 0.3)]  # 0: it only asks
    assert [line["step"] for line in events(run, "passed_over")] == [4, 6]
    assert "no checkpoint at step 4" in said[0]
    release.set()
    assert job.wait(60)
    assert not saver.flags().busy
    config.every_minutes = 1e-9
    assert saver.flags() == Flags(save=True)


def test_an_exchange_that_breaks_takes_nothing_back(
    group: None, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may have heard that all published, and have removed the one before."""
    run = RunDir(memory / "run")
    whole, seen = save_job.all_gather, []
    for number in itertools.count(1):
        assert save(run, 4, last=1).error is None
        calls = []

        def breaks(value: Any, *, group: Any, number: int = number, calls: list = calls) -> Any:
            calls.append(value)
            if len(calls) == number:
                raise RuntimeError("Connection closed by peer")
            return whole(value, group=group)

        monkeypatch.setattr(save_job, "all_gather", breaks)
        job = save(run, 8, last=1)
        monkeypatch.setattr(save_job, "all_gather", whole)
        if len(calls) < number:
            break
        assert isinstance(job.error, RuntimeError)
        steps = list_steps(run.checkpoints)
        assert steps == [step for step in steps if not verify(run.checkpoint(step))]
        assert steps in ([4], [4, 8], [8])
        seen.append(steps)
        for step in steps:
            commit.prune(run.checkpoints, [step])
    # Given up before it was published; published, and both stay; decided, and the old one goes.
    assert [steps for steps, _ in itertools.groupby(seen)] == [[4], [4, 8], [8]]
