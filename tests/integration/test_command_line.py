"""The command line as a process of its own: what a user types and sees."""

from __future__ import annotations

import json
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
