"""A real run sent to W&B: one W&B run for it, and the key nowhere but in the tracker process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llmx.run.metrics.lines import read_metrics, scalars
from llmx.run.rundir import RunDir
from tests.wandb_server import WandbServer

KEY = "0123456789abcdef0123456789abcdef01234567"
OVERRIDES = (
    *("experiment=demo", "hardware=cpu2", "tracking=wandb", "model.config.hidden_size=32"),
    *("model.config.intermediate_size=64", "task.steps=6", "task.log_every_steps=1"),
    "task.eval_generate=0",
)

pytestmark = pytest.mark.deepspeed


def watched(tmp_path: Path, server: WandbServer) -> tuple[RunDir, dict[str, bool]]:
    """``python -m llmx`` with a key; says of every process it started whether it had the key."""
    patience = "tracking.finish_timeout_s=120"
    run_dir = tmp_path / "run"
    env = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    log = tmp_path / "console.log"
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    with log.open("w") as console:
        control = subprocess.Popen(
            [sys.executable, "-m", "llmx", *OVERRIDES, patience, f"run_dir={run_dir}", cache],
            stdout=console,
            stderr=console,
            cwd=tmp_path,
            env=env,
        )
        seen: dict[str, bool] = {}
        while control.poll() is None:
            look(control.pid, seen)
            psutil.wait_procs([psutil.Process(control.pid)], timeout=0.1)
    assert control.returncode == 0, log.read_text()
    return RunDir(run_dir), seen


def look(pid: int, seen: dict[str, bool]) -> None:
    """Note, by command line, which descendants of ``pid`` have the key in their environment."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            seen[command] = seen.get(command, False) or KEY in str(process.environ())
        except psutil.Error:
            continue


def test_online(tmp_path: Path) -> None:
    with WandbServer() as server:
        run, seen = watched(tmp_path, server)
    assert len(server.runs) == 1, "one W&B run for one run, not one a rank"
    config = {k: v["value"] for k, v in server.config.items() if isinstance(v, dict)}
    assert config["ds_config"]["zero_optimization"]["stage"] == 2
    rows = {row["_step"]: row for row in server.history}
    lines = [record for record in read_metrics(run.metrics) if record["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        for name, value in scalars(line).items():
            assert float(rows[line["step"]][name]) == pytest.approx(value)

    ranks = {c: had for c, had in seen.items() if "llmx.worker" in c}
    assert ranks, "both have the same command line"
    assert not any(ranks.values()), "a rank never has the key"
    assert not any(KEY in command for command in seen), "nor does any command line"
    leaked = [
        path for path in run.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert leaked == []
