"""Saving and choosing on a real disk, by the real protocol, in a group of one rank; the memory for
copies of a state, of their own or in blocks that are used again; and who is asked to end."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.checkpoint import commit
from llmx.checkpoint import save as save_job
from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.disk import Disk
from llmx.checkpoint.distributed import own_files_suffice
from llmx.checkpoint.fragments import FragmentIndex, check_cover
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.pointers import pin, read_pointer
from llmx.checkpoint.save import HostCopies, SaveFailed, SaveJob
from llmx.checkpoint.selection import list_steps, newest_usable, verify
from llmx.checkpoint.state.engine_state import StateTensor, combine, lanes
from llmx.config import CheckpointConfig, KeepConfig
from llmx.errors import ConfigError
from llmx.hardware.survey import ram_available
from llmx.plan import make_plan
from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.spread import StorageTopology, find_topology
from llmx.train import saver as saver_module
from llmx.train.metrics import MetricsWriter, lines_until, truncate_metrics
from llmx.train.resume import ResumePoint, check_identity, check_samples, find_resume_point
from llmx.train.saver import Consensus, Flags
from llmx.train.schedule import RunLength
from llmx.train.status import SAME_REQUEST_S, RankStatus, ShutdownRequest, TermSignals
from tests.resumed_runs import events
from tests.rundirs import experiment

MINE = {"global_batch": 8}
PROGRESS: Any = None
"""Nothing is saved before the saver is asked for a state."""


WEIGHTS = {
    "w": {"shape": [2, 3], "trained": True, "tied_to": None},
    "head": {"shape": [2, 3], "trained": True, "tied_to": "w"},
}


def make_job(
    run: RunDir,
    step: int,
    on_end: Callable[[SaveJob], Any] = lambda job: None,
    *,
    values: torch.Tensor | None = None,
    metric: float | None = None,
    damaged: frozenset[int] = frozenset(),
    num_rollbacks: int = 0,
    **keep: int,
) -> SaveJob:
    values = torch.arange(6.0) + step if values is None else values
    state = {"format": 1, "step": step, "tokens_seen": 100 * step, "world_size": 1, "zero_stage": 2}
    measured = None if metric is None else {"name": "eval/loss", "value": metric}
    return SaveJob(
        step=step,
        fragments=[
            StateTensor("master", "w", 0, values[:4]),
            StateTensor("master", "w", 4, values[4:]),
        ],
        state={**state, **MINE, "parameters": WEIGHTS, "metric": measured},
        small_files={"config.yaml": b"a: 1\n", "model/config.json": b"{}"},
        topology=find_topology(run.checkpoints, create=True, group=None),
        group=None,
        hosts=["here"],
        run_id="ab",
        config=CheckpointConfig(metric="eval/loss", keep=KeepConfig(**keep)),
        damaged=damaged,
        on_end=on_end,
        num_rollbacks=num_rollbacks,
    )


def done(job: SaveJob) -> SaveJob:
    job.start()
    assert job.wait(60)
    assert job.fragments == (), "the copy is given back"
    return job


def save(run: RunDir, *steps: int, **options: Any) -> SaveJob:
    """Save each; the last one's job."""
    for step in steps:
        ended: list[SaveJob] = []
        job = done(make_job(run, step, ended.append, **options))
        assert ended == [job]
    return job


def start_of(run: RunDir) -> ResumePoint:
    topology = find_topology(run.checkpoints, create=False, group=None)
    return find_resume_point(run, MINE, topology=topology, stage=2, group=None)


def damage(run: RunDir, step: int) -> None:
    path = committed_dir(run.checkpoints, step) / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def log_saved(run: RunDir, step: int) -> None:
    with run.metrics.open("a") as stream:
        stream.write(f'{{"kind": "event", "event": "saved", "step": {step}}}\n')


@pytest.fixture
def run(group: None, memory: Path) -> RunDir:
    return RunDir(memory / "run")


def test_what_is_saved_is_chosen_and_reads_back(run: RunDir) -> None:
    assert start_of(run) == ResumePoint()
    assert not run.checkpoints.exists(), "nothing is made where nothing is saved"
    values = torch.randn(6)
    job = make_job(run, 4, values=values)
    # What is not trained may be infinite.
    mask = torch.tensor([0.0, -math.inf])
    job.fragments = [*job.fragments, StateTensor("buffer", "mask", 0, mask)]
    job.state = {**job.state, "buffers": {"mask": {"shape": [2]}}}
    assert done(job).error is None
    directory = run.checkpoint(4)
    assert not verify(directory)
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert job.num_bytes == sum(f.stat().st_size for f in files if f.name != "manifest.json")
    assert (directory / "model/config.json").read_bytes() == b"{}"
    assert [read_pointer(run.checkpoints, name) for name in ("latest", "best")] == [4, None]
    start = start_of(run)
    assert (start.step, start.tokens_seen, start.damaged) == (4, 400, ())
    assert start.state["weights_hash"] == combine(["w"], lanes(values, 0)[None])
    index, read = FragmentIndex(start.files), torch.zeros(6)
    check_cover(index.cover, start.state["parameters"], {"mask": {"shape": [2]}})
    index.read_range("master", "w", 0, 6, read.numpy())
    assert torch.equal(read, values)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ([math.nan], "master of w is not finite"),
        ([math.inf], "master of w is not finite"),
        ([], "master of w lacks elements 5 to 6 of 6"),
    ],
)
def test_what_is_not_whole_and_finite_is_never_committed(run, last, message, monkeypatch) -> None:
    def close(disk: Disk, descriptor: int) -> None:
        os.close(descriptor)
        raise OSError(errno.EIO, "also this fails, as over NFS")

    save(run, 4)
    job = make_job(run, 8, values=torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, *last]))
    if not last:
        monkeypatch.setattr(Disk, "close", close)
    done(job)
    assert isinstance(job.error, SaveFailed)
    assert not job.error.fault
    assert message in str(job.error)
    found = sorted(path.name for path in run.checkpoints.iterdir())
    assert found == ["latest", run.checkpoint(4).name]
    assert read_pointer(run.checkpoints, "latest") == 4


def test_what_fails_after_the_commit_is_a_warning(run: RunDir) -> None:
    save(run, 4)
    (run.checkpoints / "latest").unlink()
    (run.checkpoints / "latest").mkdir()
    (run.checkpoints / "latest" / "in-the-way").touch()
    job = save(run, 8)
    assert job.error is None, "committed, though the pointer could not be set"
    assert "latest" in job.warning
    assert newest_usable(run.checkpoints) == 8


def test_keep_counts_usable_ones_and_leaves_the_damaged(run: RunDir) -> None:
    for step, metric in {4: 3.0, 8: 1.0, 12: 2.0, 16: None, 20: 2.5}.items():
        if step == 16:
            damage(run, 4)
        save(run, step, metric=metric, damaged=frozenset({4}), last=2, best=1, every=0)
    assert list_steps(run.checkpoints) == [4, 8, 16, 20]
    assert read_pointer(run.checkpoints, "best") == 8
    assert read_pointer(run.checkpoints, "latest") == 20


def test_what_is_being_copied_elsewhere_stays_until_it_is_not(run: RunDir) -> None:
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


def test_after_going_back_the_past_that_was_given_up_is_removed(run: RunDir) -> None:
    save(run, 4, 8, 12, 16, last=9)
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


def test_a_past_that_was_given_up_is_not_chosen_where_it_was_left(run: RunDir) -> None:
    """On the disk of a host that was away, or before the first save of the new course."""
    save(run, 4, 8, 12, last=9)
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


def test_damage_falls_back_and_never_past_what_was_removed(run: RunDir) -> None:
    for step in (4, 8):
        save(run, step)
        log_saved(run, step)
    damage(run, 8)
    partial = run.checkpoints / ".step-00000012.partial"  # of a save that was cut short
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(b"half")
    start = start_of(run)
    assert not partial.exists()
    assert (start.step, [bad.step for bad in start.damaged]) == (4, [8])
    assert "rank-00000.safetensors" in start.damaged[0].reason
    damage(run, 4)
    start = start_of(run)
    assert (start.step, [bad.step for bad in start.damaged]) == (0, [8, 4]), "nothing was removed"
    log_saved(run, 2)
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints"):
        start_of(run)
    assert list_steps(run.checkpoints) == [4, 8]


def make_saver(run: RunDir, log: Callable[[str], None]) -> saver_module.Saver:
    exp = experiment(run.root, ranks=1, task={"max_lost": 0.2}, checkpoint={"on_signal": False})
    session: Any = SimpleNamespace(
        exp=exp,
        checkpoint=exp.checkpoint,
        plan=make_plan(exp),
        run_dir=run,
        engine=None,
        task=SimpleNamespace(tokenizer=None, export_files=lambda model: {}),
        identity={},
        consensus=Consensus(timeout_s=60),
        topology=find_topology(run.checkpoints, create=True, group=None),
        metrics=MetricsWriter(run.metrics, enabled=True),
        status=RankStatus(run, rank=0),
        stop=ShutdownRequest(),
        resume_point=ResumePoint(),
        log=log,
    )
    return saver_module.Saver(session)


def test_to_wait_for_a_slow_disk_at_the_end_does_not_look_like_a_hang(run: RunDir) -> None:
    saver, seen = make_saver(run, print), []
    saver.session.status.enter("training")

    def until_seen(_: SaveJob) -> None:
        deadline = time.monotonic() + 30
        while "saving" not in seen and time.monotonic() < deadline:
            seen.append(read_json(run.rank_status(0))["state"])

    saver._job = make_job(run, 2, until_seen)
    saver._job.start()
    saver.config.at_end = False
    saver.at_end(3, PROGRESS)
    assert seen[-1] == "saving"
    assert read_json(run.rank_status(0))["state"] == "training"
    assert not saver.busy


def test_a_save_that_broke_on_one_rank_is_not_taken_for_a_slow_disk(run, monkeypatch) -> None:
    """The others still wait for its part, so together they are busy: it must not go on."""

    def breaks(value: Any, *, group: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    saver = make_saver(run, print)
    saver._job = make_job(run, 2)
    monkeypatch.setattr(save_job, "all_gather", breaks)
    done(saver._job)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        saver.at_boundary(3, Flags(busy=True), PROGRESS)


@pytest.mark.parametrize("fault", [errno.ENOSPC, 0])
def test_a_run_that_cannot_save_ends_and_says_why(run: RunDir, fault: int) -> None:
    saver = make_saver(run, print)
    for number in range(1, 13):
        saver._job = done(make_job(run, number))
        saver._job.error = SaveFailed("the disk is full", fault=fault) if number > 1 else None
        saver.at_boundary(number, Flags(), PROGRESS)
    saver._job = done(make_job(run, 13))
    saver._job.error = SaveFailed("the disk is full", fault=fault)
    expected = saver_module.DiskFull if fault else SaveFailed
    with pytest.raises(expected, match=r"12 of 13 .* disk is full\. At most 20% .*max_lost=0.93"):
        saver.at_boundary(13, Flags(), PROGRESS)


def test_a_disk_that_is_too_slow_is_waited_for_once(run, monkeypatch) -> None:
    """The save in flight does not end: training waits a moment, then checkpoints are passed over
    without waiting again."""
    monkeypatch.setattr(saver_module, "PATIENCE_S", 0.3)
    release, said = threading.Event(), []
    saver = make_saver(run, said.append)
    assert saver.flags() == Flags()
    saver._job = job = make_job(run, 2, lambda _: release.wait(60))
    job.start()
    saver.config.every_steps = 2
    waited: list[tuple[int, float]] = []
    wait = job.wait
    monkeypatch.setattr(job, "wait", lambda s: [waited.append((step, s)), wait(s)][1])
    for step in (3, 4, 6):
        assert saver.flags().busy
        saver.at_boundary(step, Flags(busy=True), PROGRESS)
    assert [each for each in waited if each[1]] == [(4, 0.3)]  # 0: it only asks
    assert [line["step"] for line in events(run, "passed_over")] == [4, 6]
    assert "no checkpoint at step 4" in said[0]
    release.set()
    assert job.wait(60)
    assert not saver.flags().busy
    saver.config.every_minutes = 1e-9
    assert saver.flags() == Flags(save=True)


def test_an_exchange_that_breaks_takes_nothing_back(run, monkeypatch) -> None:
    """Another rank may have heard that all published, and have removed the one before."""
    whole, seen, there = save_job.all_gather, [], []
    for number in itertools.count(1):
        assert save(run, 4, last=1).error is None
        calls = []

        def breaks(value: Any, *, group: Any, number: int = number, calls: list = calls) -> Any:
            calls.append(value)
            if len(calls) == number:
                there.append(list_steps(run.checkpoints))
                raise RuntimeError("Connection closed by peer")
            return whole(value, group=group)

        monkeypatch.setattr(save_job, "all_gather", breaks)
        job = save(run, 8, last=1)
        monkeypatch.setattr(save_job, "all_gather", whole)
        if len(calls) < number:
            break
        assert isinstance(job.error, RuntimeError)
        steps = list_steps(run.checkpoints)
        assert steps == there[-1]
        assert not any(verify(run.checkpoint(step)) for step in steps)
        seen.append(steps)
        for step in steps:
            commit.prune(run.checkpoints, [step])
    # Given up before it was published; published, and both stay; decided, and the old one goes.
    assert [steps for steps, _ in itertools.groupby(seen)] == [[4], [4, 8], [8]]


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.bool)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=9),
    blocks=st.integers(1, 6),
)
@settings(max_examples=25)
def test_copies_in_blocks_are_the_same_elements(sizes: list[Any], blocks: int) -> None:
    """As from a GPU, but for the page-lock and the wait: every element once, blocks used again."""
    made: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        made.append(torch.empty(num_bytes, dtype=torch.uint8))
        return made[-1]

    copies = HostCopies(devices=("cpu",), allocate=allocate, block_bytes=16 * blocks)
    for seed in (0, 1):
        torch.manual_seed(seed)
        live = [torch.randint(0, 2, (size,)).to(dtype) for size, dtype in sizes]
        wanted = [values.clone() for values in live]
        copied = copies.copy(StateTensor("master", str(n), 7, each) for n, each in enumerate(live))
        for values in live:
            values.zero_()
        for number, values in enumerate(wanted):
            mine = [each for each in copied if each.name == str(number)]
            assert torch.equal(torch.cat([each.tensor for each in mine]), values)
            starts = [7 + sum(len(each.tensor) for each in mine[:k]) for k in range(len(mine))]
            assert [each.start for each in mine] == starts
        assert copies.held_bytes == sum(block.nbytes for block in made)
        if seed == 0:
            first = len(made)
    assert len(made) == first, "the second copy needs no memory"


def test_where_no_page_can_be_locked_a_copy_is_made_all_the_same() -> None:
    asked = []

    def refuse(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    copies, live = HostCopies(devices=("cpu",), allocate=refuse), torch.arange(3.0)
    for _ in range(2):
        (copy,) = copies.copy([StateTensor("master", "a", 0, live)])
        assert torch.equal(copy.tensor, live)
        assert copy.tensor.data_ptr() != live.data_ptr()
    assert len(asked) == 1
    assert copies.held_bytes == 0


GIB = 2**30
STEP = "sys/fs/cgroup/{}slurm/job_7/"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 4 * GIB),
        ({"sys/fs/cgroup/memory.max": 5, "sys/fs/cgroup/memory.current": 9}, 0),
        # Slurm and systemd put a job far below the root; 1 GiB of what it uses is a cache.
        ({"proc/self/cgroup": "1:cpu:/\n0::/slurm/job_7/step_0",
          STEP.format("") + "step_0/memory.max": "max",
          STEP.format("") + "memory.max": 5 * GIB, STEP.format("") + "memory.current": 4 * GIB,
          STEP.format("") + "memory.stat": f"anon 5\ninactive_file {GIB}"}, 2 * GIB),
        ({"proc/self/cgroup": "1:cpu:/\n4:memory:/slurm/job_7/step_0",
          STEP.format("memory/") + "step_0/memory.limit_in_bytes": 2**63 - 4096,
          STEP.format("memory/") + "memory.limit_in_bytes": 5 * GIB,
          STEP.format("memory/") + "memory.usage_in_bytes": 4 * GIB,
          STEP.format("memory/") + "memory.stat": f"total_inactive_file {GIB}"}, 2 * GIB),
    ],
)  # fmt: skip
def test_available_memory_is_the_least_of_host_and_control_groups(files, available, tmp_path):
    assert ram_available(f"{tmp_path}/") is None
    meminfo = f"MemTotal: 1 kB\nMemAvailable:   {4 * GIB // 1024} kB\nCached: 5 kB"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert ram_available(f"{tmp_path}/") == available


def test_the_ranks_of_a_host_share_its_memory() -> None:
    everyone = [("a", 3, 10), ("a", 5, 11), ("b", 7, 8)]
    assert save_job.room_for(everyone, "a")
    assert not save_job.room_for([*everyone, ("a", 1, 10)], "a")
    assert not save_job.room_for(everyone, "b")


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    values = torch.linspace(-1, 1, 1001, dtype=dtype)
    assert save_job.is_finite(values)
    for bad in (math.nan, math.inf, -math.inf):
        values[500] = bad
        assert not save_job.is_finite(values)
    assert save_job.is_finite(torch.tensor([1, 2]))
    assert save_job.is_finite(torch.zeros(0))


def test_a_request_is_passed_on_only_while_somebody_can_save() -> None:
    stop, terms = ShutdownRequest(), TermSignals()
    assert not stop.request("SIGTERM")
    stop.enable(False)  # checkpoints are off
    assert not stop.request("SIGTERM")
    assert stop.requested == ""
    stop.enable(True)
    assert stop.request("SIGUSR1")
    assert stop.request("SIGTERM")
    assert stop.disable() == stop.requested == "SIGUSR1"
    assert not stop.request("SIGTERM")
    # The same request again, by way of a launcher that passes it on, is no second one.
    times = (100.0, 100.3, 100.0 + SAME_REQUEST_S, 100.1 + SAME_REQUEST_S)
    assert [terms.is_second(at) for at in times] == [False, False, False, True]


# --- metrics.jsonl and what stays of it; what a checkpoint may be resumed with --------------------

LINES: list[dict[str, Any]] = [
    {"kind": "start", "total_steps": 9},
    {"kind": "eval", "step": 0, "loss": 3.0},
    {"kind": "train", "step": 1, "loss": 2.5},
    {"kind": "event", "step": 2, "event": "saved"},
    {"kind": "train", "step": 3, "loss": 2.0},
    {"kind": "train", "step": 4, "loss": 1.9, "extra": True},
    {"kind": "event", "step": 4, "event": "saved"},
    {"kind": "end", "step": 4},
]
TEXT = "".join(json.dumps(each) + "\n" for each in LINES[:5])


def test_metrics_are_one_json_object_a_line_there_at_once(tmp_path, monkeypatch) -> None:
    path, synced, real = tmp_path / "metrics.jsonl", [], os.fsync
    for enabled in (False, True):  # rank 0 alone writes
        assert not list(tmp_path.iterdir())
        writer = MetricsWriter(path, enabled=enabled)
        writer.write("start", total_steps=3)
    writer.write("train", step=1, loss=float("nan"), grad_norm=float("inf"), lr=1e-3, mfu=None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time") > 0 for line in lines)
    assert lines == [
        {"kind": "start", "total_steps": 3},
        {"kind": "train", "step": 1, "loss": None, "grad_norm": None, "lr": 1e-3, "mfu": None,
         "nonfinite": True},
    ]  # fmt: skip
    monkeypatch.setattr(
        os, "fsync", lambda file: [synced.append(os.fstat(file).st_ino), real(file)]
    )
    writer.sync()  # its name, too: a resumed run has replaced the file, and the old one is gone
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
    writer.close()
    again = MetricsWriter(path, enabled=True)
    again.write("end", step=3)
    again.close()
    assert len(path.read_text().splitlines()) == 3


def test_the_newest_value_is_known_over_a_restart(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", enabled=True)
    assert writer.latest("eval/loss") is None
    writer.remember(LINES)
    assert writer.latest("eval/loss") == {"name": "eval/loss", "value": 3.0}
    assert writer.latest("train/loss") == {"name": "train/loss", "value": 1.9}
    writer.write("eval", step=9, loss=1.0, exact_match=None)
    writer.write("train", step=9, loss=float("nan"))
    writer.event("saved", step=9, loss=7.0)
    assert writer.latest("eval/loss") == {"name": "eval/loss", "value": 1.0}
    assert writer.latest("train/loss") == {"name": "train/loss", "value": 1.9}
    assert writer.latest("eval/exact_match") is None
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["kind"] for line in lines] == ["eval", "train", "event"]
    writer.close()


@pytest.mark.parametrize(
    ("step", "left"),
    [(4, [*LINES[:5], LINES[6]]), (3, LINES[:5]), (2, LINES[:4]), (0, LINES[:2])],
)
def test_lines_after_the_step_go_with_the_end_and_with_what_was_extra(step, left) -> None:
    assert lines_until(LINES, step) == left


@pytest.mark.parametrize(
    "damaged",
    [
        TEXT + '{"kind": "train", "st',
        TEXT.rstrip("\n"),  # whole, but for its end: the next line would join it
        TEXT + "\0\0\0\0",  # as a power cut leaves it
    ],
)
def test_a_torn_line_is_cut_and_a_whole_file_is_left_alone(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(TEXT)
    inode = path.stat().st_ino
    assert truncate_metrics(path, 3) == LINES[:5]
    assert path.stat().st_ino == inode
    path.write_text(damaged)
    assert truncate_metrics(path, 3) == LINES[:5]
    assert path.read_text() == TEXT
    assert truncate_metrics(tmp_path / "none", 3) == []
    assert not (tmp_path / "none").exists()


RUN = {"global_batch": 8, "seq_len": 64, "seed": 0}
DATA = {"seed": 0, "data_fingerprint": "b", "num_samples": 90, "preparation": "1.3"}


@pytest.mark.parametrize(
    ("mine", "saved", "message"),
    [
        (RUN, {"global_batch": 16, "seq_len": 64}, "step 3.*global_batch is 16 in the checkpoint "
         "and 8 in this run; seed is None in the checkpoint"),
        (DATA, {**DATA, "data_fingerprint": "a", "preparation": "1.2"},
         r"another data format \(1.2"),
        (DATA, {**DATA, "data_fingerprint": "a"},
         "belongs to another run: data_fingerprint is a in the checkpoint"),
    ],
)  # fmt: skip
def test_another_run_is_refused_and_all_that_differs_is_named(mine, saved, message) -> None:
    check_identity({"step": 3, **mine, "world_size": 9}, mine)
    with pytest.raises(ConfigError, match=message):
        check_identity({"step": 3, **saved}, mine)


PARAMETERS = {"a": {"trained": True}}
STATE = {"world_size": 2, "zero_stage": 2, "parameters": PARAMETERS, "buffers": {}}
APART = StorageTopology(Path("x"), 0, (0, 1))


@pytest.mark.parametrize(
    ("state", "topology", "stage", "lacking", "wanted"),
    [
        ({}, APART, 2, {0: ["rank-00001.safetensors"], 1: ["rank-00000.safetensors"]}, True),
        ({}, APART, 2, {0: ["rank-00000.safetensors"]}, False),  # hosts have changed places
        ({}, APART, 3, {}, False),
        ({"zero_stage": 0}, APART, 0, {}, False),  # every rank needs everything
        ({}, replace(APART, leaders=(0, 1, 2)), 2, {}, False),
        ({"buffers": {"b": {}}}, APART, 2, {}, False),
        ({"parameters": {"a": {"trained": False}}}, APART, 2, {}, False),
    ],
)
def test_when_each_rank_can_do_with_its_own_file(state, topology, stage, lacking, wanted) -> None:
    assert own_files_suffice({**STATE, **state}, lacking, topology, stage=stage) is wanted


def test_a_checkpoint_behind_a_short_last_step_does_not_go_on_longer() -> None:
    short, longer = RunLength(25, 249, 10), RunLength(50, 498, 10)
    check_samples({}, short)
    check_samples({"step": 25, "samples": 249}, short)
    check_samples({"step": 24, "samples": 240}, longer)
    check_samples({"step": 20, "samples": 200}, RunLength(30, 300, 10))
    message = "step 25 was saved after 249 samples.*ends at sample 250"
    with pytest.raises(ConfigError, match=message):
        check_samples({"step": 25, "samples": 249}, longer)
