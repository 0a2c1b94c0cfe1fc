"""Trials at the same time: what runs beside what, what ends with what, what is left behind.

The trials are composed and placed as they are, and run in processes of their own; in the place of
their ranks is a function that says when it began and ended.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from llmx.__main__ import main
from llmx.launch.supervision.journal import supervisor_lock
from llmx.lifecycle.learned import learned_file, read_observations
from llmx.run import snapshot, sweepdir
from llmx.run.rundir import RunDir, write_json
from llmx.run.sweepdir import Sweep
from llmx.sweep.process import TrialProcess, end_earlier
from tests.agents import is_running
from tests.cluster.netns import wait_until
from tests.made_up_trials import enter, only_sweep, outcomes

pytestmark = pytest.mark.long

SMALL = ["hardware=cpu2", "model.config.num_hidden_layers=1", "sweep.trial_steps=3"]
LR = "optim.lr=1e-3,2e-3,3e-3"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter(tmp_path, monkeypatch)
    monkeypatch.setattr("llmx.sweep.sweep.supervise", supervised)
    return tmp_path


def supervised(exp: Any, plan: Any, run: RunDir, *, launch: Any, is_trial: bool) -> SimpleNamespace:
    """In the place of the ranks, in the process of the trial."""
    begun = time.time()
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    with supervisor_lock(run, launch.token):
        print("in the log", flush=True)
        line = {"kind": "train", "step_time_s": 0.5, "tokens_per_s": 4000.0}
        lines = [json.dumps({**line, "step": step}) + "\n" for step in range(1, 8)]
        run.metrics.write_text("".join(lines))
        lr = exp.optim.lr
        if lr == 5e-3:
            os.kill(os.getpid(), signal.SIGKILL)
        if lr == 6e-3:
            raise ZeroDivisionError("unexpected")
        until = begun + (60.0 if lr == 9e-3 else 0.2)
        while time.time() < until and not stopped:
            time.sleep(0.02)
        while exp.hardware.hosts[0].slots == 1 and not stopped and time.time() < begun + 60:
            # One of several: not before another one has begun.
            if len(list(run.root.parent.glob("*/logs/console.log"))) > 1:
                break
            time.sleep(0.02)
        failed = "crash" if lr == 7e-3 else "oom" if exp.batch.micro_batch == 4 else ""
        outcome = "interrupted" if stopped else failed or "ok"
        write_json(
            run.result,
            {"outcome": outcome, "cause": outcome if outcome != "ok" else "", "started": begun,
             "ended": time.time(), "run_id": snapshot.run_id(run)},
        )  # fmt: skip
    return SimpleNamespace(exit_code={"ok": 0, "interrupted": 130}.get(outcome, 1))


def hardware_of(journal: Sweep, index: int) -> dict[str, Any]:
    path = journal.directory / journal.trials[index].run_dir / "config.yaml"
    values: dict[str, Any] = yaml.safe_load(path.read_text())["hardware"]
    return values


def at_once(journal: Sweep) -> int:
    """The most trials that ran at a time."""
    begun = [(entry.started or 0.0, 1) for entry in journal.trials]
    changes = sorted([*begun, *((entry.ended or 0.0, -1) for entry in journal.trials)])
    return max(itertools.accumulate(change for _, change in changes))


@pytest.mark.usefixtures("made_up_traces")
def test_trials_run_beside_each_other_on_slots_of_their_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMX_LEARNED", "on")
    words = ["-m", LR, "zero=stage2", *SMALL, "sweep.slots_per_trial=1"]
    assert main(words) == 0
    journal = only_sweep()
    assert outcomes(journal) == ["ok"] * 3
    assert at_once(journal) == 2
    assert {entry.slots for entry in journal.trials} == {"localhost:0", "localhost:1"}
    assert (journal.pid, journal.complete) == (os.getpid(), True)
    assert read_observations(learned_file()) == [], "others shared the host"
    for index in range(3):
        hardware = hardware_of(journal, index)
        assert hardware["hosts"][0]["slots"] == 1
        assert hardware["env"]["LLMX_RANKS_PER_HOST"] == "2"
    log = journal.directory / journal.trials[0].run_dir / "logs" / "console.log"
    assert log.read_text() == "in the log\n"
    said = capsys.readouterr().out
    assert "[0] optim.lr=0.001: started on localhost:0\n" in said
    assert "[2] optim.lr=0.003: ok" in said
    assert "3/3 trials  3 done" in said
    assert (journal.directory / "sweep.html").is_file()
    assert main([*words, f"hydra.sweep.dir={journal.directory}"]) == 0
    kept = [entry.ended for entry in only_sweep().trials]
    assert kept == [entry.ended for entry in journal.trials], "whatever slots they had, the same"


@pytest.mark.usefixtures("made_up_traces")
def test_a_sweep_that_goes_on_knows_what_did_not_fit(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran out of memory on slots of its own spares the larger trials also in the attempt that
    does not run it again. A trial alone on its hosts teaches."""
    monkeypatch.setenv("LLMX_LEARNED", "on")
    words = ["batch.micro_batch=1,4,8", "optim.lr=1e-3", "zero=stage2", *SMALL]
    words = ["-m", *words, "sweep.slots_per_trial=2", "hydra.sweep.dir=outputs/sweeps/one"]
    for more in ([], ["sweep.retry=[crash]"]):
        assert main([*words, *more]) != 0
        journal = only_sweep()
        assert outcomes(journal) == ["ok", "oom", "pruned"]
        assert journal.trials[2].cause.startswith("trial 1 ran out of memory and needs no more")
    assert journal.trials[1].slots == "localhost:0,1"
    assert hardware_of(journal, 0)["hosts"][0]["slots"] == 2
    shown = len(read_observations(learned_file()))
    assert main(["-m", "optim.lr=1e-3,2e-3", *SMALL]) == 0  # without slots of their own
    assert len(read_observations(learned_file())) == shown + 2 > 2


def test_one_that_dies_disturbs_no_other(here: Path, capsys) -> None:
    grid = "optim.lr=5e-3,6e-3,7e-3,1e-3"
    assert main(["-m", grid, *SMALL, "sweep.slots_per_trial=1"]) == 1
    journal = only_sweep()
    assert outcomes(journal) == ["failed", "failed", "crash", "ok"]
    assert "ended by SIGKILL" in journal.trials[0].cause
    assert "ZeroDivisionError('unexpected')" in journal.trials[1].cause
    said = capsys.readouterr()
    assert "[2] optim.lr=0.007: crash: crash (log: " in said.err
    assert "1 of 4 trials succeeded; 2 failed, 1 crash" in said.out


def test_fail_fast_stops_what_runs_beside(here: Path, capsys) -> None:
    words = ["optim.lr=9e-3,7e-3,1e-3,2e-3", "sweep.slots_per_trial=1", "sweep.fail_fast=true"]
    assert main(["-m", *SMALL, *words]) == 1
    assert outcomes(only_sweep()) == ["interrupted", "crash", "", ""]
    assert "trials not started: 2" in capsys.readouterr().err


RUN = """
import sys
from tests.unit import test_sweep_concurrent as here
import llmx.sweep.sweep as sweep
sweep.supervise = here.supervised
from llmx.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def start(root: Path, *words: str) -> subprocess.Popen[str]:
    """A sweep in a process of its own, as a terminal starts it, when two trials run."""
    argv, pipe = [sys.executable, "-c", RUN, "-m", *words], subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    streams: Any = {"stdout": pipe, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(argv, cwd=root, env=env, start_new_session=True, **streams)

    def two_run() -> bool:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        logs = [*root.glob("outputs/sweeps/*/*/logs/console.log")]
        return len(logs) > 1 and all(path.stat().st_size for path in logs)

    wait_until(two_run, timeout_s=90, what="that two trials run")
    return process


def holders(root: Path) -> list[int]:
    """The processes of the trials."""
    return [
        json.loads(path.read_text())["pid"]
        for path in root.glob("outputs/sweeps/*/*/supervisor.lock")
    ]


LONG = ("optim.lr=9e-3", "seed=1,2,3", *SMALL, "sweep.slots_per_trial=1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_every_trial_and_the_sweep(here: Path, number: int) -> None:
    process = start(here, *LONG)
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    journal = only_sweep()
    assert outcomes(journal) == ["interrupted", "interrupted", ""]
    assert {entry.cause for entry in journal.trials[:2]} == {"interrupted"}
    place = journal.directory.relative_to(here)
    assert "Stopping 2 trials; a second Ctrl-C ends them at once" in said
    assert f"trials not started: 1. To go on: python -m llmx sweep resume {place}" in said
    assert not any(map(is_running, holders(here)))


def test_trials_die_with_their_sweep_and_it_goes_on(here: Path) -> None:
    """Killed, it can end nothing itself; the next attempt never writes where one still lives."""
    process = start(here, *LONG)
    pids = holders(here)
    process.kill()
    process.communicate()
    directory = only_sweep().directory
    assert not sweepdir.is_running(directory), "its trials do not hold it"
    # The trials of the first attempt end on their own; shorter ones do in their place.
    journal = directory / "sweep.json"
    journal.write_text(journal.read_text().replace("optim.lr=9e-3", "optim.lr=1e-3"))
    assert main(["sweep", "resume", str(directory)]) == 0
    assert not any(map(is_running, pids))
    assert outcomes(only_sweep()) == ["ok"] * 3


def test_an_earlier_attempt_that_does_not_end_is_killed(tmp_path: Path) -> None:
    run, said = RunDir(tmp_path / "0_run"), []

    def stuck() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with supervisor_lock(run, "0123456789"):
            signal.pause()
        return 0

    process = TrialProcess(run, stuck)
    lock = run.supervisor_lock
    wait_until(lambda: lock.is_file() and lock.stat().st_size, timeout_s=30, what="the lock")
    assert process.poll() is None
    end_earlier(run, grace_s=0.2, notify=said.append)
    assert said == ["waiting for the earlier attempt of 0_run, which is ending"]
    end = wait_until(process.poll, timeout_s=10, what="the end of the trial")
    assert "ended by SIGKILL" in str(end.error)
    end_earlier(run, grace_s=0.0, notify=said.append)
    assert len(said) == 1
