"""What hosts have against what a plan takes of them: errors before the start, and warnings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmx.hardware.compare import DiskUse, disk_problem, disk_use, problems_here, ram_problem
from llmx.hardware.survey import ram_available, space_facts
from tests.composing import composed

GIB = 1024**3
TWO = DiskUse(checkpoint=10 * GIB, model=2 * GIB, at_once=3, kept=2)


def test_enough_has_nothing_to_say() -> None:
    assert disk_problem(TWO, 30 * GIB, where="/runs/a") == ("", "")


def test_no_space_for_the_second_checkpoint_is_an_error() -> None:
    error, warning = disk_problem(TWO, 20 * GIB - 1, where="node-a: /runs/a")
    assert not warning
    assert error == (
        "node-a: /runs/a has 20.0 GiB of free disk space. A checkpoint takes 10.0 GiB, and the "
        "first one is removed only when the second is complete: with the final model at least "
        "20.0 GiB is needed. Free some space, or set run_dir to a directory on a larger disk. "
        "checkpoint=none saves no training state."
    )


def test_no_space_for_all_of_them_is_a_warning() -> None:
    error, warning = disk_problem(TWO, 20 * GIB, where="/runs/a")
    assert not error
    assert warning == (
        "/runs/a has 20.0 GiB of free disk space, and up to 30.0 GiB more is needed: 3 checkpoints "
        "of 10.0 GiB at once, and model/. When the disk is full, saves fail. With "
        "checkpoint.keep.last=1 they take 20.0 GiB, if neither checkpoint.keep.best nor "
        "checkpoint.keep.every keeps more."
    )


@pytest.mark.parametrize(
    ("use", "first", "most"),
    [
        (TWO, 20, 30),
        (DiskUse(10 * GIB, 2 * GIB, 1, 1), 12, 12),  # one save, at the end
        (DiskUse(10 * GIB, 2 * GIB, 0, 0), 2, 2),  # checkpoint=none
        (DiskUse(10 * GIB, 2 * GIB, None, None), 20, None),
        (DiskUse(10 * GIB, 2 * GIB, 3, 2, there=1), 10, 20),  # resumed
        (DiskUse(10 * GIB, 2 * GIB, 3, 2, there=2), 10, 10),
        (DiskUse(10 * GIB, 2 * GIB, 3, 2, there=9), 10, 10),
        (DiskUse(10 * GIB, 2 * GIB, 3, 2, certain=0.5), 10, 30),
    ],
)
def test_what_is_needed(use: DiskUse, first: int, most: int | None) -> None:
    assert use.first_needed == first * GIB
    assert use.needed == (None if most is None else most * GIB)


def test_the_final_model_alone() -> None:
    error, _ = disk_problem(DiskUse(10 * GIB, 2 * GIB, 0, 0), GIB, where="/runs/a")
    assert "the final model takes 2.0 GiB" in error
    assert "checkpoint=none" not in error


def test_a_host_with_a_disk_of_its_own() -> None:
    plan = composed(["model=llama3_8b", "hardware=a100x2_v100x2", "launch=rsync"]).plan
    here, far = disk_use(plan.storage, None), disk_use(plan.storage, "node-b")
    assert here is not None
    assert far is not None
    assert far.checkpoint == pytest.approx(here.checkpoint / 2, rel=0.01)
    assert (here.model > 0, far.model) == (True, 0)
    assert disk_use(None, None) is None
    unknown = composed(["model=hf", "model.path=owner/name", "hardware=a100x8"]).plan
    assert disk_use(unknown.storage, None) is None


def test_ram_that_is_not_there() -> None:
    plan = composed(["model=llama3_8b", "hardware=a100x8", "zero=stage2_offload"]).plan
    assert plan.storage is not None
    (host,) = plan.storage.hosts
    assert ram_problem(host, "node-a", {"ram_available_bytes": 1000 * GIB}) == ""
    assert ram_problem(host, "node-a", {"ram_available_bytes": None}) == ""
    assert ram_problem(host, "node-a", {}) == "", "a survey of an older llmx"
    text = ram_problem(host, "node-a", {"ram_available_bytes": 64 * GIB})
    assert text.startswith("node-a: ")
    assert "64.0 GiB available now" in text
    assert "zero=infinity" in text


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    found = space_facts(str(tmp_path / "run" / "not" / "there"))
    assert found["checkpoints"] == 0
    assert found["free_bytes"] == pytest.approx(
        os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.2
    )
    assert GIB / 16 < found["ram_available_bytes"] < 2**50
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "checkpoints/.step-00000020.partial").mkdir()
    (tmp_path / "checkpoints/latest").touch()
    assert space_facts(str(tmp_path))["checkpoints"] == 1
    plan = composed(["model=llama3_8b", "hardware=a100x8"]).plan
    facts = {"free_bytes": GIB, "checkpoints": 0, "ram_available_bytes": GIB}
    disk, ram = problems_here(plan, "/runs/a", facts)
    assert disk.startswith("/runs/a has 1.0 GiB of free disk space")
    assert ram.startswith("this machine: ")


def test_the_memory_of_a_control_group_counts(tmp_path: Path) -> None:
    """A container or a job of Slurm is killed by the limit of its group."""
    assert ram_available(f"{tmp_path}/") is None
    write(tmp_path / "proc/meminfo", "MemTotal: 64 kB\nMemAvailable:   4194304 kB\n")
    assert ram_available(f"{tmp_path}/") == 4 * GIB
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/job_7/step_0\n")
    above = tmp_path / "sys/fs/cgroup/system.slice/job_7"
    write(above / "memory.max", f"{2 * GIB}\n")
    write(above / "memory.current", f"{GIB}\n")
    write(above / "memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    write(above / "step_0/memory.max", "max\n")
    write(above / "step_0/memory.current", "5\n")
    assert ram_available(f"{tmp_path}/") == GIB + GIB // 2


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
