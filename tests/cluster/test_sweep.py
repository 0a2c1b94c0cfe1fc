"""Sweeps in which everything goes wrong that can, and sweeps whose trials are Slurm jobs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.run.rundir import RunDir, read_mapping
from llmx.run.sweepdir import ENDED, Trial, is_sweep, load
from tests.cluster.launching import (
    SMALL,
    LlmxRun,
    hardware_of,
    nothing_left,
    start_program,
    write_option,
)
from tests.cluster.netns import Cluster, wait_until
from tests.cluster.slurm import logs, start_slurm
from tests.programs import faulty

RAM_MIB = 1400
"""Of each host: DeepSpeed's launchers and a rank take about two thirds."""
HUGE = {"config": {"intermediate_size": 131072}}
"""A micro batch of six such samples takes 1.6 GiB."""
TRIALS: dict[str, dict[str, Any]] = {
    "large": {"model": HUGE, "batch": {"micro_batch": 6}},
    "stuck": {"task": {"options": {"fault": "hang"}}, "launch": {"hang_timeout_s": 6}},
    "larger": {"model": HUGE, "batch": {"micro_batch": 12}},
    "good": {"optim": {"lr": 1e-3}},
    "broken": {"task": {"options": {"fault": "crash"}}, "optim": {"lr": 1e-4}},
    "better": {"optim": {"lr": 5e-3}},
}
"""In this order, two at a time: the first two have a host each; the third waits for the first."""


@pytest.mark.nightly
def test_a_sweep_on_two_hosts_ends_as_it_must(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(hosts=2)
    for host in cluster.hosts:
        host.limit_memory(RAM_MIB)
    directory = tmp_path / "sweep"
    write_trials(tmp_path / "conf", cluster)
    shutil.copy(faulty.__file__, tmp_path / "faulty.py")
    own = ("experiment=", "model.config.intermediate_size=", "batch.micro_batch=")
    words = [word for word in SMALL if not word.startswith(own)]
    run = start(
        cluster,
        tmp_path,
        [
            "-m", f"experiment={','.join(TRIALS)}", *words, "hardware=pair", "sweep.trial_steps=3",
            "sweep.slots_per_trial=1", "sweep.objective=train/loss", f"hydra.sweep.dir={directory}",
            f"data.cache_dir={tmp_path}/cache", f"--config-dir={tmp_path}/conf",
        ],
    )  # fmt: skip

    def until(name: str, state: str) -> None:
        def reached() -> bool:
            assert run.process.poll() is None, run.output()
            return entries(directory).get(name, {}).get("state") == state

        wait_until(reached, timeout_s=240, what=f"{name} is {state}")

    for name in ("large", "stuck", "larger", "good", "broken"):
        until(name, "ended")
    until("better", "running")
    run.kill()
    run.process.wait()
    first = entries(directory)
    outcomes = {name: entry["outcome"] for name, entry in first.items()}
    assert outcomes == {
        "large": "oom", "stuck": "hang", "larger": "pruned", "good": "ok", "broken": "crash",
        "better": "",
    }, run.output()  # fmt: skip
    causes = {name: entry["cause"] for name, entry in first.items()}
    assert "OOM killer" in causes["large"]
    assert "no rank made progress" in causes["stuck"]
    assert causes["larger"].startswith("trial 0 ran out of memory and needs no more")
    assert "the wheel came off" in causes["broken"]
    used = {entry["slots"].partition(":")[0] for entry in first.values() if entry["slots"]}
    assert used == {host.name for host in cluster.hosts}
    assert not (directory / "2_experiment-larger" / "result.json").exists()

    # What is missing or is asked for runs again; the rest stays as it is.
    Path(tmp_path / "healed").touch()
    again = start(cluster, tmp_path, ["sweep", "resume", str(directory), "sweep.retry=[crash]"])
    assert again.wait(timeout_s=240) != 0, "two trials have failed"
    last, said = entries(directory), again.output()
    assert {name: entry["outcome"] for name, entry in last.items()} == outcomes | {
        "broken": "ok", "better": "ok",
    }, said  # fmt: skip
    for name in ("large", "stuck", "good"):
        assert last[name] == {**first[name], "overrides": last[name]["overrides"]}
    run_of = {name: RunDir(directory / entry["run_dir"]) for name, entry in last.items()}
    before = [path.name for path in directory.glob("*.attempt-1")]
    assert sorted(before) == sorted(
        f"{run_of[n].root.name}.attempt-1" for n in ("broken", "better")
    )
    losses = {
        name: read_mapping(run_of[name].result)["final_loss"]
        for name in ("good", "broken", "better")
    }
    assert min(losses, key=lambda name: losses[name]) == "better"
    assert "Trial 5, the best of 3 by train/loss" in (directory / "best.yaml").read_text()
    table = (directory / "sweep.md").read_text()
    for word in ("oom", "hang", "pruned", "OOM killer", "ran out of memory and needs no more"):
        assert word in table
    # Once for all trials.
    assert len(list((tmp_path / "cache/data").glob("demo-train-*/meta.json"))) == 1
    nothing_left(cluster)


def write_trials(conf: Path, cluster: Cluster) -> None:
    """The hosts as ``hardware=pair``, and each trial as an experiment."""
    (conf / "experiment").mkdir(parents=True)
    write_option(conf.parent, "pair", hardware_of(cluster, (1, 1)))
    for name, own in TRIALS.items():
        task = {"kind": "faulty:Faulty", **own.get("task", {})}
        batch = own.get("batch", {"micro_batch": 2})
        values = {"defaults": ["demo", "_self_"], **own, "batch": batch, "task": task}
        text = f"# @package _global_\n{yaml.safe_dump(values, sort_keys=False)}"
        (conf / f"experiment/{name}.yaml").write_text(text)


def entries(directory: Path) -> dict[str, dict[str, Any]]:
    """The trials of the journal, by what is their own."""
    trials = read_mapping(directory / "sweep.json").get("trials", [])
    found = {}
    for trial in trials:
        (word,) = [word for word in trial["overrides"] if word.startswith("experiment=")]
        found[word.removeprefix("experiment=")] = trial
    return found


def start(cluster: Cluster, directory: Path, words: Sequence[str]) -> LlmxRun:
    """``python -m llmx WORDS`` on the first host."""
    out = directory / f"{words[0].lstrip('-')}.out"
    process = start_program(cluster.first, [sys.executable, "-m", "llmx", *words], out)
    return LlmxRun(cluster.first, process, directory / "none", out)


# --- A sweep whose trials are Slurm jobs of their own ---


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
    sweep_dir = tmp_path / "sweep"
    option = write_option(tmp_path, "slurm2", hardware_of(cluster, (1, 1)))
    argv = [
        *(sys.executable, "-m", "llmx", "-m", "seed=1,2,3", *SMALL, "hardware=slurm2"),
        *("launch.transport=slurm", "sweep.slots_per_trial=1", "sweep.max_jobs=3"),
        *("sweep.trial_steps=3", f"data.cache_dir={tmp_path / 'cache'}"),
        *(f"hydra.sweep.dir={sweep_dir}", option),
    ]

    def entries() -> list[Trial]:
        return load(sweep_dir).trials if is_sweep(sweep_dir) else []

    def said(name: str) -> str:
        consoles = "".join(
            f"\n--- {path}\n{path.read_text()}" for path in sweep_dir.glob("*/logs/console.log")
        )
        return f"{(tmp_path / name).read_text()}{consoles}\n{logs(cluster)}"

    sweep = start_program(first, argv, tmp_path / "first.out")
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

    sweep = start_program(first, argv, tmp_path / "second.out")
    assert sweep.wait(timeout=240) == 0, said("second.out")
    assert [entry.outcome for entry in entries()] == ["ok"] * 3, said("second.out")
    after = [entry.job for entry in entries()]
    assert (after[0], after[2]) == (jobs[0], jobs[2]), "found again, not run again"
    assert after[1] != jobs[1]
    speeds = (sweep_dir / "sweep.md").read_text()
    assert "3 of 3 trials succeeded" in (tmp_path / "second.out").read_text()
    assert speeds.count("| ok | 3 |") == 3
    nothing_left(cluster, timeout_s=20)
