"""Memory for a copy, weights that are worth a checkpoint, and who is asked to end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from llmx.checkpoint.save import as_buffer, available_bytes, is_finite, room_for
from llmx.train.status import SAME_REQUEST_S, ShutdownRequest, TermSignals

GIB = 2**30


def host(root: Path, *, available: int, **group: str) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\nCached: 5 kB\n"
    )
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in group.items():
        (root / "sys/fs/cgroup" / f"memory.{name}").write_text(text)
    return root


def test_available_memory_is_the_least_of_host_and_control_group(tmp_path: Path) -> None:
    assert available_bytes(host(tmp_path / "plain", available=4 * GIB)) == 4 * GIB
    assert available_bytes(host(tmp_path / "max", available=4 * GIB, max="max\n")) == 4 * GIB
    limited = {"max": f"{3 * GIB}\n", "current": f"{2 * GIB}\n"}
    stat = f"anon {GIB}\ninactive_file {GIB // 2}\n"
    root = host(tmp_path / "limited", available=4 * GIB, stat=stat, **limited)
    assert available_bytes(root) == GIB + GIB // 2
    over = host(tmp_path / "over", available=4 * GIB, max="5\n", current=f"{GIB}\n")
    assert available_bytes(over) == 0
    assert 0 < available_bytes() < 2**50


@pytest.mark.parametrize(
    ("line", "base", "limit", "used", "cached"),
    [
        ("0::", "", "memory.max", "memory.current", "inactive_file"),
        ("4:memory:", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
         "total_inactive_file"),
    ],
)  # fmt: skip
def test_a_job_is_limited_by_every_control_group_above_it(
    tmp_path: Path, line: str, base: str, limit: str, used: str, cached: str
) -> None:
    """Slurm and systemd put a job far below the root, in either version of the interface."""
    root = host(tmp_path / "host", available=64 * GIB)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(f"1:cpu:/\n{line}/slurm/job_7/step_0\n")
    job = root / "sys/fs/cgroup" / base / "slurm/job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / limit).write_text("max\n" if line == "0::" else f"{2**63 - 4096}\n")
    (job / limit).write_text(f"{8 * GIB}\n")
    (job / used).write_text(f"{6 * GIB}\n")
    (job / "memory.stat").write_text(f"anon 5\n{cached} {GIB}\n")
    assert available_bytes(root) == 3 * GIB
    (job / limit).unlink()
    assert available_bytes(root) == 64 * GIB


def test_the_ranks_of_a_host_share_its_memory() -> None:
    everyone = [("a", 3, 10), ("a", 5, 11), ("b", 7, 8)]
    assert room_for(everyone, "a")
    assert not room_for(everyone, "b")
    assert not room_for([*everyone, ("a", 1, 10)], "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    values = torch.linspace(-1, 1, 1001, dtype=dtype)
    assert is_finite(values)
    values[500] = bad
    assert not is_finite(values)


def test_what_cannot_be_infinite_is_finite() -> None:
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.zeros(0))


def test_buffers_are_the_bytes_of_the_tensor_itself() -> None:
    values = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    buffer = memoryview(as_buffer(values))
    assert bytes(buffer) == values.view(torch.int16).numpy().tobytes()
    values[0] = 3.0
    assert bytes(buffer) == values.view(torch.int16).numpy().tobytes()


def test_a_request_is_passed_on_only_while_somebody_can_save() -> None:
    stop = ShutdownRequest()
    assert not stop.request("SIGTERM")
    assert stop.requested == ""
    stop.enable(False)  # checkpoints are off
    assert not stop.request("SIGTERM")
    stop.enable(True)
    assert stop.request("SIGUSR1")
    assert stop.request("SIGTERM")
    assert stop.requested == "SIGUSR1"
    assert stop.disable() == "SIGUSR1"
    assert not stop.request("SIGTERM")


def test_a_launcher_that_passes_sigterm_on_does_not_cost_the_checkpoint() -> None:
    terms = TermSignals()
    assert not terms.is_second(100.0)
    assert not terms.is_second(100.3), "the same request, by way of the launcher"
    assert not terms.is_second(100.0 + SAME_REQUEST_S)
    assert terms.is_second(100.1 + SAME_REQUEST_S)
