"""``python -m llmx bench``: every part runs, shrunken; one that fails never stops the next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.bench.part import PARTS
from tests.forked_ranks import shared

NEEDS_GPUS = {"fp16", "synchronisations", "several_gpus"}


def bench(
    *words: str, cwd: Path, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "llmx", "bench", "--tiny", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def outcomes(directory: Path) -> dict[str, dict]:
    (found,) = directory.glob("gpu-*.json")
    return {outcome["part"]: outcome for outcome in json.loads(found.read_text())["outcomes"]}


@pytest.mark.deepspeed
def test_every_part_runs_to_its_end_with_shrunken_sizes(tmp_path) -> None:
    # Forked ranks: what starts them otherwise is tested elsewhere (test_launch_local).
    done = bench("--out", "results", "--work-dir", "work", cwd=tmp_path, python=shared().python)
    found = outcomes(tmp_path / "results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(found) == list(PARTS)
    for name, outcome in found.items():
        if outcome["state"] == "not run":
            assert name in NEEDS_GPUS
            assert outcome["why"]
        else:
            assert outcome["state"] == "done", (name, outcome)
            assert outcome["measures"], name
    assert {measure["name"] for measure in found["resume"]["measures"]} == {
        "stage2: losses equal after a resume",
        "stage2: weights equal after a resume",
    }
    (table,) = (tmp_path / "results").glob("gpu-*.md")
    text = table.read_text()
    assert all(f"(`{name}`)" in text for name in PARTS)
    assert "Shrunken sizes" in text


def test_a_part_that_fails_says_why_and_the_next_one_runs(tmp_path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "runs").write_text("a file where the runs should lie")
    words = ("--out", "results", "--work-dir", "work", "--parts", "demo,matmul")
    done = bench(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "not as expected: demo" in done.stdout
    found = outcomes(tmp_path / "results")
    assert found["demo"]["state"] == "failed"
    assert found["matmul"]["state"] == "done"


def test_an_unknown_part_is_named_with_the_ones_that_exist(tmp_path) -> None:
    done = bench("--parts", "matmull", cwd=tmp_path)
    assert done.returncode == 2
    assert "no part 'matmull'. Did you mean \"matmul\"? Parts: versions, " in done.stderr


def test_a_machine_without_gpus_is_told_what_to_do(tmp_path) -> None:
    from llmx.hardware.detect import detect_gpus

    if detect_gpus():
        pytest.skip("this machine has GPUs")
    command = [sys.executable, "-m", "llmx", "bench"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--tiny" in done.stderr
