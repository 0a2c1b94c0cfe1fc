"""``benchmarks/gpu``: its measures, and every part at tiny sizes; what fails or hangs does not stop
the next part, and a lock that would stop it is named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.__main__ import PARTS, ROOT, find_context, main, wait
from benchmarks.machine import refuse_left_locks
from llmx.errors import ConfigError
from llmx.hardware import detect
from tests.cluster.host import wait_until
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
@pytest.mark.nightly
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


def test_parts_and_gpus_that_are_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--parts", "matmull"]) == 2
    message = "no part 'matmull'. Did you mean \"matmul\"? Parts: versions, "
    assert message in capsys.readouterr().err
    monkeypatch.setattr(detect, "detect_gpus", list)
    assert main([]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_the_gpus_are_those_that_this_process_sees(tmp_path, monkeypatch) -> None:
    gpus = [
        detect.Gpu("Tesla V100-PCIE-32GB", 32.0, 7.0, 0, "GPU-a"),
        detect.Gpu("NVIDIA H200", 140.0, 9.0, 1, "GPU-b"),
    ]
    monkeypatch.setattr(detect, "detect_gpus", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    context = find_context(tmp_path, tiny=False)
    assert (context.device_name, context.num_gpus) == ("h200_141g", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not find_context(tmp_path, tiny=True).cuda
    with pytest.raises(ConfigError, match="this process sees none"):
        find_context(tmp_path, tiny=False)


def living_of_group(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found


def test_a_part_over_its_time_is_ended_with_what_it_started() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, start_new_session=True
    )
    assert wait(process, limit_s=0.5) == "it did not end within its 0.5 s"
    assert process.returncode == -signal.SIGTERM
    # Each of the group was told; the last one may end a moment after the first.
    wait_until(lambda: not living_of_group(process.pid), timeout_s=30, what="the group ended")


def test_a_lock_that_no_process_has_open_is_refused(tmp_path, monkeypatch) -> None:
    """However new it is: a build that was killed just now does not go on."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    refuse_left_locks()
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("x"):  # as torch does while it builds
        refuse_left_locks()
    with pytest.raises(SystemExit, match=rf"{lock} is left from a build.*Remove it\."):
        refuse_left_locks()
