"""A sweep whose trials are Slurm jobs of their own: a real queue, a job that is cancelled in it,
and a sweep that is killed and finds its jobs again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from llmx.run.sweepdir import ENDED, Trial, is_sweep, load
from tests.cluster.launching import SMALL, hardware_of, nothing_left
from tests.cluster.netns import Cluster, wait_until
from tests.cluster.slurm import logs, start_slurm


def test_trials_are_jobs_that_outlive_their_sweep(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    need("slurm")
    cluster = make_cluster()
    start_slurm(cluster)
    first = cluster.first
    # Somebody else has node-b.
    first.run(["sbatch", "--nodelist=node-b", "-n2", f"--chdir={tmp_path}", "--job-name=other",
               "--output=/dev/null", "--wrap", "sleep 600"])  # fmt: skip
    conf, sweep_dir = tmp_path / "conf" / "hardware", tmp_path / "sweep"
    conf.mkdir(parents=True)
    (conf / "slurm2.yaml").write_text(yaml.safe_dump(hardware_of(cluster, (1, 1))))
    argv = [
        *(sys.executable, "-m", "llmx", "-m", "seed=1,2,3", *SMALL, "hardware=slurm2"),
        *("launch.transport=slurm", "sweep.slots_per_trial=1", "sweep.max_jobs=3"),
        *("sweep.trial_steps=3", f"data.cache_dir={tmp_path / 'cache'}"),
        *(f"hydra.sweep.dir={sweep_dir}", f"--config-dir={conf.parent}"),
    ]

    def start(name: str) -> subprocess.Popen[Any]:
        with (tmp_path / name).open("wb") as out:
            return first.popen(
                argv, cwd=str(tmp_path), env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def entries() -> list[Trial]:
        return load(sweep_dir).trials if is_sweep(sweep_dir) else []

    def said(name: str) -> str:
        consoles = "".join(
            f"\n--- {path}\n{path.read_text()}" for path in sweep_dir.glob("*/logs/console.log")
        )
        return f"{(tmp_path / name).read_text()}{consoles}\n{logs(cluster)}"

    sweep = start("first.out")
    try:
        wait_until(
            lambda: [bool(entry.job) for entry in entries()] == [True] * 3,
            timeout_s=120,
            what="three jobs",
        )
        jobs = [entry.job for entry in entries()]
        assert [entry.slots for entry in entries()] == ["node-a:0", "node-b:0", "node-a:0"]
        first.run(["scancel", jobs[1]])  # it waits for node-b
        wait_until(lambda: entries()[1].state == ENDED, timeout_s=60, what="one is cancelled")
        assert entries()[1].outcome == "interrupted"
        assert entries()[1].cause == f"its Slurm job {jobs[1]} was cancelled before it started"
    except BaseException:
        print(said("first.out"))
        raise
    finally:
        sweep.kill()
        sweep.wait()
    first.run(["scancel", "--name=other"])

    sweep = start("second.out")
    assert sweep.wait(timeout=240) == 0, said("second.out")
    assert [entry.outcome for entry in entries()] == ["ok"] * 3, said("second.out")
    after = [entry.job for entry in entries()]
    assert (after[0], after[2]) == (jobs[0], jobs[2]), "found again, not run again"
    assert after[1] != jobs[1]
    speeds = (sweep_dir / "sweep.md").read_text()
    assert "3 of 3 trials succeeded" in (tmp_path / "second.out").read_text()
    assert speeds.count("| ok | 3 |") == 3
    nothing_left(cluster, timeout_s=20)
