"""The hardware of a run made explicit: this machine, a hostfile or a list become hosts with names,
addresses, slots and devices that say what they compute. What cannot be is left to the rules
(``llmx.config.hardware_rules``).

``python -m llmx plan hardware=hostfile hardware.path=/etc/hostfile hardware.device=a100_80g``
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmx.config import DeviceConfig, HardwareConfig, HostConfig
from llmx.config.accelerators import ACCELERATORS
from llmx.config.addresses import address_problem, alias, bare, ipv6, name_problem
from llmx.config.build import shown
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
    """The text of a hostfile; ConfigError where it cannot be read."""
    problem = f"no such file (relative to {Path.cwd()})"
    try:
        if path.is_file():
            with path.open("rb") as stream:
                content = stream.read(MAX_HOSTFILE_BYTES + 1)
            if len(content) > MAX_HOSTFILE_BYTES:
                raise ValueError(f"over {MAX_HOSTFILE_BYTES >> 20} MiB")
            return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"cannot be read (its byte {error.start} is not UTF-8)"
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({printable(str(error), keep='')})"
    raise ConfigError(
        f"hardware.path={printable(str(path), keep='')}: {problem}. Give the path of a hostfile, a "
        "text in UTF-8 with one line per host: NAME slots=N."
    )


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


MAX_SLOTS = 1024
"""The most slots of one host, as in the schema."""
MAX_PROBLEMS = 20
"""Problems listed in one message."""
_IGNORED = re.compile(r"max[_-]slots=[0-9]+")


@dataclass(frozen=True)
class HostSlots:
    """One line of a hostfile: a host's name and how many ranks it takes (at least 1)."""

    name: str
    slots: int
    address: str | None = None
    """Where the line has an IPv6 address as its name, from which ``name`` is made."""


def render_hostfile(hosts: Iterable[HostSlots]) -> str:
    """The text of a hostfile for DeepSpeed and OpenMPI.

    Raises ConfigError for a name that they would misread: plan.json may have been edited.
    """
    lines = []
    for host in hosts:
        problem = name_problem(host.name) or (
            "" if host.slots >= 1 else "a host has at least one slot"
        )
        if problem:
            raise ConfigError(f"host {shown(host.name)} slots={host.slots}: {problem}.")
        lines.append(f"{host.name} slots={host.slots}\n")
    return "".join(lines)


def parse_hostfile(text: str, *, source: str = "hostfile") -> tuple[HostSlots, ...]:
    """Read a hostfile; ConfigError lists every bad line as ``source:line: value, rule, fix``."""
    hosts: list[HostSlots] = []
    first_line: dict[str, int] = {}
    problems: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        entry, problem = _parse_line(words)
        if entry is not None and entry.name in first_line:
            problem = (
                f'host "{entry.address or entry.name}" is already in line '
                f"{first_line[entry.name]}; write each host once, with all its slots"
            )
        if problem is not None or entry is None:
            reason = printable(str(problem), keep="")
            problems.append(f"{source}:{number}: {shown(line.strip())}: {reason}.")
            continue
        first_line[entry.name] = number
        hosts.append(entry)
    if not hosts and not problems:
        problems.append(f"{source}: has no hosts; write one line for each: worker-0 slots=2")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [
            f"{source}: and {len(problems) - MAX_PROBLEMS} more invalid lines. Is it a hostfile?"
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(hosts)


def _parse_line(words: str) -> tuple[HostSlots | None, str | None]:
    """The host of one line, or None and the problem of the line."""
    if words.startswith(("//", ";", "--")):
        return None, "a comment begins with #"
    name, *options = words.split()
    address = ipv6(name)
    problem = None if address else name_problem(name)
    if problem:
        return None, problem
    joined = " ".join(part for part in options if not _IGNORED.fullmatch(part))
    if not joined:
        return None, f'the number of ranks is missing; write "{name[:60]} slots=2"'
    match = re.fullmatch(r"slots=([0-9]+)", joined)
    if not match:
        spaced = re.fullmatch(r"slots\s*=\s*([0-9]+)", joined)
        if spaced:
            return None, f'no spaces around "="; write "{name[:60]} slots={spaced[1][:9]}"'
        return None, f'expected "slots=N" after the name; write "{name[:60]} slots=2"'
    digits = match[1].lstrip("0")
    if not digits:
        return None, "a host has at least one slot; give it slots=1 or more, or remove the line"
    if len(digits) > 9 or int(digits) > MAX_SLOTS:
        return None, f"a host has at most {MAX_SLOTS} slots, one for each device"
    return HostSlots(alias(name), int(digits), address), None
