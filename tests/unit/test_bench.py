"""``benchmarks/gpu``: its measures, its texts, and the end of a part that hangs; locks that would
stop a benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.gpu.__main__ import find_context, wait
from benchmarks.gpu.part import Context
from benchmarks.machine import refuse_left_locks
from llmx.config.schema import DeviceConfig
from llmx.errors import ConfigError
from tests.cluster.host import wait_until


def small(tmp_path) -> Context:
    return Context(tmp_path, True, DeviceConfig(accelerator="cpu"), "cpu", 0)


def test_the_gpus_are_those_that_this_process_sees(tmp_path, monkeypatch) -> None:
    from llmx.hardware import detect

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
