"""The hostfile: one line a host, ``name slots=N``, in rank order.

Owns writing it for DeepSpeed and OpenMPI, and reading a user's own one. DeepSpeed's reader
raises on ``slots = 2`` without a line number, and silently accepts ``slots=0`` and
``host:port``; this one names file, line, rule and fix.

``python -m llmx hardware=hostfile hardware.path=/job/hostfile hardware.device=h100 dry_run=true``
shows what was read. ``parse_hostfile(render_hostfile(hosts)) == hosts``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmx.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_IGNORED = re.compile(r"max[_-]slots=\d+")


@dataclass(frozen=True)
class HostSlots:
    """One line of a hostfile: a host's name and how many ranks it takes (at least 1)."""

    name: str
    slots: int


def render_hostfile(hosts: Iterable[HostSlots]) -> str:
    """The text of a hostfile that DeepSpeed and OpenMPI read alike."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def check_host_name(name: str) -> str | None:
    """Why ``name`` cannot stand in a hostfile, with the fix; None where it can."""
    if "@" in name:
        user, _, rest = name.partition("@")
        return f'a user does not belong here; write "{rest}" and set hardware.user={user}'
    if ":" in name and not name.startswith("["):
        host, _, port = name.partition(":")
        return f'a port does not belong here; write "{host}" and set hardware.ssh_port={port}'
    if "[" in name or "," in name:
        return "ranges and lists are not expanded; write one host a line"
    if not _NAME.fullmatch(name):
        return "a host name has letters, digits, dots, hyphens and underscores only"
    return None


def parse_hostfile(text: str, *, source: str = "hostfile") -> tuple[HostSlots, ...]:
    """Read a hostfile; ConfigError lists every bad line as ``source:line: value, rule, fix``."""
    hosts: list[HostSlots] = []
    first_line: dict[str, int] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        entry, problem = _parse_line(words)
        if entry is not None and entry.name in first_line:
            problem = (
                f'host "{entry.name}" stands already in line {first_line[entry.name]}; '
                "write each host once, with all its slots"
            )
        if problem is not None or entry is None:
            problems.append(f"{source}:{number}: {line.strip()!r}: {problem}.")
            continue
        first_line[entry.name] = number
        hosts.append(entry)
    if not hosts and not problems:
        problems.append(f"{source}: no host in it; write one line a host: worker-0 slots=2")
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(hosts)


def _parse_line(words: str) -> tuple[HostSlots | None, str | None]:
    """The host of one line, or None and what is wrong with the line."""
    if words.startswith(("//", ";", "--")):
        return None, "a comment begins with #"
    name, *rest = words.split()
    name_problem = check_host_name(name)
    if name_problem:
        return None, name_problem
    joined = " ".join(part for part in rest if not _IGNORED.fullmatch(part))
    if not joined:
        return None, f'the number of ranks is missing; write "{name} slots=2"'
    match = re.fullmatch(r"slots=(\d+)", joined)
    if not match:
        spaced = re.fullmatch(r"slots\s*=\s*(\d+)", joined)
        if spaced:
            return None, f'no spaces around "="; write "{name} slots={spaced[1]}"'
        return None, f'expected "slots=N" after the name; write "{name} slots=2"'
    slots = int(match[1])
    if slots < 1:
        return None, "a host has at least one slot; give it slots=1 or more, or remove the line"
    return HostSlots(name, slots), None
