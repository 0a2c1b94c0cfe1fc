"""The command line as a process of its own: what a user types and sees."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

MOST_MODULES = 590
"""Of a dry run, which has ``rich`` for its table (45 modules) beside what a run imports."""


def ran(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def llmx(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return ran("-m", "llmx", *words, cwd=cwd)


def test_plan_of_the_mission(tmp_path) -> None:
    """Free mappings need no plus."""
    free = ("launch.env.NCCL_DEBUG=INFO", "hardware.env={NCCL_IB_DISABLE: '1'}")
    mission = ("task=sft", "zero=stage3", "hardware=a100x2_v100x2")
    done = llmx(*mission, *free, "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "v100_32g (node-b) has no bf16" in done.stdout
    (run,) = (tmp_path / "outputs").iterdir()
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml", "overrides.yaml", "provenance.json", "plan.json", "ds_config.json",
        "hostfile", "ssh_config", "ds_env", "command.txt",
    }  # fmt: skip
    assert (run / "hostfile").read_text() == "node-a slots=2\nnode-b slots=2\n"
    assert (run / "ds_env").stat().st_mode & 0o777 == 0o600
    env = (run / "ds_env").read_text().splitlines()
    assert {"NCCL_DEBUG=INFO", "NCCL_IB_DISABLE=1"} <= {*env}
    assert (run / "command.txt").read_text().splitlines()[-1] in done.stdout


def test_a_mistake_is_one_message_and_leaves_nothing_behind(tmp_path) -> None:
    done = llmx("launch.env.WANDB_API_KEY=abc", cwd=tmp_path)
    assert done.returncode == 2
    assert "looks like a secret" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_control_process_imports_nothing_heavy(tmp_path) -> None:
    program = (
        "import json, sys; from llmx.__main__ import main; code = main(sys.argv[1:]); "
        "print('MODULES ' + json.dumps(sorted(sys.modules))); sys.exit(code)"
    )
    done = ran("-c", program, "hardware=cpu2", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    loaded = set(json.loads(line.removeprefix("MODULES ")))
    heavy = {"torch", "deepspeed", "transformers", "datasets", "wandb", "matplotlib", "numpy"}
    assert "hydra" in loaded
    assert not loaded & heavy
    assert len(loaded) <= MOST_MODULES, "what grew: python -X importtime -m llmx dry_run=true"


def test_a_failed_cell_does_not_stop_the_others(tmp_path) -> None:
    done = llmx("-m", "optim.lr=-1,1e-3", "zero_stage=stage1", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "[0] optim.lr=-1: refused: optim.lr=-1: must be a number above 0" in done.stderr
    cells = {path.name for path in tmp_path.glob("outputs/sweeps/*/*") if path.is_dir()}
    assert cells >= {"1_optim.lr-0.001"}
    table = done.stdout[done.stdout.rindex("Sweep: 1 of 2 trials planned") :]
    assert re.search(r"0 +optim.lr=-1 +refused", table)
    assert re.search(r"1 +optim.lr=0.001 +planned", table)
    assert "[0] refused: optim.lr=-1" in table
    (sweep,) = tmp_path.glob("outputs/sweeps/*/sweep.csv")
    rows = list(csv.DictReader(sweep.read_text().splitlines()))
    assert [row["outcome"] for row in rows] == ["refused", "planned"]
    assert [row["optim.lr"] for row in rows] == ["-1", "0.001"]
    assert [row["run_dir"] for row in rows] == ["", "1_optim.lr-0.001"]
    assert "| 1 | optim.lr=0.001 | planned |" in sweep.with_suffix(".md").read_text()
