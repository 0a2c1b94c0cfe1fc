"""Hosts that go and come back, and a disk that is full: the run goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llmx.launch.supervision.journal import read_attempts
from llmx.run.rundir import RunDir, read_json
from tests.cluster.launching import LlmxRun, nothing_left, rank_pids, start_llmx
from tests.cluster.netns import Cluster, Host, wait_until

Make = Callable[..., Cluster]
Need = Callable[..., None]
EVERY = 20


def seen(run: LlmxRun, host: Host) -> RunDir:
    """The run directory as it lies on the disk of a host."""
    return RunDir(host.path(run.dir.root))


def committed(run: LlmxRun, host: Host) -> list[int]:
    """Steps of the checkpoints on a host's disk, newest first."""
    found = seen(run, host).checkpoints.glob("step-*/manifest.json")
    return sorted((int(path.parent.name[5:]) for path in found), reverse=True)


def until_attempt(run: LlmxRun, number: int, *, step: int) -> None:
    """Wait for a checkpoint over ``step`` in attempt ``number``."""
    host = run.host

    def there() -> bool:
        assert run.process.poll() is None, run.output()
        now = read_json(seen(run, host).supervisor)["attempt"] if number > 1 else 1
        return now == number and max(committed(run, host), default=0) > step

    wait_until(there, timeout_s=240, what=f"attempt {number} saves after step {step}")


@pytest.mark.nightly
def test_a_host_goes_and_comes_back_empty(make_cluster: Make, tmp_path: Path, need: Need) -> None:
    """No shared disk. The far host loses its power: the run goes on without it, from what was
    collected; when it is back, with nothing on its disk, it takes part again."""
    need("rsync")
    work = tmp_path / "work"
    work.mkdir()
    cluster = make_cluster(private_paths=[work])
    near, far = cluster.hosts
    overrides = [
        *("launch.transport=ssh", "launch.sync=rsync", "launch.elastic=true"),
        *("launch.heartbeat_timeout_s=15", "launch.host_wait_s=3", "launch.restart_backoff_s=1"),
        *(f"checkpoint.every_steps={EVERY}", "task.steps=100000"),
        *(f"run_dir={work}/run", f"data.cache_dir={work}/cache"),
    ]
    run = start_llmx(cluster, tmp_path, overrides=overrides)
    until_attempt(run, 1, step=EVERY)
    plan = read_json(seen(run, near).plan)

    def collected() -> bool:
        """A checkpoint of both ranks lies on the near disk, whole."""
        for step in committed(run, near):
            directory = seen(run, near).checkpoint(step)
            try:
                files = read_json(directory / "manifest.json")["files"]
            except FileNotFoundError:  # newer ones have replaced it meanwhile
                continue
            if "rank-00001.safetensors" in files and all((directory / f).exists() for f in files):
                return True
        return False

    wait_until(collected, timeout_s=60, what="the far rank's part is collected")
    far.kill()
    wait_until(lambda: read_attempts(seen(run, near)), timeout_s=90, what="the host is missed")
    (lost,) = read_attempts(seen(run, near))
    assert (lost["outcome"], lost["host"], lost["decision"]) == ("host_lost", "node-b", "restart")
    until_attempt(run, 2, step=lost["saved_step"])
    alone = read_json(seen(run, near).plan)
    assert [host["name"] for host in alone["hosts"]] == ["node-a"]
    assert alone["batch"]["global_batch"] == plan["batch"]["global_batch"]
    assert alone["batch"]["accumulation"] == 2 * plan["batch"]["accumulation"]
    assert "continuing without node-b (launch.elastic): 1 rank" in run.out.read_text()

    far.boot()
    assert committed(run, far) == []
    (rank,) = rank_pids(near)
    near.run(["kill", "-KILL", str(rank)])
    wait_until(lambda: len(read_attempts(seen(run, near))) == 2, timeout_s=60, what="the kill")
    *_, killed = read_attempts(seen(run, near))
    assert (killed["outcome"], killed["hosts"]) == ("crash", ["node-a"])
    until_attempt(run, 3, step=killed["saved_step"])
    assert read_json(seen(run, near).plan) == plan
    assert "continuing with every host again" in run.out.read_text()
    # Each disk has its checkpoint committed for itself, the near one sometimes first.
    wait_until(
        lambda: max(committed(run, far), default=0) > killed["saved_step"],
        timeout_s=60,
        what="the far host saves again",
    )
    run.signal(signal.SIGTERM)
    assert run.wait(timeout_s=60) == 130, run.output()

    *_, last = read_attempts(seen(run, near))
    assert (last["outcome"], last["hosts"]) == ("interrupted", ["node-a", "node-b"])
    assert last["first_step"] >= killed["saved_step"]
    result = run.result()
    assert f"checkpoint of step {committed(run, far)[0]} saved" in result["cause"]
    assert (result["attempts"], result["restarts"]) == (3, 2)
    steps = [r["step"] for r in run.records() if r["kind"] == "train"]
    assert steps == sorted(set(steps)), "a logged step came twice"
    assert set(range(5, steps[-1], 5)) <= set(steps), "a logged step is missing"
    nothing_left(cluster, timeout_s=5)


def test_a_supervisor_that_is_away(make_cluster: Make, tmp_path: Path, need: Need) -> None:
    """Cut off for less than launch.orphan_timeout_s it takes the ranks over again; suspended for
    longer it starts them again. No shared disk, and no rank on the supervisor's machine."""
    need("rsync")
    work = tmp_path / "work"
    work.mkdir()
    cluster = make_cluster(private_paths=[work])
    near, far = cluster.hosts
    overrides = [
        *("launch.transport=ssh", "launch.sync=rsync", "launch.restart_backoff_s=1"),
        *("launch.orphan_timeout_s=20", "checkpoint.every_steps=1000", "task.steps=100000"),
        *(f"run_dir={work}/run", f"data.cache_dir={work}/cache"),
    ]
    run = start_llmx(cluster, tmp_path, slots=(0, 1), overrides=overrides)
    run.until_step(5)
    ranks = rank_pids(far)

    def log() -> str:
        return seen(run, near).supervisor_log.read_text()

    near.cut()
    wait_until(lambda: "to its agent anew" in log(), timeout_s=30, what="the silence is noticed")
    near.restore()
    step = run.records()[-1]["step"]
    wait_until(lambda: "connected again" in log(), timeout_s=40, what="a new connection")
    run.until_step(step + 50)
    assert rank_pids(far) == ranks
    assert read_attempts(seen(run, near)) == []

    supervisor = str(read_json(seen(run, near).supervisor)["pid"])
    near.run(["kill", "-STOP", supervisor])
    wait_until(lambda: not rank_pids(far), timeout_s=60, what="the ranks are orphaned")
    near.run(["kill", "-CONT", supervisor])
    wait_until(lambda: read_attempts(seen(run, near)), timeout_s=60, what="the end of attempt 1")
    (orphaned,) = read_attempts(seen(run, near))
    assert (orphaned["outcome"], orphaned["decision"]) == ("orphaned", "restart"), orphaned
    assert orphaned["host"] == "node-b"
    wait_until(lambda: rank_pids(far), timeout_s=60, what="the second attempt")
    run.until_step(orphaned["saved_step"] + 10)
    (rank,) = rank_pids(far)
    far.run(["kill", "-TERM", str(rank)])
    assert run.wait(timeout_s=60) != 0, run.output()
    result = run.result()
    assert result["outcome"] == "interrupted", "a rank that somebody else ends has not crashed"
    assert "received SIGTERM or SIGUSR1 from outside" in result["cause"]
    _, last = read_attempts(seen(run, near))
    assert last["first_step"] == orphaned["saved_step"] > step, "the ranks saved"
    steps = [r["step"] for r in run.records() if r["kind"] == "train"]
    assert steps == [1, *range(5, steps[-1] + 1, 5)]
    nothing_left(cluster, timeout_s=10)


@pytest.mark.nightly
def test_a_full_disk_is_waited_for(make_cluster: Make, tmp_path: Path) -> None:
    """The last checkpoint does not fit: the run waits until somebody makes space, and ends well."""
    cluster = make_cluster(hosts=1)
    host = cluster.first
    disk = tmp_path / "small"
    disk.mkdir()
    host.add_disk(disk, size_mib=12)
    steps = 160  # the disk is full several checkpoints before the last one
    overrides = [
        *("launch.restart_backoff_s=1", "launch.transport=ssh", f"task.steps={steps}"),
        *("checkpoint.every_steps=20", "checkpoint.at_end=true", "checkpoint.keep.last=1"),
        f"run_dir={disk}/run",
    ]
    run = start_llmx(cluster, tmp_path, slots=[1], overrides=overrides)
    wait_until(lambda: committed(run, host), timeout_s=120, what="a checkpoint")

    def waits() -> bool:
        fill(host.path(disk))  # again: the checkpoint being saved may have replaced the one before
        return "waiting for the disk" in run.out.read_text()

    wait_until(waits, timeout_s=120, what="the wait")
    state = read_json(seen(run, host).supervisor)
    assert (state["state"], state["attempt"]) == ("waiting", 1)
    host.path(disk / "filler").unlink()
    assert run.wait(timeout_s=120) == 0, run.output()
    first, second = (json.loads(line) for line in seen(run, host).attempts.read_text().splitlines())
    assert (first["outcome"], first["decision"]) == ("disk_full", "restart")
    assert (second["outcome"], second["last_step"]) == ("ok", steps)
    assert committed(run, host) == [steps]
    nothing_left(cluster, timeout_s=5)


def fill(disk: Path) -> None:
    """Fill a disk but for a few small files."""
    room = 5 << 16
    with (disk / "filler").open("ab", buffering=0) as stream, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > room:
            stream.write(bytes(free - room))
