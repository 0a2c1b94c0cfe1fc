"""The hardware of a run made explicit: this machine, a hostfile or a list become hosts with names,
addresses, slots and devices that say what they compute. What cannot be is left to the rules
(``llmx.config.hardware_rules``).

``python -m llmx plan hardware=hostfile hardware.path=/etc/hostfile hardware.device=a100_80g``
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llmx.config import DeviceConfig, HardwareConfig, HostConfig
from llmx.config.accelerators import ACCELERATORS
from llmx.config.addresses import address_problem, alias, bare, ipv6
from llmx.config.hardware_rules import native_precisions
from llmx.errors import ConfigError
from llmx.hardware.detect import detect_hardware
from llmx.text import printable

MAX_HOSTFILE_BYTES = 1 << 20
"""The most bytes of a hostfile; a larger file was named by mistake."""


def resolve_hardware(hardware: HardwareConfig) -> HardwareConfig:
    """``hostfile``, ``slurm``, ... become a static list of hosts, and ``local`` without hosts gets
    those of this machine; ``slots`` is applied; names, addresses and precisions that follow from
    others are written out."""
    if hardware.kind == "local" and not hardware.hosts:
        hardware = detect_hardware(hardware)
    elif hardware.kind == "hostfile":
        hardware = _from_hostfile(hardware)
    elif hardware.kind == "slurm":
        from llmx.hardware.slurm import hardware_of_allocation

        hardware = hardware_of_allocation(hardware)
    elif hardware.kind == "external":
        from llmx.hardware.external import hardware_of_processes

        hardware = hardware_of_processes(hardware)
    hardware = dataclasses.replace(
        hardware,
        master_addr=hardware.master_addr and bare(hardware.master_addr),
        devices={name: with_precisions(device) for name, device in hardware.devices.items()},
    )
    hosts = [
        dataclasses.replace(named(host), device=host.device or hardware.device or "")
        for host in hardware.hosts
    ]
    limit = hardware.slots
    if limit is not None and hosts and all(1 <= limit <= host.slots for host in hosts):
        hosts = [dataclasses.replace(host, slots=limit, gpus=host.gpus[:limit]) for host in hosts]
    root = hardware.root
    if root is None and any(host.root for host in hosts):
        root = str(Path.cwd())
    return dataclasses.replace(hardware, hosts=hosts, root=root)


def _from_hostfile(hardware: HardwareConfig) -> HardwareConfig:
    from llmx.hardware.hostfile import parse_hostfile

    if not hardware.path:
        raise ConfigError(
            "hardware=hostfile needs hardware.path=/path/to/hostfile (lines: NAME slots=N)."
        )
    if not hardware.device:
        raise ConfigError(
            "hardware=hostfile needs hardware.device=NAME, the device type of its slots; known: "
            f"{', '.join(hardware.devices)}."
        )
    path = Path(hardware.path).expanduser()
    hosts = [
        HostConfig(
            name=entry.name,
            address=entry.address,
            slots=entry.slots,
            device=hardware.device,
            ssh_port=hardware.ssh_port,
            user=hardware.user,
            interface=hardware.interface,
        )
        for entry in parse_hostfile(_hostfile_text(path), source=printable(str(path), keep=""))
    ]
    return dataclasses.replace(hardware, kind="static", hosts=hosts)


def _hostfile_text(path: Path) -> str:
    """The text of a hostfile; ConfigError where it is none."""
    where = f"hardware.path={printable(str(path), keep='')}"
    try:
        if path.is_file():
            with path.open("rb") as stream:
                content = stream.read(MAX_HOSTFILE_BYTES + 1)
            if len(content) > MAX_HOSTFILE_BYTES:
                raise ValueError(f"over {MAX_HOSTFILE_BYTES >> 20} MiB")
            return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # also a path that is none
        reason = printable(str(error), keep="")
        if isinstance(error, UnicodeDecodeError):
            reason = f"its byte {error.start} is not UTF-8"
        raise ConfigError(
            f"{where}: cannot be read ({reason}). Give the path of a "
            "hostfile, a text in UTF-8 with one line per host: NAME slots=N."
        ) from None
    raise ConfigError(f"{where}: no such file (relative to {Path.cwd()}). Give a hostfile's path.")


def named(host: HostConfig) -> HostConfig:
    """A host whose name and address follow from each other; IPv6 without brackets."""
    address = host.address and bare(host.address.strip())
    name = host.name.strip()
    if ipv6(name):
        return dataclasses.replace(host, name=alias(name), address=address or bare(name))
    if not name and address and not address_problem(address):
        name = alias(address)
    return dataclasses.replace(host, name=name, address=address)


def with_precisions(device: DeviceConfig) -> DeviceConfig:
    """A device whose precisions follow from its compute capability, where nothing says them."""
    if device.precisions:
        return device
    if not ACCELERATORS[device.accelerator].is_gpu:
        return dataclasses.replace(device, precisions=["fp32"])
    if not device.compute_capability:
        return device  # a rule says what to set
    return dataclasses.replace(device, precisions=native_precisions(device.compute_capability))
