"""What is in this machine: driver output read, the catalogue matched."""

from __future__ import annotations

import pytest
import yaml

from llmx.catalogue import conf_dir
from llmx.config import DeviceConfig, HardwareConfig
from llmx.doctor import detect


@pytest.fixture
def catalogue() -> dict[str, DeviceConfig]:
    text = (conf_dir() / "hardware" / "devices" / "catalogue.yaml").read_text()
    return {name: DeviceConfig(**values) for name, values in yaml.safe_load(text).items()}


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("NVIDIA A100-SXM4-40GB, 40960, 8.0", "a100_40g"),
        ("NVIDIA A100-SXM4-80GB, 81920, 8.0", "a100_80g"),
        ("NVIDIA A100 80GB PCIe, 81920, 8.0", "a100_80g"),
        ("NVIDIA A800 80GB PCIe, 81920, 8.0", "a800_80g"),
        ("Tesla V100-SXM2-32GB, 32768, 7.0", "v100_32g"),
        ("Tesla V100-PCIE-16GB, 16384, 7.0", "v100_16g"),
        ("NVIDIA H200, 143771, 9.0", "h200_141g"),
        ("NVIDIA H100 80GB HBM3, 81559, 9.0", "h100_80g"),
        ("NVIDIA GeForce RTX 4090, 24564, 8.9", "rtx4090"),
        ("NVIDIA RTX A6000, 49140, 8.6", "a6000"),
        ("Tesla T4, 15360, 7.5", "t4"),
    ],
)
def test_the_catalogue_is_matched_by_what_the_driver_says(line, device, catalogue) -> None:
    (gpu,) = detect.parse_gpus(line)
    assert detect.match_device(gpu, catalogue)[0] == device


def test_an_unknown_gpu_gets_an_entry_of_its_own(catalogue) -> None:
    (gpu,) = detect.parse_gpus("NVIDIA Future X1, 65536, 12.0\n")
    name, device = detect.match_device(gpu, catalogue)
    assert name not in catalogue
    assert device.memory_gib == 64
    assert "bf16" in device.precisions
    (old,) = detect.parse_gpus("Tesla P40, 23040, 6.1")
    assert "bf16" not in detect.match_device(old, catalogue)[1].precisions


def test_noise_is_no_gpu() -> None:
    assert detect.parse_gpus("No devices were found\n") == []


def test_without_gpus_two_cpu_ranks(monkeypatch, catalogue) -> None:
    monkeypatch.setattr(detect, "detect_gpus", list)
    found = detect.detect_hardware(HardwareConfig(kind="local", devices=catalogue))
    assert (found.kind, found.hosts[0].slots, found.hosts[0].device) == ("static", 2, "cpu")


def test_this_machine_knows_itself() -> None:
    assert {"localhost", "127.0.0.1"} <= detect.local_names()
