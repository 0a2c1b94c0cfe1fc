"""``benchmarks/gpu``: every part runs at tiny sizes; one that fails never stops the next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PARTS, ROOT
from tests.forked_ranks import shared

NEEDS_GPUS = {"fp16", "synchronisations", "several_gpus"}


def bench(
    directory: Path, *words: str, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "benchmarks.gpu", "--work-dir", str(directory / "work")]
    command += ["--out", str(directory / "results"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def outcomes(directory: Path) -> dict[str, dict]:
    (path,) = (directory / "results").glob("gpu-*.json")
    return {outcome["part"]: outcome for outcome in json.loads(path.read_text())["outcomes"]}


@pytest.mark.deepspeed
def test_every_part_runs_to_its_end_with_shrunken_sizes(tmp_path) -> None:
    # Forked ranks: what starts them otherwise is tested elsewhere (test_launch_local).
    done = bench(tmp_path, "--tiny", python=shared().python)
    results = outcomes(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(results) == list(PARTS)
    for name, outcome in results.items():
        if outcome["state"] == "not run":
            assert name in NEEDS_GPUS
            assert outcome["why"]
        else:
            assert outcome["state"] == "done", (name, outcome)
            assert outcome["measures"], name
    assert {measure["name"] for measure in results["resume"]["measures"]} == {
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
    done = bench(tmp_path, "--tiny", "--parts", "demo,matmul")
    assert done.returncode == 1
    assert "not as expected: demo" in done.stdout
    results = outcomes(tmp_path)
    assert results["demo"]["state"] == "failed"
    assert results["matmul"]["state"] == "done"


def test_an_unknown_part_is_named_with_the_ones_that_exist(tmp_path) -> None:
    done = bench(tmp_path, "--parts", "matmull")
    assert done.returncode == 2
    assert "no part 'matmull'. Did you mean \"matmul\"? Parts: versions, " in done.stderr


def test_a_machine_without_gpus_is_told_what_to_do(tmp_path) -> None:
    from llmx.hardware.detect import detect_gpus

    if detect_gpus():
        pytest.skip("this machine has GPUs")
    done = bench(tmp_path)
    assert done.returncode == 2
    assert "--tiny" in done.stderr
