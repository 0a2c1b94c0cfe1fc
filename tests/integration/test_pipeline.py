"""The bundled pipeline in its smallest form, ended in its second stage and finished by the same
command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.errors import INTERRUPTED
from llmx.run.rundir import RunDir, read_mapping
from tests.agents import wait_until
from tests.command_runs import forked, lines, llmx

pytestmark = pytest.mark.deepspeed

WORDS = (
    *("pipeline", "rlhf_demo", "run_dir=chain", "hardware=cpu2", "precision=fp32"),
    *("data.max_rows=200", "task.evaluate=false", "task.log_every_steps=1", "task.steps=2"),
    *("sft.model.config.hidden_size=32", "sft.model.config.num_hidden_layers=1"),
    *("sft.task.epochs=null", "reward.task.epochs=null"),
    *("reward.task.steps=60", "grpo.task.options.group_size=2", "batch.global_batch=4"),
    *("grpo.task.options.max_new_tokens=4", "batch.micro_batch=2", "data.cache_dir=cache"),
)


@pytest.mark.nightly
def test_it_is_ended_in_its_second_stage_and_finished_by_the_same_command(tmp_path: Path) -> None:
    sft, reward, grpo = (RunDir(tmp_path / "chain" / name) for name in ("sft", "reward", "grpo"))
    words = [*WORDS, forked()]
    first = subprocess.Popen(
        [sys.executable, "-m", "llmx", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: bool(lines(reward.root, "train")) or first.poll() is not None, timeout_s=300)
    first.send_signal(signal.SIGTERM)
    text, _ = first.communicate(timeout=300)
    assert first.returncode == INTERRUPTED, text
    assert read_mapping(sft.result)["outcome"] == "ok"
    assert read_mapping(reward.result)["outcome"] == "interrupted"
    assert not grpo.config.exists()
    assert "The same command continues it" in text

    done = llmx(tmp_path, *words)
    assert done.returncode == 0, done.stdout[-8000:]
    assert len(lines(sft.root, "start")) == 1
    assert not [line for line in lines(sft.root, "event") if line["event"] == "resumed"]
    (resumed,) = [line for line in lines(reward.root, "event") if line["event"] == "resumed"]
    assert 0 < resumed["step"] < 60
    assert lines(reward.root, "end")[-1]["step"] == 60
    assert lines(grpo.root, "end")[-1]["step"] == 2
    assert all("reward/reward_model" in line for line in lines(grpo.root, "train"))
    states = [line.split()[:2] for line in done.stdout.splitlines()[-3:]]
    assert states == [["sft", "finished"], ["reward", "finished"], ["grpo", "finished"]]

    again = llmx(tmp_path, *words)
    assert again.returncode == 0
    assert "[" not in again.stdout, "nothing is left to do"
