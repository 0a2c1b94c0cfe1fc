"""However a run is ended, nothing of it is left on any host, and others' processes stay.

``pytest tests/cluster/test_launch_stop.py``
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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


def start(cluster: Cluster, directory: Path, transport: str) -> LlmxRun:
    overrides = [f"launch.transport={transport}", *LONG]
    run = start_llmx(cluster, directory, overrides=overrides)
    run.until_step(5)
    return run


def pick(transport: str, request: pytest.FixtureRequest) -> Cluster:
    cluster = request.getfixturevalue("slurm_cluster" if transport == "slurm" else "cluster")
    assert isinstance(cluster, Cluster)
    return cluster


def only(cluster: Cluster, pids: dict[str, int]) -> bool:
    """Whether each host runs its bystander and nothing else."""
    return all(len(host.processes()) == 1 for host in cluster.hosts) and bool(pids)


# One handler serves SIGINT and SIGTERM; how ranks are reached differs by transport.
@pytest.mark.parametrize(
    ("number", "transport"),
    [
        (signal.SIGINT, "pdsh"),
        (signal.SIGTERM, "openmpi"),
        (signal.SIGUSR1, "slurm"),
        (signal.SIGKILL, "pdsh"),
        (signal.SIGKILL, "openmpi"),
        (signal.SIGKILL, "slurm"),
    ],
)
def test_nothing_is_left(
    number: signal.Signals,
    transport: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    need: Callable[..., None],
) -> None:
    need(transport)
    cluster = pick(transport, request)
    others = {host.name: bystander(host) for host in cluster.hosts}
    try:
        run = start(cluster, tmp_path, transport)
        began = time.monotonic()
        run.signal(number)
        code = run.wait(timeout_s=40)
        wait_until(
            lambda: only(cluster, {name: p.pid for name, p in others.items()}),
            timeout_s=30 - (time.monotonic() - began),
            what=f"only the bystanders are left: {[h.processes() for h in cluster.hosts]}",
        )
        assert all(process.poll() is None for process in others.values())
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL
        else:
            assert code == 130, run.output()
            assert run.result()["outcome"] == "interrupted"
            assert "checkpoint of step" in run.result()["cause"]
        # The ranks save before they leave, also when nobody is left who asked for it.
        assert list(run.dir.checkpoints.glob("step-*/manifest.json"))
    finally:
        for process in others.values():
            process.kill()
            process.wait()
    nothing_left(cluster, timeout_s=5)


def test_inside_an_allocation(
    slurm_cluster: Cluster, tmp_path: Path, need: Callable[..., None]
) -> None:
    """There the run is a step: it ends, and the allocation stays."""
    need("slurm")
    host = slurm_cluster.first
    host.run(["salloc", "--no-shell", "-N2", "-n2", "--job-name=mine"])
    (job,) = host.run(["squeue", "-ho", "%A"]).stdout.split()
    try:
        overrides = ["launch.transport=slurm", *LONG]
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


def test_ctrl_c_twice_does_not_wait(
    cluster: Cluster, tmp_path: Path, need: Callable[..., None]
) -> None:
    """Ranks that ignore the first request (stopped ones cannot hear it) are killed at once."""
    need("pdsh")
    overrides = ["launch.transport=pdsh", "launch.stop_grace_s=60", *LONG]
    run = start_llmx(cluster, tmp_path, overrides=overrides)
    run.until_step(5)
    for host in cluster.hosts:
        (rank,) = rank_pids(host)
        host.run(["kill", "-STOP", str(rank)])
    run.signal(signal.SIGINT)
    wait_until(
        lambda: "a second signal ends them" in run.out.read_text(),
        timeout_s=10,
        what="the first request",
    )
    began = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait(timeout_s=40) == 130, run.output()
    assert time.monotonic() - began < 30
    nothing_left(cluster, timeout_s=5)


def test_a_dead_network_ends_the_run_on_the_far_host(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    """The agent there hears nothing any more and ends its ranks by itself."""
    need("pdsh")
    cluster = make_cluster()
    overrides = [
        "launch.transport=pdsh",
        "launch.heartbeat_timeout_s=15",
        "launch.max_restarts=0",
        *LONG,
    ]
    run = start_llmx(cluster, tmp_path, overrides=overrides)
    run.until_step(5)
    cluster["node-b"].cut()
    far = cluster["node-b"]
    wait_until(lambda: not far.processes(), timeout_s=45, what="node-b is empty")
    assert run.wait(timeout_s=60) == 1, run.output()
    assert run.result()["outcome"] == "host_lost", run.output()
    assert run.result()["host"] == "node-b"
    wait_until(lambda: not cluster.first.processes(), timeout_s=10, what="node-a is empty")
