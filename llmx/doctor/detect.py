"""What is in this machine: its GPUs by name and memory, its names and addresses.

No torch: the control process asks the driver. ``hardware=local`` uses it.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from llmx.config.schema import DeviceConfig, HardwareConfig, HostConfig

_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,compute_cap",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    memory_gib: float
    compute_capability: float


def detect_gpus() -> list[Gpu]:
    """GPUs of this machine in driver order; empty without a driver."""
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return []  # nvidia-smi takes up to a second to say so
    if shutil.which(_QUERY[0]) is None:
        return []
    answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=False)
    return parse_gpus(answer.stdout) if answer.returncode == 0 else []


def parse_gpus(csv: str) -> list[Gpu]:
    """Read ``name, MiB, capability`` lines as nvidia-smi prints them."""
    gpus = []
    for line in csv.strip().splitlines():
        parts = [part.strip() for part in line.rsplit(",", 2)]
        if len(parts) == 3 and parts[1].replace(".", "").isdigit():
            capability = float(parts[2]) if parts[2].replace(".", "").isdigit() else 0.0
            gpus.append(Gpu(parts[0], float(parts[1]) / 1024, capability))
    return gpus


def match_device(gpu: Gpu, devices: dict[str, DeviceConfig]) -> tuple[str, DeviceConfig]:
    """The catalogue's entry for a GPU, else one made from what the driver says of it."""
    words = gpu.name.lower().replace("-", " ").split()
    joined = "".join(words)
    for name, device in devices.items():
        model = name.split("_")[0]
        known = model in words or (model.startswith("rtx") and model in joined)
        if known and abs(device.memory_gib - gpu.memory_gib) <= 0.1 * max(1.0, device.memory_gib):
            return name, device
    made = DeviceConfig(
        accelerator="cuda",
        memory_gib=round(gpu.memory_gib, 1),
        precisions=["fp32", "bf16", "fp16"] if gpu.compute_capability >= 8 else ["fp32", "fp16"],
    )
    return "_".join(words), made


def detect_hardware(hardware: HardwareConfig) -> HardwareConfig:
    """``kind: local`` made explicit: this machine's GPUs, else two CPU ranks."""
    devices = dict(hardware.devices)
    gpus = detect_gpus()
    if gpus:
        name, device = match_device(gpus[0], devices)
        devices[name] = device
        host = HostConfig(name="localhost", slots=len(gpus), device=name)
    else:
        devices.setdefault(
            "cpu", DeviceConfig(accelerator="cpu", precisions=["fp32", "bf16", "fp16"])
        )
        host = HostConfig(name="localhost", slots=2, device="cpu")
    return HardwareConfig(
        name=hardware.name or "local",
        kind="static",
        hosts=[host],
        devices=devices,
        env=dict(hardware.env),
        slots=hardware.slots,
    )


def local_names() -> frozenset[str]:
    """Names and addresses by which this machine knows itself."""
    import psutil

    names = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names.update(
            address.address.split("%")[0]
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        )
    return frozenset(names)
