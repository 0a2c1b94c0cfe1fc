"""A run that is hit goes on by itself: a killed rank, a rank that hangs, a preemption, a supervisor
that dies. Real DeepSpeed on this machine; each test is the life of one run."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest

from llmx.launch import supervise
from llmx.launch.files import make_spec
from llmx.launch.supervision.journal import read_attempts
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.rundir import read_json
from tests.cluster.netns import wait_until
from tests.command_runs import forked
from tests.integration.test_launch_local import LocalRun

pytestmark = pytest.mark.deepspeed
DIVERGING = "tests.programs.diverging"
EVERY = 10
SAVING = (f"checkpoint.every_steps={EVERY}", "task.log_every_steps=5", "launch.restart_backoff_s=1")


def committed(run: LocalRun) -> int:
    """The newest checkpoint; 0 where there is none."""
    names = [path.parent.name for path in run.dir.checkpoints.glob("step-*/manifest.json")]
    return max((int(name[5:]) for name in names), default=0)


def until_committed(run: LocalRun, step: int) -> None:
    run.until(lambda: committed(run) >= step, timeout_s=240)


def check_metrics(run: LocalRun, last: int) -> None:
    """Every logged step once, in order; one beginning."""
    found = run.records()
    steps = [record["step"] for record in found if record["kind"] == "train"]
    wanted = sorted({1, *range(5, last + 1, 5), last})
    assert steps == wanted
    assert [record["kind"] for record in found].count("start") == 1


def test_hang_preemption_and_a_dead_supervisor(tmp_path: Path) -> None:
    """The life of one run: it hangs, is preempted, is resumed, loses its supervisor, ends well."""
    run = LocalRun(tmp_path, "task.steps=100000", "launch.hang_timeout_s=10", *SAVING)
    until_committed(run, EVERY)
    stopped = run.pid_of_rank(1)
    os.kill(stopped, signal.SIGSTOP)
    run.until(lambda: read_attempts(run.dir), timeout_s=120)
    (hung,) = read_attempts(run.dir)
    assert (hung["outcome"], hung["rank"], hung["decision"]) == ("hang", 1, "restart"), hung
    assert "no rank made progress for" in hung["cause"]
    stacks = run.dir.rank_log(0).read_text()
    assert "most recent call first" in stacks
    assert "llmx/train/loop.py" in stacks

    # As a scheduler does before it takes the machine away.
    until_committed(run, hung["saved_step"] + EVERY)
    run.signal(signal.SIGUSR1)
    assert run.wait(timeout_s=60) == 130, run.out.read_text()
    result = run.result()
    saved = committed(run)
    assert result["outcome"] == "interrupted"
    assert f"SIGUSR1; checkpoint of step {saved} saved" in result["cause"]
    assert f"python -m llmx resume {run.dir.root}" in run.out.read_text()
    assert read_json(run.dir.rank_status(0))["state"] == "interrupted"
    assert run.left() == []

    run.resume(forked())
    until_committed(run, saved + EVERY)
    run.kill()
    run.process.wait()
    wait_until(lambda: not run.left(), timeout_s=40, what="nothing of the run is left")
    # The agents let the ranks save when nobody is left to go on.
    newest = committed(run)
    assert newest > saved

    run.resume(f"task.steps={newest + 15}")
    assert run.wait(timeout_s=240) == 0, run.out.read_text()
    *_, last = read_attempts(run.dir)
    assert (last["outcome"], last["first_step"], last["last_step"]) == ("ok", newest, newest + 15)
    check_metrics(run, newest + 15)
    assert run.result()["run_id"] == read_json(run.dir.identity)["run_id"]


@pytest.mark.nightly
def test_a_step_that_diverges_twice_is_passed_over(tmp_path: Path) -> None:
    """The first time it may have been the machine; the second time it is that step's samples."""
    words = ("task.steps=12", "checkpoint.every_steps=4", "task.log_every_steps=1")
    words += ("task.on_divergence=skip", "launch.restart_backoff_s=0", "hardware.slots=1")
    run = LocalRun(tmp_path, "dry_run=true", *words)
    assert run.wait(timeout_s=60) == 0, run.out.read_text()
    exp, plan = snapshot.load(run.dir), Plan.from_dict(read_json(run.dir.plan))
    token = snapshot.run_token(run.dir)
    spec = make_spec(exp, plan, run.dir, port=0, token=token, worker=DIVERGING)
    console = io.StringIO()
    result = supervise(exp, plan, run.dir, launch=spec, stream=console)
    said = console.getvalue()
    assert result.outcome == "ok", said

    first, second, third = read_attempts(run.dir)
    assert (first["outcome"], first["saved_step"], first["decision"]) == ("nan", 4, "restart")
    assert "The loss of step 7 is not finite" in first["cause"]
    assert (second["first_step"], second["skip_steps"]) == (4, [7])
    assert "training diverged at the same step twice; skipping step 7" in said
    assert (third["outcome"], third["first_step"], third["last_step"]) == ("ok", 4, 12)
    steps = [record["step"] for record in run.records() if record["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    (skipped,) = (record for record in run.records() if record.get("event") == "skipped")
    assert skipped["step"] == 7
