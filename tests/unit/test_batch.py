"""The batch script of a run.

``pytest tests/unit/test_batch.py``
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from llmx.launch.supervision.outcome import Result
from llmx.lifecycle.batch import batch_script, requeue_job
from llmx.run.rundir import RunDir
from tests.composing import composed

REQUEST = ("hardware=slurm", "hardware.nodes=2", "hardware.slots=4", "hardware.device=a100_80g")


def script(tmp_path: Path, *more: str, config_dir: str | None = None) -> str:
    words = [*REQUEST, "launch.slurm.submit=true", *more]
    done = composed(words, run_dir=str(tmp_path / "a run"))
    return batch_script(done.experiment, done.plan, words=words, config_dir=config_dir)


def options(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def test_a_job_asks_for_what_the_plan_has(tmp_path: Path) -> None:
    asked = options(
        script(
            tmp_path,
            "launch.slurm.partition=gpu",
            "launch.slurm.time_limit=12:00:00",
            "launch.slurm.sbatch_args=['--mail-type=END']",
            "launch.stop_grace_s=300",
        )
    )
    expected = ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--requeue",
                "--signal=B:USR1@360", "--partition=gpu", "--time=12:00:00", "--mail-type=END",
                f"--output={tmp_path / 'a run'}/logs/console.log"]  # fmt: skip
    assert set(expected) <= set(asked)
    assert not any(option.startswith("--nodelist") for option in asked)
    assert "--gres=gpu:a100:4" in options(script(tmp_path, "launch.slurm.gres=gpu:a100:4"))


def test_the_script_starts_the_run_and_then_continues_it(tmp_path: Path) -> None:
    """The words reach python as they were typed, in both cases."""
    text = script(tmp_path, "name='two words'", config_dir="/conf dir")
    before, _, _ = text.rpartition("exec ")
    shown = f'{before}printf "%s\\n" "$@"'

    def words() -> list[str]:
        argv = ["bash", "-c", shown]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()

    run = RunDir(tmp_path / "a run")
    first = words()
    assert first[: len(REQUEST)] == list(REQUEST)
    assert {"name='two words'", f"run_dir={run.root}", "launch.slurm.requeue=true"} <= set(first)
    assert "launch.slurm.submit=true" not in first
    assert first[-2:] == ["--config-dir", "/conf dir"]
    run.root.mkdir()
    run.identity.touch()
    again = ["resume", str(run.root), "hardware=slurm", "hardware.device=a100_80g"]
    assert words()[: len(again)] == again


@pytest.mark.parametrize(("signal", "job"), [("SIGTERM", "7"), ("SIGUSR1", ""), ("", "7")])
def test_only_the_signal_of_the_script_requeues(
    signal: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setattr("llmx.lifecycle.batch.ask", lambda argv: pytest.fail(f"ran {argv}"))
    result = Result(stopped_by="time_limit", signal=signal)
    with (tmp_path / "out").open("w") as out:
        requeue_job(RunDir(tmp_path), result, first_step=0, stream=out)
    assert (tmp_path / "out").read_text() == ""


def test_a_job_without_a_new_checkpoint_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("llmx.lifecycle.batch.ask", lambda argv: pytest.fail(f"ran {argv}"))
    result = Result(stopped_by="time_limit", signal="SIGUSR1")
    with (tmp_path / "out").open("w") as out:
        requeue_job(RunDir(tmp_path), result, first_step=20, stream=out)
    assert "not requeued: job 7 saved no checkpoint after step 20" in (tmp_path / "out").read_text()
