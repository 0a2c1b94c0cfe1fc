"""A run without a terminal: how it is left, shown and ended.

``pytest tests/unit/test_detached.py``
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from llmx.errors import LaunchError
from llmx.launch.supervision.journal import supervisor_lock
from llmx.launch.supervision.signals import ShutdownRequest, sender_of
from llmx.lifecycle.detach import detach
from llmx.observe.control import main
from llmx.run.rundir import RunDir, read_mapping, write_json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "config.yaml").write_text("")
    return RunDir(tmp_path)


def supervise(run: RunDir) -> int:
    """Hold the run until a signal asks for the end."""
    shutdown = ShutdownRequest()
    with supervisor_lock(run, "1" * 16), shutdown.handle_signals(print):
        print("step 1", flush=True)
        shutdown.event.wait(60)
        result = {"outcome": "interrupted", "cause": shutdown.source, "exit_code": 130}
        write_json(run.result, result)
    return 130


def test_a_detached_run_is_shown_and_stopped(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    assert detach(run, lambda: supervise(run)) == 0
    printed = capfd.readouterr().out
    assert f"python -m llmx stop {run.root}" in printed
    pid = int(re.search(r"process (\d+)", printed)[1])  # type: ignore[index]
    assert os.getsid(pid) == pid, "a session of its own"
    codes: list[int] = []
    shown = threading.Thread(target=lambda: codes.append(main(["attach", str(run.root)])))
    shown.start()
    assert main(["stop", str(run.root)]) == 0
    shown.join(timeout=20)
    assert codes == [130], "the code of the run"
    printed = capfd.readouterr().out
    assert "step 1\n" in printed
    assert "interrupted: SIGTERM\n" in printed
    os.waitpid(pid, 0)
    assert main(["stop", str(run.root)]) == 2
    assert "it has ended (interrupted)" in capfd.readouterr().err


def test_a_run_that_cannot_be_left(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """What it said before it held the run is said here, with its exit code."""

    def refused() -> int:
        raise LaunchError("somebody else has it")

    assert detach(run, refused) == LaunchError.exit_code
    assert "somebody else has it" in capfd.readouterr().err


def test_a_run_of_another_machine(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    write_json(run.supervisor_lock, {"host": "login-1", "pid": 1, "time": 0.0})
    assert main(["stop", str(run.root)]) == 2
    assert f"python -m llmx stop USER@login-1:{run.root}" in capfd.readouterr().err
    assert main(["attach", str(run.root / "no-such")]) == 2
    assert read_mapping(run.supervisor_lock)["pid"] == 1


def test_only_the_holder_of_the_lock_is_ended(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody's run directory may name any process as its supervisor."""
    with supervisor_lock(run, secrets.token_hex(8)), subprocess.Popen(["sleep", "60"]) as other:
        for pid in (other.pid, -other.pid, 0, "1"):
            run.supervisor_lock.write_text(json.dumps({"pid": pid}))
            assert main(["stop", str(run.root)]) == 2
            assert f"process {pid} of its supervisor.lock" in capfd.readouterr().err
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(
    ("number", "environ", "kind", "words"),
    [
        (signal.SIGTERM, {}, "user", "SIGTERM"),
        (signal.SIGINT, {"SLURM_JOB_ID": "7"}, "user", "Ctrl-C"),
        (signal.SIGHUP, {}, "user", "hang-up"),
        (signal.SIGUSR1, {"SLURM_JOB_ID": "7"}, "scheduler", "Slurm job 7"),
        (
            signal.SIGUSR1,
            {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1120"},
            "time_limit",
            "SIGUSR1 before the time limit of Slurm job 7, 2:00 left",
        ),
        (
            signal.SIGTERM,
            {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "8200"},
            "scheduler",
            "preempted or cancelled, 2:00:00 before its limit",
        ),
    ],
)
def test_who_ended_the_run(number: int, environ: dict[str, str], kind: str, words: str) -> None:
    sender = sender_of(number, environ, now=1000.0)
    assert sender.kind == kind
    assert words in sender.words
