"""Real DeepSpeed on this machine, from the command line: ends, failures, other runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmx.launch.agents.agent import ProcessTable
from tests.cluster.launching import SMALL, LlmxRun
from tests.cluster.netns import wait_until
from tests.command_runs import forked, llmx
from tests.resumed_runs import assert_planned_sizes

pytestmark = pytest.mark.deepspeed


class LocalRun(LlmxRun):
    """One ``python -m llmx`` of this machine."""

    def __init__(self, directory: Path, *overrides: str, **env: str) -> None:
        words = [f"run_dir={directory / 'run'}", f"data.cache_dir={directory / 'cache'}"]
        process = start(directory, *SMALL, "hardware=cpu2", *words, *overrides, **env)
        super().__init__(None, process, directory / "run", directory / "out")

    def resume(self, *overrides: str) -> None:
        """``python -m llmx resume`` in the place of the process that is gone."""
        self.process = start(self.out.parent, "resume", str(self.dir.root), *overrides)

    def until(self, condition: Callable[[], Any], *, timeout_s: float = 120.0) -> Any:
        def reached() -> Any:
            value = condition()
            assert value or self.process.poll() is None, self.output()
            return value

        return wait_until(reached, timeout_s=timeout_s, what="the condition")

    def pid_of_rank(self, rank: int) -> int:
        return int(json.loads(self.dir.rank_status(rank).read_text())["pid"])

    def environment(self) -> dict[str, str]:
        """What the launch gives to every rank."""
        lines = self.dir.ds_env.read_text().splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def token(self) -> str:
        return self.environment()["LLMX_RUN_TOKEN"]

    def left(self) -> list[list[str]]:
        """The argv of every process of the run that is still there."""
        return [process.argv for process in ProcessTable(self.token()).find(fresh=True)]


def start(directory: Path, *words: str, **env: str) -> subprocess.Popen[bytes]:
    """``python -m llmx WORDS``; what it says is added to the file ``out``."""
    with (directory / "out").open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "llmx", *words],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def test_two_runs_at_once_and_one_is_interrupted(tmp_path: Path) -> None:
    """The other one goes on. The interrupted one says its newest checkpoint and how it goes on;
    so does a resume that is interrupted before it trains, and the same command says it, too."""
    words = ("task.steps=100000", "checkpoint.every_steps=2")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (LocalRun(tmp_path / name, *words) for name in "ab")
    first.until(first.dir.newest_step)
    second.until_step(1)
    first.signal(signal.SIGINT)
    assert first.wait(timeout_s=60) == 130
    assert first.result()["outcome"] == "interrupted"
    assert first.left() == []
    assert len(second.left()) == 2, "its ranks"
    second.kill()
    second.process.wait()
    wait_until(lambda: not second.left(), timeout_s=30, what="nothing of the second run is left")

    newest = f"newest checkpoint: step {first.dir.newest_step()}"
    resume = f"python -m llmx resume {first.dir.root}"
    argv = [sys.executable, "-m", "llmx", "resume", str(first.dir.root)]
    for line in ("run directory", "launching"):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as again:
            assert again.stdout is not None
            next(said for said in again.stdout if said.startswith(line))
            again.send_signal(signal.SIGINT)
            rest = again.stdout.read()
        assert again.returncode == 130
        assert newest in rest
        assert f"to resume: {resume}\n" in rest
    again_as_new = LocalRun(tmp_path / "a", *words)
    assert again_as_new.wait(timeout_s=60) == 2
    assert f"already contains a run; a run is never overwritten. Continue it with {resume}," in (
        again_as_new.out.read_text()
    )


def test_an_error_of_the_users_data(tmp_path: Path) -> None:
    """The message, no traceback, its own exit code; and nobody waits for a time-out."""
    data = tmp_path / "rows.jsonl"
    # Further down than what is looked at before the launch.
    data.write_text('{"prompt": "a", "response": "b"}\n' * 1200 + "not json\n")
    words = (f"data.path={data}", "data.form=prompt_response", "data.max_rows=null")
    run = LocalRun(tmp_path, *words, "task.steps=5", forked())
    assert run.wait(timeout_s=120) == 3, run.out.read_text()
    said = run.out.read_text()
    assert f"{data}" in said
    assert "line 1201" in said
    assert "Traceback" not in said
    assert run.result()["outcome"] == "data"
    assert run.left() == []


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before a rank is started. On one with space for two checkpoints, as the plan has it,
    the same run is resumed and ends well; and it has written what the plan says."""
    monkeypatch.setenv("LLMX_TRACES", "on")  # sizes are those of the traced network
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    disk = tmp_path / "run"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "llmx-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        words = ["model.config.hidden_size=128", "model.config.num_hidden_layers=4"]
        run = LocalRun(tmp_path, *words, "task.steps=6", "checkpoint.every_steps=2")
        assert run.wait(timeout_s=240) == 2, run.out.read_text()
        said = run.out.read_text()
        assert f"config: {disk} has " in said
        assert "the first one is removed only when the second is complete" in said
        assert "set run_dir to a directory on a larger disk" in said
        assert not list((disk / "ranks").iterdir()), "no rank was started"
        subprocess.run(["mount", "-o", "remount,size=13m", str(disk)], check=True)
        resumed = ("resume", str(disk), "checkpoint.keep.last=1", forked())
        done = llmx(tmp_path, *resumed, timeout_s=240)
        assert done.returncode == 0, done.stdout
        assert "saves fail" not in done.stdout, "there is enough"
        assert [path.name for path in run.dir.checkpoints.glob("step-*")] == ["step-00000006"]
        assert_planned_sizes(run.dir)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_defect_shows_its_traceback_once(tmp_path: Path) -> None:
    """An import that fails in every rank, before anything is logged; `transformers` reports it as
    another error."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizers.py").write_text("raise RuntimeError('a broken package')\n")
    run = LocalRun(tmp_path, "task.steps=5", PYTHONPATH=str(broken))
    assert run.wait(timeout_s=120) == 1, run.out.read_text()
    said = run.out.read_text()
    assert said.count("RuntimeError: a broken package") == 1
    assert said.count("Traceback (most recent call last)") == 2  # the root cause and what it led to
    assert run.result()["outcome"] == "crash"
    assert run.result()["failed_rank"] in (0, 1)
    assert run.left() == []
