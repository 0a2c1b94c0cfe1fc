"""Detects this machine: its GPUs by name and memory, its names and addresses.

No torch: the control process asks the driver. ``hardware=local`` uses it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.config.addresses import LOCAL_NAMES
from llmx.config.hardware_rules import native_precisions
from llmx.config.schema import DeviceConfig, HardwareConfig, HostConfig
from llmx.errors import ConfigError
from llmx.hardware.survey import count_gpus, toolkit_of_torch
from llmx.text import plural

if TYPE_CHECKING:
    from llmx.plan.types import HostPlan

_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,compute_cap,index,uuid",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    memory_gib: float
    compute_capability: float
    index: int = 0
    uuid: str = ""


def detect_gpus(root: str = "/") -> list[Gpu]:
    """GPUs of this machine in driver order; empty without a driver.

    Raises:
        ConfigError: this process can open GPUs, and nvidia-smi lists none.
    """
    if not Path(root, "proc/driver/nvidia").exists() and not Path(root, "dev/nvidiactl").exists():
        return []  # nvidia-smi takes up to a second to say so
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=False)
        gpus = parse_gpus(answer.stdout) if answer.returncode == 0 else []
        message = f"{answer.stdout}\n{answer.stderr}".strip() or f"exit code {answer.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        gpus, message = [], str(error)
    if not gpus and (
        devices := [path for path in Path(root, "dev").glob("nvidia[0-9]*") if _opens(path)]
    ):
        raise ConfigError(
            f"nvidia-smi lists no GPU, and this machine has {plural(len(devices), 'GPU')} "
            f"({min(devices)}). It says: {message.splitlines()[0]}. Correct the driver (a "
            "container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility); or describe the GPUs: "
            "hardware=static 'hardware.hosts=[{name: localhost, slots: 1, device: a100_80g}]'; or "
            "export CUDA_VISIBLE_DEVICES= to use the CPU."
        )
    return gpus


def _opens(device: Path) -> bool:
    """Whether this process may use a device: a control group may keep it away."""
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError:
        return False
    return True


def parse_gpus(csv: str) -> list[Gpu]:
    """Read ``name, MiB, capability, index, uuid`` lines as nvidia-smi prints them."""
    gpus = []
    for line in csv.strip().splitlines():
        parts = [part.strip() for part in line.rsplit(",", 4)]
        if len(parts) == 5 and _number(parts[1]) and parts[3].isdecimal():
            capability = _number(parts[2])
            gpus.append(
                Gpu(parts[0], _number(parts[1]) / 1024, capability, int(parts[3]), parts[4])
            )
    return gpus


def _number(text: str) -> float:
    """0 for what is none, such as ``[N/A]``."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else 0.0


HIDES_ALL = ("", "-1", "NoDevFiles")
"""Values of ``CUDA_VISIBLE_DEVICES`` that say: no GPU. Slurm sets the last one."""


def visible_gpus(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, in its order: numbers or (the
    beginning of) UUIDs. None where it is not set: all of them.

    Raises:
        ConfigError: a word of it names no GPU. CUDA would end the list there without a word.
    """
    if visible is None:
        return gpus
    if visible.strip() in HIDES_ALL:
        return []
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.startswith("MIG-"):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible}: hardware=local takes whole GPUs. Name those, "
                "e.g. CUDA_VISIBLE_DEVICES=0, or write a hardware file whose host has gpus: "
                "[MIG-...] and whose device is the slice (memory_gib, compute_capability)."
            )
        matches = [
            gpu
            for gpu in gpus
            if (word.isdecimal() and gpu.index == int(word))
            or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(matches) != 1 or matches[0] in chosen:
            problem = {0: f"{word!r} is not a GPU of this machine", 1: f"{word!r} is listed twice"}
            listed = ", ".join(f"{gpu.index}: {gpu.name} {gpu.uuid}".strip() for gpu in gpus)
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible}: "
                f"{problem.get(len(matches), f'{word!r} matches several UUIDs')}. GPUs found: "
                f"{listed or 'none'}. Change the variable, unset it, or set it empty "
                "to train on the CPU."
            )
        chosen += matches
    return chosen


def usable_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` leaves to this process."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    hides_all = visible is not None and visible.strip() in HIDES_ALL
    return [] if hides_all else visible_gpus(detect_gpus(), visible)


def match_device(gpu: Gpu | None, devices: Mapping[str, DeviceConfig]) -> tuple[str, DeviceConfig]:
    """The catalogue's entry for a GPU, else one made from what the driver says of it. None: CPUs,
    which compute in every precision where the hardware file does not describe them."""
    if gpu is None:
        cpu = DeviceConfig(accelerator="cpu", precisions=["fp32", "bf16", "fp16"])
        return "cpu", devices.get("cpu", cpu)
    words = gpu.name.lower().replace("-", " ").split()
    joined = "".join(words)
    for name, device in devices.items():
        model = name.split("_")[0]
        is_model = model in words or (model.startswith("rtx") and model in joined)
        if is_model and abs(device.memory_gib - gpu.memory_gib) <= 0.1 * max(
            1.0, device.memory_gib
        ):
            return name, device
    described = DeviceConfig(
        accelerator="cuda",
        memory_gib=round(gpu.memory_gib, 1),
        compute_capability=gpu.compute_capability,
        precisions=native_precisions(gpu.compute_capability),
    )
    return "_".join(words), described


def detect_hardware(
    hardware: HardwareConfig, *, environ: Mapping[str, str] = os.environ
) -> HardwareConfig:
    """``kind: local`` with its host: the GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` shows,
    else two CPU ranks."""
    devices = dict(hardware.devices)
    if gpus := usable_gpus(environ):
        name, device = match_device(max(gpus, key=lambda gpu: gpu.memory_gib), devices)
        other_types = [gpu for gpu in gpus if match_device(gpu, devices)[0] != name]
        if other_types:
            listed = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus)
            alike = ",".join(str(gpu.index) for gpu in gpus if gpu not in other_types)
            raise ConfigError(
                f"hardware=local: the GPUs of this machine differ ({listed}), but the ranks of a "
                f"host need GPUs of one type. Select them, e.g. export CUDA_VISIBLE_DEVICES={alike}"
            )
    else:
        rocm = toolkit_of_torch("hip")
        if rocm and count_gpus() and "CUDA_VISIBLE_DEVICES" not in environ:
            raise ConfigError(
                f"hardware=local detects NVIDIA GPUs only, and this torch is for ROCm {rocm}. "
                "Describe the AMD GPUs, e.g. hardware=static 'hardware.hosts=[{name: localhost, "
                "slots: 8, device: mi300x}]', or export CUDA_VISIBLE_DEVICES= to train on the CPU."
            )
        name, device = match_device(None, devices)
    devices[name] = device
    host = HostConfig(name="localhost", slots=len(gpus) or 2, device=name)
    named = hardware.name or "local"
    return dataclasses.replace(hardware, name=named, hosts=[host], devices=devices)


def local_names(hosts: Iterable[HostConfig | HostPlan]) -> frozenset[str]:
    """Names and addresses by which this machine knows itself: enough of them to decide which of
    ``hosts`` it is. Where all are ``localhost``, neither the resolver nor the interfaces are
    asked."""
    if all(LOCAL_NAMES & {host.name, host.address} for host in hosts):
        return LOCAL_NAMES
    import psutil

    names = {*LOCAL_NAMES, socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names.update(
            address.address.split("%")[0]
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        )
    return frozenset(names)
