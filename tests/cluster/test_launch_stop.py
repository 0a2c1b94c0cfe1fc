"""However a run is ended, nothing of it is left on any host, and others' processes stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmx.launch.supervision.journal import read_attempts
from llmx.run.rundir import read_json, read_mapping
from tests.cluster.launching import LlmxRun, nothing_left, rank_pids, start_llmx
from tests.cluster.netns import Cluster, Host, wait_until
from tests.cluster.slurm import start_slurm

LONG = ["task.steps=100000"]


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[Cluster]:
    with Cluster(hosts=2) as pair:
        start_slurm(pair)
        yield pair


def bystander(host: Host) -> subprocess.Popen[Any]:
    """Somebody else's run: a token of its own, and a command line that `pkill -f` would match."""
    code = "import signal; signal.pause()"
    words = ["-m", "deepspeed.launcher.launch", "--node_rank=0", "llmx.worker"]
    return host.popen([sys.executable, "-c", code, *words], env={"LLMX_RUN_TOKEN": "another"})


def start(cluster: Cluster, directory: Path, transport: str, *overrides: str) -> LlmxRun:
    overrides = (f"launch.transport={transport}", *LONG, *overrides)
    run = start_llmx(cluster, directory, overrides=overrides)
    run.until_step(5)
    return run


def pick(transport: str, request: pytest.FixtureRequest) -> Cluster:
    cluster = request.getfixturevalue("slurm_cluster" if transport == "slurm" else "cluster")
    assert isinstance(cluster, Cluster)
    return cluster


@contextmanager
def bystanders(cluster: Cluster) -> Iterator[Callable[[], bool]]:
    """Somebody else's run on every host, which must live on; whether nothing else is left there."""
    others = [bystander(host) for host in cluster.hosts]
    try:
        yield lambda: all(len(host.processes()) == 1 for host in cluster.hosts)
        assert all(process.poll() is None for process in others)
    finally:
        for process in others:
            process.kill()
            process.wait()
    nothing_left(cluster, timeout_s=5)


# One handler serves SIGINT and SIGTERM; how ranks are reached differs by transport.
@pytest.mark.parametrize(
    ("transport", "number"),
    [
        ("ssh", signal.SIGINT),
        pytest.param("openmpi", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("slurm", signal.SIGUSR1, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_is_named_and_a_stopped_run_leaves_nothing(
    transport: str,
    number: signal.Signals,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    need: Callable[..., None],
) -> None:
    """SIGKILL leaves no traceback, and the other rank's broken connection is not the cause. The
    run goes on, and ends when it is asked to."""
    need(transport)
    cluster = pick(transport, request)
    with bystanders(cluster) as alone:
        patient = ("launch.restart_backoff_s=0", "launch.stop_grace_s=60")
        run = start(cluster, tmp_path, transport, *patient)
        first = read_json(run.dir.rank_status(1))
        far = cluster["node-b"]
        (rank,) = rank_pids(far)
        far.run(["kill", "-KILL", str(rank)])
        wait_until(lambda: read_attempts(run.dir), timeout_s=60, what="the end of the ranks")
        (killed,) = read_attempts(run.dir)
        assert (killed["outcome"], killed["rank"], killed["host"]) == ("crash", 1, "node-b"), killed
        assert "SIGKILL" in killed["cause"]

        def trains_again() -> bool:
            status = read_mapping(run.dir.rank_status(1))
            return status.get("pid") != first["pid"] and status.get("state") == "training"

        wait_until(trains_again, timeout_s=120, what="the second attempt trains")
        if number == signal.SIGINT:
            ask_twice(run, cluster)
        else:
            run.signal(number)
            assert run.wait(timeout_s=40) == 130, run.output()
            assert "checkpoint of step" in run.result()["cause"]
        wait_until(alone, timeout_s=10, what="only the bystanders are left")
        assert run.result()["outcome"] == "interrupted"


def ask_twice(run: LlmxRun, cluster: Cluster) -> None:
    """Ranks that ignore the first request (stopped ones cannot hear it) are killed at once."""
    for host in cluster.hosts:
        (rank,) = rank_pids(host)
        host.run(["kill", "-STOP", str(rank)])
    run.signal(signal.SIGINT)
    said = "a second signal ends them"
    wait_until(lambda: said in run.out.read_text(), timeout_s=10, what="the first request")
    run.signal(signal.SIGINT)
    assert run.wait(timeout_s=30) == 130, run.output()


@pytest.mark.parametrize(
    "transport", [pytest.param("ssh", marks=pytest.mark.nightly), "openmpi", "slurm"]
)
def test_ranks_do_not_outlive_their_supervisor(
    transport: str, request: pytest.FixtureRequest, tmp_path: Path, need: Callable[..., None]
) -> None:
    need(transport)
    cluster = pick(transport, request)
    with bystanders(cluster) as alone:
        run = start(cluster, tmp_path, transport)
        token = run.path(run.dir.root / f".token-{os.getuid()}").read_text()
        words = [
            word for host in cluster.hosts for argv in host.processes().values() for word in argv
        ]
        assert [word for word in words if token in word] == [], "every user reads command lines"
        run.kill()
        assert run.wait(timeout_s=10) == -signal.SIGKILL
        wait_until(alone, timeout_s=30, what="only the bystanders are left")
        # The ranks save before they leave, also when nobody is left who asked for it.
        assert list(run.dir.checkpoints.glob("step-*/manifest.json"))


def test_inside_an_allocation(
    slurm_cluster: Cluster, tmp_path: Path, need: Callable[..., None]
) -> None:
    """There the run is a step on the nodes of the allocation: it ends, and the allocation stays.
    In an allocation that has ended, it is refused."""
    need("slurm")
    host = slurm_cluster.first
    host.run(["salloc", "--no-shell", "-N2", "-n2", "--job-name=mine"])
    (job,) = host.run(["squeue", "-ho", "%A"]).stdout.split()
    try:
        overrides = ["hardware=slurm", "hardware.device=cpu", *LONG]
        env = {"SLURM_JOB_ID": job, "SLURM_JOBID": job}
        run = start_llmx(slurm_cluster, tmp_path, overrides=overrides, env=env)
        run.until_step(5)
        for host in slurm_cluster.hosts:
            for pid in rank_pids(host):
                host.run(["kill", "-STOP", str(pid)])  # deaf to SIGTERM
        run.signal(signal.SIGKILL)
        run.wait(timeout_s=10)
        wait_until(
            lambda: not any(rank_pids(h) for h in slurm_cluster.hosts),
            timeout_s=30,
            what="no rank is left",
        )
        assert job in slurm_cluster.first.run(["squeue", "-ho", "%A %j"]).stdout
    finally:
        slurm_cluster.first.run(["scancel", job])
    nothing_left(slurm_cluster, timeout_s=20)
    run = start_llmx(slurm_cluster, tmp_path, overrides=overrides, env=env, name="late")
    assert run.wait(timeout_s=60) == 2, run.output()
    assert f"SLURM_JOB_ID={job}: that job has ended (its state is CANCELLED)" in run.output()
