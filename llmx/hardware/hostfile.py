"""The hostfile: one line for each host, ``name slots=N``, in rank order.

It is written for DeepSpeed and OpenMPI, and read where a user has one. DeepSpeed's own reader
raises on ``slots = 2`` without a line number, and accepts ``slots=0`` and ``host:port``; this one
reports file, line, rule and fix.

``python -m llmx hardware=hostfile hardware.path=/job/hostfile hardware.device=h100 dry_run=true``
shows what was read. ``parse_hostfile(render_hostfile(hosts)) == hosts``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmx.config.addresses import alias, ipv6, name_problem
from llmx.config.build import shown
from llmx.errors import ConfigError
from llmx.text import printable

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
