"""The rules of the hardware: hosts, their addresses, and what is in them. Pure.

``python -m llmx plan hardware=...`` applies them. What a single field takes stands beside it in
``llmx.config.schema``; here is what holds between fields and hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmx.config.accelerators import ACCELERATORS
from llmx.config.addresses import address_problem, canonical, is_loopback, name_problem
from llmx.config.build import shown
from llmx.config.schema import DeviceConfig, HardwareConfig, HostConfig, ZeroConfig
from llmx.errors import did_you_mean
from llmx.text import printable

LEAST_BF16 = 8.0
"""Compute capability from which an NVIDIA GPU computes bf16; older ones emulate it, slowly."""
PRECISIONS = ("fp32", "bf16", "fp16")
"""What a run computes in."""


def native_precisions(compute_capability: float) -> list[str]:
    """The precisions that an NVIDIA GPU of this compute capability computes without emulation."""
    bf16 = compute_capability >= LEAST_BF16
    return ["fp32", "bf16", "fp16"] if bf16 else ["fp32", "fp16"]


def hardware_problems(
    hardware: HardwareConfig, zero: ZeroConfig, servers: Sequence[HostConfig] = ()
) -> Iterator[str]:
    """Every broken rule: value, rule and fix. ``servers``: hosts beside those that train."""
    if not hardware.hosts and not servers:
        yield "hardware.hosts is empty: a run needs a host. Choose hardware=local or list hosts."
    all_hosts = replace(hardware, hosts=[*hardware.hosts, *servers])
    yield from _hosts(all_hosts)
    yield from _master(hardware)
    for name in dict.fromkeys(host.device for host in all_hosts.hosts):
        if name in hardware.devices:
            yield from _device(name, hardware.devices[name])
    yield from _strays(all_hosts)
    if len({device.accelerator for device in used_devices(hardware).values()}) > 1:
        yield "hardware: ranks on CPUs, CUDA, NPUs or XPUs do not train together. Keep one kind."
    for name in hardware.price_per_hour:
        if name not in hardware.devices:
            yield (
                f"hardware.price_per_hour: {shown(name)} is no device type."
                f"{did_you_mean(name[:100], hardware.devices)} A price is of one device an hour, "
                "by its type: hardware.price_per_hour.a100_80g=1.9."
            )
    yield from _zeropp(zero, hardware.hosts)


def no_ranks_there(accelerator: str) -> str:
    """A message where ranks do not run on this kind of device."""
    if ACCELERATORS[accelerator].trains:
        return ""
    return (
        f"accelerator={accelerator} can be planned for, but no rank runs on it: ranks need "
        "torch.cuda. Train on NVIDIA GPUs, on AMD GPUs with ROCm, or on CPUs."
    )


def used_devices(hardware: HardwareConfig) -> dict[str, DeviceConfig]:
    """The device types of the hosts, by name, as far as they are described."""
    names = dict.fromkeys(host.device for host in hardware.hosts)
    return {name: hardware.devices[name] for name in names if name in hardware.devices}


def on_cpus(hardware: HardwareConfig) -> bool:
    """Whether some ranks have no GPU."""
    return not all(ACCELERATORS[d.accelerator].is_gpu for d in used_devices(hardware).values())


def _hosts(hardware: HardwareConfig) -> Iterator[str]:
    names: dict[str, str] = {}
    addresses: dict[tuple[str, int], str] = {}
    for index, host in enumerate(hardware.hosts):
        where = f"hardware.hosts[{index}]" + (f" ({shown(host.name)})" if host.name else "")
        yield from _names(host, where, has_peers=len(hardware.hosts) > 1)
        first = names.setdefault(host.name.lower(), where)
        if host.name and first is not where:
            yield f"{where}: {first} has this name, too. Name a host once, with all its slots."
        place = (canonical(host.address or host.name), host.ssh_port)
        before = addresses.setdefault(place, where)
        if host.name and before is not where and first is where:
            yield (
                f"{where}: address={place[0]} with ssh_port={place[1]} is {before}. List a "
                "host once, with all its slots."
            )
        yield from _slots_and_device(host, where, hardware)


def _names(host: HostConfig, where: str, *, has_peers: bool) -> Iterator[str]:
    if not host.name:
        yield f"{where}: no name and no address. Write e.g. {{name: node-a, address: 10.0.0.1}}."
        return
    problem = name_problem(host.name, keys="its ")
    if problem:
        yield f"{where}: name={shown(host.name)}: {printable(problem, keep='')}."
    # Without an address of its own a host is reached by its name.
    key, address = ("name", host.name) if host.address is None else ("address", host.address)
    address_error = None if problem and key == "name" else address_problem(address)
    if address_error:
        yield f"{where}: {key}={shown(address)}: {printable(address_error, keep='')}."
    if has_peers and (is_loopback(host.name) or is_loopback(host.address or "")):
        yield (
            f"{where}: other hosts cannot reach this one as {shown(host.address or host.name)}. "
            "Write the name and address by which they do, e.g. {name: gpu-1, address: 10.0.0.1}, "
            "also for the machine where you type."
        )


def _slots_and_device(host: HostConfig, where: str, hardware: HardwareConfig) -> Iterator[str]:
    types = ", ".join(hardware.devices)
    if not host.device:
        yield f"{where}: no device type. Set device, or hardware.device=NAME; known: {types}."
    elif host.device not in hardware.devices:
        yield (
            f"{where}: device={shown(host.device)} is not known."
            f"{did_you_mean(host.device[:100], hardware.devices)} Known: {types}; or "
            "describe it under hardware.devices."
        )
    if hardware.slots is not None and hardware.slots > host.slots:
        yield (
            f"hardware.slots={hardware.slots}, but {shown(host.name)} has {host.slots} "
            f"{shown(host.device)}. Use at most {host.slots}."
        )

    yield from _gpus(host, where, hardware)


def _gpus(host: HostConfig, where: str, hardware: HardwareConfig) -> Iterator[str]:
    chosen, device = host.gpus, hardware.devices.get(host.device)
    if not chosen:
        return
    listed = shown(f"[{', '.join(chosen)}]")
    if len(set(chosen)) != len(chosen):
        yield f"{where}: gpus={listed}: a GPU is there twice. Name each once."
    elif len(chosen) != host.slots:
        yield (
            f"{where}: gpus={listed} names {len(chosen)}, but slots={host.slots}. Name one for "
            "each slot."
        )
    if device is not None and not ACCELERATORS[device.accelerator].is_gpu:
        yield f"{where}: gpus is for hosts with GPUs, and {shown(host.device)} is none."


def _master(hardware: HardwareConfig) -> Iterator[str]:
    address = hardware.master_addr
    if address is None:
        return
    problem = address_problem(address, port_key="launch.master_port")
    if problem:
        yield f"hardware.master_addr={shown(address)}: {printable(problem, keep='')}."
    elif len(hardware.hosts) > 1 and is_loopback(address):
        yield (
            f"hardware.master_addr={shown(address)}: other hosts cannot reach rank 0 there. Set it "
            "to the address of the first host in their network, or leave it out."
        )


def _device(name: str, device: DeviceConfig) -> Iterator[str]:
    where = f"hardware.devices.{shown(name)}"
    if not device.precisions:
        yield (
            f"{where}: precisions is empty, so nothing says what it can compute. Set "
            "compute_capability (`nvidia-smi --query-gpu=compute_cap --format=csv` prints it), or "
            "e.g. precisions: [fp32, bf16, fp16]."
        )
    old = 0 < device.compute_capability < LEAST_BF16
    if old and "bf16" in device.precisions:
        yield (
            f"{where}: precisions has bf16, but compute_capability={device.compute_capability:g} "
            f"emulates it; GPUs compute it from {LEAST_BF16:g} on. Write precisions: [fp32, fp16]."
        )
    for precision in device.peak_tflops:
        if precision not in PRECISIONS:
            yield (
                f"{where}.peak_tflops.{shown(precision)}: runs compute in {', '.join(PRECISIONS)}."
                f"{did_you_mean(precision[:100], PRECISIONS)}"
            )
    if not ACCELERATORS[device.accelerator].is_gpu and device.compute_capability:
        yield f"{where}: compute_capability is for accelerator: cuda. Leave it out."


def _strays(hardware: HardwareConfig) -> Iterator[str]:
    """A key set for a device type that neither a host nor a data sheet has: a name with a typo. A
    whole data sheet may wait for hosts."""
    used = used_devices(hardware)
    strays = [
        name
        for name, device in hardware.devices.items()
        if name not in used
        and ACCELERATORS[device.accelerator].is_gpu
        and not (device.memory_gib and device.precisions)
    ]
    device_names = [*used, *(name for name in hardware.devices if name not in (*used, *strays))]
    for name in strays if hardware.hosts else ():
        used_names = ", ".join(used) or "none that is known"
        yield (
            f"hardware.devices.{shown(name)}: no host has this device type (theirs: {used_names}), "
            f"and no data sheet says what it is.{did_you_mean(name[:100], device_names)} Correct "
            "the name; or, for a type of your own, set its memory_gib and compute_capability, and "
            "hardware.device or device of a host to its name."
        )


def _zeropp(zero: ZeroConfig, hosts: Sequence[HostConfig]) -> Iterator[str]:
    """Limits of ZeRO++ on these hosts, and beside other settings."""
    offloaded = [
        f"zero.{key}={getattr(zero, key)}"
        for key in ("offload_optimizer", "offload_param")
        if getattr(zero, key) != "none"
    ]
    if zero.hpz_partition_size > 1 and offloaded:
        yield (
            f"zero.hpz_partition_size={zero.hpz_partition_size} with {' and '.join(offloaded)}: "
            "DeepSpeed trains with a loss or gradients of zero then (its issue 6926). Set "
            "zero.hpz_partition_size=1, or do not offload."
        )
    slots = {host.slots for host in hosts}
    if zero.quantized_gradients and len(slots) > 1:
        listed = ", ".join(f"{host.name} {host.slots}" for host in hosts[:8])
        yield (
            "zero.quantized_gradients=true (qgZ) reduces within hosts first and takes all of them "
            f"to have the same number of ranks (they have: {listed}). Use "
            f"hardware.slots={min(slots)}, or zero.quantized_gradients=false."
        )
