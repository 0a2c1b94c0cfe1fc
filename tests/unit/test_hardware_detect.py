"""What is in this machine, in an allocation of Slurm, and on a host that has a Python and nothing
else: driver output read, the catalogue matched, programs sent there (run here as they are there).

``tests/cluster/test_launch_stop.py`` has a real allocation.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.config import DeviceConfig, HardwareConfig, HostConfig
from llmx.config.addresses import LOCAL_NAMES
from llmx.config.groups import CONF
from llmx.config.hardware_rules import native_precisions
from llmx.errors import ConfigError
from llmx.hardware import detect
from llmx.hardware.slurm import Allocation, hardware_of_allocation, parse_allocation
from llmx.launch.agents.connection import BOOTSTRAP, survey_source

CATALOGUE = {
    name: DeviceConfig(**values)
    for name, values in yaml.safe_load(
        (CONF / "hardware" / "devices" / "catalogue.yaml").read_text()
    ).items()
}
LOCAL = HardwareConfig(kind="local", devices=CATALOGUE)


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("NVIDIA A100-SXM4-40GB, 40960, 8.0, 0, GPU-1", "a100_40g"),
        ("NVIDIA A100 80GB PCIe, 81920, 8.0, 0, GPU-1", "a100_80g"),
        ("NVIDIA A800 80GB PCIe, 81920, 8.0, 0, GPU-1", "a800_80g"),
        ("Tesla V100-SXM2-32GB, 32768, 7.0, 0, GPU-1", "v100_32g"),
        ("Tesla V100-PCIE-16GB, 16384, 7.0, 0, GPU-1", "v100_16g"),
        ("NVIDIA H200, 143771, 9.0, 0, GPU-1", "h200_141g"),
        ("NVIDIA GeForce RTX 4090, 24564, 8.9, 0, GPU-1", "rtx4090"),
    ],
)
def test_the_catalogue_is_matched_by_what_the_driver_says(line, device) -> None:
    (gpu,) = detect.parse_gpus(line)
    assert detect.match_device(gpu, CATALOGUE)[0] == device


def test_an_unknown_gpu_gets_an_entry_of_its_own() -> None:
    (gpu,) = detect.parse_gpus("NVIDIA Future X1, 65536, 12.0, 0, GPU-1\n")
    name, device = detect.match_device(gpu, CATALOGUE)
    assert name not in CATALOGUE
    assert (device.memory_gib, device.compute_capability) == (64, 12)
    assert "bf16" in device.precisions
    (old,) = detect.parse_gpus("Tesla P40, 23040, 6.1, 0, GPU-1")
    assert "bf16" not in detect.match_device(old, CATALOGUE)[1].precisions
    for known in CATALOGUE.values():  # the catalogue says the same
        if known.compute_capability:
            assert known.precisions == native_precisions(known.compute_capability), known


EIGHT = "".join(f"NVIDIA H100 80GB HBM3, 81559, 9.0, {i}, GPU-{i}f3a\n" for i in range(8))


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, list(range(8))),
        ("3,1", [3, 1]),
        (" 2 , 5 ", [2, 5]),
        ("GPU-4f", [4]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_gpus_that_are_visible(visible, indices, monkeypatch) -> None:
    """As CUDA reads the variable; hardware=local plans for those, and for CPU ranks without one."""
    gpus = detect.parse_gpus(EIGHT)
    assert [gpu.index for gpu in detect.visible_gpus(gpus, visible)] == indices
    monkeypatch.setattr(detect, "detect_gpus", lambda: gpus)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    (host,) = detect.detect_hardware(LOCAL, environ=environ).hosts
    assert (host.slots, host.device) == ((len(indices), "h100_80g") if indices else (2, "cpu"))


@pytest.mark.parametrize(
    ("visible", "problem"),
    [
        ("MIG-3f2a", "hardware=local takes whole GPUs"),
        ("9", "'9' is not a GPU of this machine. GPUs found: 0: NVIDIA H100 80GB HBM3 GPU-0f3a, 1"),
        ("1,GPU-1f", "'GPU-1f' is listed twice"),
        ("GPU-", "'GPU-' matches several UUIDs"),
    ],
)
def test_a_variable_that_names_no_gpu_is_an_error(visible, problem, monkeypatch) -> None:
    """Not two CPU ranks, nor fewer GPUs than were listed."""
    monkeypatch.setattr(detect, "detect_gpus", lambda: detect.parse_gpus(EIGHT))
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible}: .*{problem}"):
        detect.detect_hardware(LOCAL, environ={"CUDA_VISIBLE_DEVICES": visible})
    monkeypatch.setattr(detect, "detect_gpus", list)
    with pytest.raises(
        ConfigError, match=r"takes whole GPUs|GPUs found: none\. .*empty to train on the C"
    ):
        detect.detect_hardware(LOCAL, environ={"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("echo 'NVIDIA H100 80GB HBM3, 81559, 9.0, 0, GPU-1'", ""),
        ("echo No devices were found; exit 6", "2 GPUs .*nvidia0.*It says: No devices were found"),
        ("echo 'NVIDIA GB10, [N/A], 12.1, 0, GPU-1'", "It says: NVIDIA GB10"),
        ("exit 3", "It says: exit code 3"),
        (None, "It says: .*No such file.*compute,utility.*hardware=static.*to use the CPU"),
    ],
)
def test_gpus_that_the_driver_does_not_list_are_an_error(
    program: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not two CPU ranks; but those where no GPU can be opened, or the variable hides them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    devices = tmp_path / "dev"
    (devices / "nvidia2").mkdir(parents=True)  # cannot be opened
    (devices / "nvidiactl").touch()
    listed = [] if problem else detect.parse_gpus("NVIDIA H100 80GB HBM3, 81559, 9.0, 0, GPU-1")
    here = functools.partial(detect.detect_gpus, f"{tmp_path}")
    assert here() == listed
    (devices / "nvidia0").touch()
    (devices / "nvidia1").touch()
    if not problem:
        assert here() == listed
        return
    monkeypatch.setattr(detect, "detect_gpus", here)
    with pytest.raises(ConfigError, match=f"nvidia-smi lists no GPU, and .*{problem}"):
        detect.detect_hardware(LOCAL, environ={})
    assert detect.detect_hardware(LOCAL, environ={"CUDA_VISIBLE_DEVICES": ""}).hosts[0].slots == 2


def test_gpus_of_two_kinds_in_this_machine(monkeypatch) -> None:
    text = "NVIDIA T400 4GB, 4096, 7.5, 0, GPU-0\nNVIDIA GeForce RTX 4090, 24564, 8.9, 1, GPU-1\n"
    monkeypatch.setattr(detect, "detect_gpus", lambda: detect.parse_gpus(text))
    with pytest.raises(ConfigError, match="1: NVIDIA GeForce RTX 4090.*CUDA_VISIBLE_DEVICES=1"):
        detect.detect_hardware(LOCAL, environ={})
    found = detect.detect_hardware(LOCAL, environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert found.hosts[0].device == "rtx4090"


def test_a_torch_for_rocm_does_not_train_on_the_cpu_unasked(monkeypatch) -> None:
    monkeypatch.setattr(detect, "detect_gpus", list)
    monkeypatch.setattr(detect, "count_gpus", lambda: 8)
    monkeypatch.setattr(detect, "toolkit_of_torch", {"cuda": None, "hip": "6.4"}.get)
    with pytest.raises(ConfigError, match=r"this torch is for ROCm 6\.4.*device: mi300x"):
        detect.detect_hardware(LOCAL, environ={})
    asked = detect.detect_hardware(LOCAL, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert asked.hosts[0].device == "cpu"


def test_names_of_this_machine_are_looked_up_for_other_names_only(monkeypatch) -> None:
    """``socket.getfqdn`` may wait for a name server for seconds."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append("getfqdn") or "node-a.lab")
    here = [HostConfig(name="localhost"), HostConfig(name="mine", address="127.0.0.1")]
    assert detect.local_names(here) == LOCAL_NAMES
    assert not asked
    assert "node-a.lab" in detect.local_names([*here, HostConfig(name="node-a.lab")])


ALLOCATION = """\
JobId=12 JobName=interactive
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   StartTime=2026-11-25T21:18:08 EndTime=2026-11-25T22:18:08 Deadline=N/A
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=gpu[01-03]
   NumNodes=3 NumCPUs=96 NumTasks=12 CPUs/Task=8 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:a100:10
     Nodes=gpu[01-02] CPU_IDs=0-31 Mem=0 GRES=gpu:a100:4(IDX:0-3)
     Nodes=gpu03 CPU_IDs=0-31 Mem=0 GRES=gpu:a100:2(IDX:0-1),shard:0
   Command=(null)
"""


def test_scontrol_is_read() -> None:
    allocation = parse_allocation("12", ALLOCATION)
    assert dict(allocation.gpus) == {"gpu[01-02]": 4, "gpu03": 2}
    assert (allocation.state, allocation.user_id, allocation.tasks) == ("RUNNING", 1000, 12)
    unlimited = parse_allocation("12", ALLOCATION.replace("2026-11-25T22:18:08", "Unknown"))
    assert allocation.ends_at is not None
    assert unlimited.ends_at is None


@pytest.mark.parametrize(
    ("state", "user_id", "words"),
    [
        ("RUNNING", os.getuid(), ""),
        ("RUNNING", os.getuid() + 1, "of another user"),
        ("PENDING", os.getuid(), "still waits for its nodes"),
        ("COMPLETED", os.getuid(), "has ended (its state is COMPLETED)"),
        ("UNKNOWN", None, "has ended (Slurm does not know it any more)"),
    ],
)
def test_an_allocation_that_cannot_be_used_is_named(
    state: str, user_id: int | None, words: str
) -> None:
    problem = Allocation("12", state, user_id=user_id).problem()
    assert words in problem
    assert bool(problem) == bool(words)


def test_outside_an_allocation_the_request_is_planned() -> None:
    with pytest.raises(ConfigError, match="not set: nodes, device"):
        hardware_of_allocation(HardwareConfig(kind="slurm", slots=4), environ={})
    hardware = HardwareConfig(kind="slurm", nodes=2, slots=4, device="a100_80g")
    hosts = hardware_of_allocation(hardware, environ={}).hosts
    planned = [(host.name, host.slots, host.device) for host in hosts]
    assert planned == [("node-1", 4, "a100_80g"), ("node-2", 4, "a100_80g")]


@pytest.mark.parametrize("said", [b"", b"100\nimport"])
def test_a_connection_that_breaks_ends_the_program(said: bytes) -> None:
    """The little Python that waits for its source waits neither for ever nor busily."""
    argv = [sys.executable, "-I", "-S", "-c", BOOTSTRAP]
    done = subprocess.run(argv, input=said, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_what_takes_time_is_surveyed_once() -> None:
    """As long as the environment is the same; what may change meanwhile is looked at again."""

    def ask(**asked: Any) -> dict[str, Any]:
        argv = [sys.executable, "-", "/", "", json.dumps(asked)]
        source = survey_source().encode()
        done = subprocess.run(argv, input=source, capture_output=True, check=True, timeout=60)
        return dict(json.loads(done.stdout))

    facts = ask()
    slow = {"nvcc": "99.9", "capabilities": [9.9], "torch_build": {"cuda": "99", "works": True}}
    known = {**facts, **slow, "free_bytes": 1}
    again = ask(known=known, torch=True)
    assert {name: again[name] for name in slow} == slow
    assert again["free_bytes"] > 1
    assert again["stamp"] == facts["stamp"]
    other = ask(known={**known, "stamp": "another"})
    assert (other["nvcc"], other["torch_build"]) == (facts["nvcc"], facts["torch_build"])
    moved = ask(known=known, env={"CUDA_HOME": "/nowhere"})
    assert moved["stamp"] != facts["stamp"]
    assert moved["nvcc"] is None
