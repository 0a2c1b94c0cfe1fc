"""Ranks that ``torchrun`` starts on two hosts: one run, continued by the same command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmx.run.rundir import read_json
from tests.cluster.launching import SMALL, nothing_left, rank_pids
from tests.cluster.netns import Cluster, wait_until

TORCHRUN = str(Path(sys.executable).parent / "torchrun")


@pytest.mark.nightly
def test_torchrun_starts_the_ranks(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    """A rank is killed, and the same command continues from the checkpoint. Where the run
    directory is not shared, every process says so."""
    private, run = tmp_path / "private", tmp_path / "run"
    cluster = make_cluster(hosts=2, private_paths=[private])

    def start(run_dir: Path) -> list[subprocess.Popen[bytes]]:
        processes = []
        for rank, host in enumerate(cluster.hosts):
            argv = [
                *(TORCHRUN, "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"),
                *(f"--master-addr={cluster.first.address}", "--master-port=29511", "-m", "llmx"),
                *(*SMALL, "checkpoint.every_steps=20"),
                *("task.steps=200", f"data.cache_dir={tmp_path / 'cache'}"),
                *(f"run_dir={run_dir}", "launch=external"),
            ]
            with (tmp_path / f"{rank}.out").open("wb") as out:
                processes.append(
                    host.popen(
                        argv, cwd=str(tmp_path), env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        return processes

    def output() -> str:
        return "".join((tmp_path / f"{rank}.out").read_text() for rank in (0, 1))

    def codes(processes: list[subprocess.Popen[bytes]]) -> list[int]:
        return [process.wait(timeout=120) for process in processes]

    first = start(run)
    wait_until(
        lambda: list(run.glob("checkpoints/step-*/manifest.json")),
        timeout_s=120,
        what="a checkpoint",
    )
    (pid,) = rank_pids(cluster.hosts[1])
    cluster.hosts[1].run(["kill", "-KILL", str(pid)])
    assert codes(first) == [1, 1], output()
    assert read_json(run / "result.json")["outcome"] != "ok"

    assert codes(start(run)) == [0, 0], output()
    result = read_json(run / "result.json")
    assert (result["outcome"], result["steps"], result["attempts"]) == ("ok", 200, 2)
    assert "resuming" in output()

    assert codes(start(private / "run")) == [1, 1]
    assert "rank 1 on node-b cannot see this run directory" in output()
    assert "rank 1: this machine does not see the run directory" in output()
    nothing_left(cluster)
