"""What is in this machine: driver output read, the catalogue matched."""

from __future__ import annotations

import socket

import pytest
import yaml

from llmx.config import DeviceConfig, HardwareConfig, HostConfig
from llmx.config.addresses import LOCAL_NAMES
from llmx.config.groups import CONF
from llmx.config.hardware_rules import native_precisions
from llmx.errors import ConfigError
from llmx.hardware import detect


@pytest.fixture
def catalogue() -> dict[str, DeviceConfig]:
    text = (CONF / "hardware" / "devices" / "catalogue.yaml").read_text()
    return {name: DeviceConfig(**values) for name, values in yaml.safe_load(text).items()}


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("NVIDIA A100-SXM4-40GB, 40960, 8.0, 0, GPU-1", "a100_40g"),
        ("NVIDIA A100-SXM4-80GB, 81920, 8.0, 0, GPU-1", "a100_80g"),
        ("NVIDIA A100 80GB PCIe, 81920, 8.0, 0, GPU-1", "a100_80g"),
        ("NVIDIA A800 80GB PCIe, 81920, 8.0, 0, GPU-1", "a800_80g"),
        ("Tesla V100-SXM2-32GB, 32768, 7.0, 0, GPU-1", "v100_32g"),
        ("Tesla V100-PCIE-16GB, 16384, 7.0, 0, GPU-1", "v100_16g"),
        ("NVIDIA H200, 143771, 9.0, 0, GPU-1", "h200_141g"),
        ("NVIDIA H100 80GB HBM3, 81559, 9.0, 0, GPU-1", "h100_80g"),
        ("NVIDIA GeForce RTX 4090, 24564, 8.9, 0, GPU-1", "rtx4090"),
        ("NVIDIA RTX A6000, 49140, 8.6, 0, GPU-1", "a6000"),
        ("Tesla T4, 15360, 7.5, 0, GPU-1", "t4"),
    ],
)
def test_the_catalogue_is_matched_by_what_the_driver_says(line, device, catalogue) -> None:
    (gpu,) = detect.parse_gpus(line)
    assert detect.match_device(gpu, catalogue)[0] == device


def test_an_unknown_gpu_gets_an_entry_of_its_own(catalogue) -> None:
    (gpu,) = detect.parse_gpus("NVIDIA Future X1, 65536, 12.0, 0, GPU-1\n")
    name, device = detect.match_device(gpu, catalogue)
    assert name not in catalogue
    assert device.memory_gib == 64
    assert "bf16" in device.precisions
    assert device.compute_capability == 12
    (old,) = detect.parse_gpus("Tesla P40, 23040, 6.1, 0, GPU-1")
    assert "bf16" not in detect.match_device(old, catalogue)[1].precisions


EIGHT = "".join(f"NVIDIA H100 80GB HBM3, 81559, 9.0, {i}, GPU-{i}f3a\n" for i in range(8))


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, list(range(8))),
        ("0", [0]),
        ("3,1", [3, 1]),
        (" 2 , 5 ", [2, 5]),
        ("GPU-4f", [4]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_gpus_that_are_visible(visible, indices, catalogue, monkeypatch) -> None:
    """As CUDA reads the variable; hardware=local plans for those, and for CPU ranks without one."""
    gpus = detect.parse_gpus(EIGHT)
    assert [gpu.index for gpu in detect.visible_gpus(gpus, visible)] == indices
    monkeypatch.setattr(detect, "detect_gpus", lambda: gpus)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    hardware = HardwareConfig(kind="local", devices=catalogue)
    (host,) = detect.detect_hardware(hardware, environ=environ).hosts
    assert (host.slots, host.device) == ((len(indices), "h100_80g") if indices else (2, "cpu"))


@pytest.mark.parametrize(
    ("visible", "problem"),
    [
        ("MIG-3f2a", "hardware=local takes whole GPUs"),
        ("MIG-GPU-1f3a/1/0", "hardware=local takes whole GPUs"),
        (
            "9",
            "'9' is not a GPU of this machine. GPUs found: 0: NVIDIA H100 80GB HBM3 GPU-0f3a, 1:",
        ),
        ("1,9,2", "'9' is not a GPU"),
        ("1,1,2", "'1' is listed twice"),
        ("1,GPU-1f", "'GPU-1f' is listed twice"),
        ("GPU-", "'GPU-' matches several UUIDs"),
        ("cuda:0", "'cuda:0' is not a GPU"),
    ],
)
def test_a_variable_that_names_no_gpu_is_an_error(visible, problem, catalogue, monkeypatch) -> None:
    """Not two CPU ranks, nor fewer GPUs than were listed."""
    monkeypatch.setattr(detect, "detect_gpus", lambda: detect.parse_gpus(EIGHT))
    hardware = HardwareConfig(kind="local", devices=catalogue)
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible}: .*{problem}"):
        detect.detect_hardware(hardware, environ={"CUDA_VISIBLE_DEVICES": visible})
    monkeypatch.setattr(detect, "detect_gpus", list)
    with pytest.raises(
        ConfigError, match=r"takes whole GPUs|GPUs found: none\. .*empty to train on the C"
    ):
        detect.detect_hardware(hardware, environ={"CUDA_VISIBLE_DEVICES": visible})


def test_gpus_of_two_kinds_in_this_machine(catalogue, monkeypatch) -> None:
    text = "NVIDIA T400 4GB, 4096, 7.5, 0, GPU-0\nNVIDIA GeForce RTX 4090, 24564, 8.9, 1, GPU-1\n"
    monkeypatch.setattr(detect, "detect_gpus", lambda: detect.parse_gpus(text))
    hardware = HardwareConfig(kind="local", devices=catalogue)
    with pytest.raises(ConfigError, match="1: NVIDIA GeForce RTX 4090.*CUDA_VISIBLE_DEVICES=1"):
        detect.detect_hardware(hardware, environ={})
    found = detect.detect_hardware(hardware, environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert found.hosts[0].device == "rtx4090"


def test_the_catalogue_says_what_computes_bf16(catalogue) -> None:
    for name, device in catalogue.items():
        if device.compute_capability:
            assert device.precisions == native_precisions(device.compute_capability), name


def test_without_gpus_two_cpu_ranks(monkeypatch, catalogue) -> None:
    monkeypatch.setattr(detect, "detect_gpus", list)
    found = detect.detect_hardware(HardwareConfig(kind="local", devices=catalogue))
    assert (found.kind, found.hosts[0].slots, found.hosts[0].device) == ("local", 2, "cpu")


def test_a_torch_for_rocm_does_not_train_on_the_cpu_unasked(monkeypatch, catalogue) -> None:
    monkeypatch.setattr(detect, "detect_gpus", list)
    monkeypatch.setattr(detect, "count_gpus", lambda: 8)
    monkeypatch.setattr(detect, "toolkit_of_torch", {"cuda": None, "hip": "6.4"}.get)
    hardware = HardwareConfig(kind="local", devices=catalogue)
    with pytest.raises(ConfigError, match=r"this torch is for ROCm 6\.4.*device: mi300x"):
        detect.detect_hardware(hardware, environ={})
    asked = detect.detect_hardware(hardware, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert asked.hosts[0].device == "cpu"


def test_names_of_this_machine_are_looked_up_for_other_names_only(monkeypatch) -> None:
    """``socket.getfqdn`` may wait for a name server for seconds."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append("getfqdn") or "node-a.lab")
    here = [HostConfig(name="localhost"), HostConfig(name="mine", address="127.0.0.1")]
    assert detect.local_names(here) == LOCAL_NAMES
    assert not asked
    assert "node-a.lab" in detect.local_names([*here, HostConfig(name="node-a.lab")])
