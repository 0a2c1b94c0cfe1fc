"""The command line as a process of its own: what a user types and sees."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "deepspeed", "transformers", "datasets", "wandb", "matplotlib")
MOST_MODULES = 590
"""Of a dry run, which has ``rich`` for its table (45 modules) beside what a run imports."""


def llmx(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmx", *words],
        cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_plan_of_the_mission(tmp_path) -> None:
    done = llmx("task=sft", "zero=stage3", "hardware=a100x2_v100x2", "dry_run=true", cwd=tmp_path)
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
    assert (run / "command.txt").read_text().splitlines()[-1] in done.stdout


def test_the_control_process_imports_nothing_heavy(tmp_path) -> None:
    program = (
        "import json, sys; from llmx.__main__ import main; code = main(sys.argv[1:]); "
        "print('MODULES ' + json.dumps(sorted(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "hardware=cpu2", "dry_run=true"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    loaded = set(json.loads(line.removeprefix("MODULES ")))
    assert "hydra" in loaded
    assert not loaded & set(HEAVY)
    assert "numpy" not in loaded
    assert len(loaded) <= MOST_MODULES, "what grew: python -X importtime -m llmx dry_run=true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.stepss=3"], 'task.stepss: no such key. Did you mean "task.steps"?'),
        (["launch.env.WANDB_API_KEY=abc"], "looks like a secret"),
        (["model=hf", "model.path=/no/such/model"], "model.path=/no/such/model: no such file"),
    ],
)
def test_a_mistake_is_one_clear_message(words, message, tmp_path) -> None:
    """More of them, in process: tests/unit/test_front_door.py."""
    done = llmx(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


def test_hydras_own_flags(tmp_path) -> None:
    assert "stage: 3" in llmx("zero_stage=stage3", "--cfg", "job", cwd=tmp_path).stdout
    assert "DeepSpeedLauncher" in llmx("--info", "plugins", cwd=tmp_path).stdout
    assert "hardware/local" in llmx("--info", "defaults", cwd=tmp_path).stdout
    assert llmx("--version", cwd=tmp_path).stdout.startswith("llmx ")


def test_ones_own_cluster_by_config_dir(tmp_path) -> None:
    (tmp_path / "mine" / "hardware").mkdir(parents=True)
    (tmp_path / "mine" / "hardware" / "lab.yaml").write_text(
        "# Lab.\nname: lab\nhosts:\n"
        "  - {name: gpu-1, address: 10.9.0.1, slots: 2, device: a100_80g, ssh_port: 2222}\n"
    )
    done = llmx("--config-dir", "mine", "hardware=lab", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "10.9.0.1:2222" in done.stdout


def test_a_sweep_names_its_cells_by_their_axes(tmp_path) -> None:
    done = llmx("-m", "zero_stage=stage1,stage3", "seed=5", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {path.name for path in tmp_path.glob("outputs/sweeps/*/*") if path.is_dir()}
    assert cells == {"0_zero-stage1", "1_zero-stage3"}


def test_a_failed_cell_does_not_stop_the_others(tmp_path) -> None:
    done = llmx("-m", "optim.lr=-1,1e-3", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "[0] optim.lr=-1: refused: optim.lr=-1: must be a number above 0" in done.stderr
    assert "1_optim.lr-0.001" in "".join(str(p) for p in tmp_path.glob("outputs/sweeps/*/*"))
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


def test_free_mappings_need_no_plus(tmp_path) -> None:
    words = ("launch.env.NCCL_DEBUG=INFO", "hardware.env={NCCL_IB_DISABLE: '1'}", "dry_run=true")
    done = llmx(*words, "hardware=a100x2_v100x2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "outputs").iterdir()
    env = (run / "ds_env").read_text()
    assert "NCCL_DEBUG=INFO\n" in env
    assert "NCCL_IB_DISABLE=1\n" in env
