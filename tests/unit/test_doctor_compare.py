"""Hosts are compared before a launch: what cannot train together is named, with the fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from llmx.doctor import survey as program
from llmx.doctor.compare import GIB, compare_hosts
from tests.composing import composed


def facts(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6"},
        "nccl": ["nvidia-nccl-cu12==2.27.3"],
        "gpus": 2,
        "gpu_names": ["NVIDIA A100-SXM4-40GB"] * 2,
        "driver": "570.86.15",
        "cpu": "Big CPU avx2",
        "free_bytes": 500 * GIB,
        "shm_bytes": 64 * GIB,
        "open_files": 65536,
        "ninja": True,
        "compiler": True,
        "stale_locks": [],
        "code": "0123456789ab",
    }
    return {**found, **changes}


def judge(a: dict[str, Any], b: dict[str, Any], *overrides: str, **keywords: Any):
    done = composed(["hardware=a100x2_v100x2", *overrides])
    return compare_hosts(done.experiment, done.plan, {"node-a": a, "node-b": b}, **keywords)


def test_equal_hosts_have_nothing_to_say() -> None:
    findings = judge(facts(), facts(), offsets_s={"node-a": 0.1, "node-b": -0.3})
    assert findings.errors == findings.warnings == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": "3.10.2"}, "Python differs between hosts: 3.11 on node-a; 3.10 on node-b"),
        (
            {"packages": {"torch": "2.9.1", "deepspeed": "0.19.8", "numpy": "2.4.6"}},
            "torch differs between hosts: 2.13.0 on node-a; 2.9.1 on node-b",
        ),
        ({"nccl": ["nvidia-nccl-cu12==2.21.5"]}, "NCCL differs between hosts"),
        (
            {"nccl": ["nvidia-nccl-cu11==2.19.3", "nvidia-nccl-cu12==2.27.3"]},
            "node-b: several NCCL builds",
        ),
        ({"gpus": 1}, "node-b: slots=2, but its NVIDIA driver has 1 GPUs"),
        ({"gpus": None}, "has no GPUs"),
    ],
)
def test_what_cannot_work_is_an_error(change, message) -> None:
    assert any(message in error for error in judge(facts(), facts(**change)).errors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"free_bytes": GIB // 2}, "0.5 GiB free"),
        ({"shm_bytes": 64 * 1024**2}, "/dev/shm has 64 MiB"),
        ({"open_files": 1024}, "at most 1024 open files"),
        ({"stale_locks": ["/c/x/lock"]}, "Remove the lock"),
        (
            {"packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.0.0"}},
            "numpy differs",
        ),
    ],
)
def test_what_may_hurt_is_a_warning(change, message) -> None:
    findings = judge(facts(), facts(**change))
    assert findings.errors == ()
    assert any(message in warning for warning in findings.warnings)


def test_two_versions_of_the_code() -> None:
    """Unless rsync brings it, which comes after the hosts are asked."""
    other = facts(code="ba9876543210")
    (error,) = judge(facts(), other).errors
    assert "differs between hosts: 0123456789ab on node-a; ba9876543210 on node-b" in error
    assert judge(facts(), other, "launch.sync=rsync").errors == ()


def test_the_code_by_its_content(tmp_path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "launch").mkdir(parents=True)
        (tmp_path / name / "launch/agent.py").write_text("pass\n")
        (tmp_path / name / f"{name}.pyc").touch()
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert program.code_hash(one) == program.code_hash(two) is not None
    (tmp_path / "two/launch/agent.py").write_text("pass \n")
    assert program.code_hash(one) != program.code_hash(two)
    assert program.code_hash(str(tmp_path / "nothing")) is program.code_hash("") is None


def test_a_ninja_beside_the_python_of_the_ranks(tmp_path, monkeypatch) -> None:
    """A host is asked over ssh, where no environment is activated; the ranks' PATH begins there."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not program.which("ninja")
    (tmp_path / "ninja").touch(mode=0o755)
    assert program.which("ninja")


def test_clocks() -> None:
    (warning,) = judge(facts(), facts(), offsets_s={"node-b": 90.0}).warnings
    assert "node-b: its clock is +90 s off" in warning


def test_an_optimizer_that_is_compiled_needs_a_compiler_everywhere() -> None:
    findings = judge(facts(), facts(ninja=False), "optim.kind=fused_adam")
    assert "lacks ninja (pip install ninja)" in findings.errors[0]
    locked = judge(facts(), facts(stale_locks=["/c/x/lock"]), "optim.kind=fused_adam")
    assert "Remove the lock" in locked.errors[0]


def test_the_program_runs_by_itself(tmp_path) -> None:
    old = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (0, 0))
    done = subprocess.run(
        [sys.executable, "-I", program.__file__, str(tmp_path / "not" / "there")],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert set(found) == set(facts())
    assert found["packages"]["torch"]
    assert found["free_bytes"] > 0
    assert found["stale_locks"] == [str(old)]
