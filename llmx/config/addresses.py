"""Checks names and addresses of hosts, and says how to write them. Pure.

A name stands in the hostfile, in ``ssh_config`` and on the command lines of pdsh and mpirun, so it
is a plain word. An address is where other hosts reach it: a DNS name, IPv4 or IPv6. IPv6 is
understood bare and in brackets; where it is given as a *name*, the host gets a name made of it
(``alias``), since a colon means something else to every launcher.
"""

from __future__ import annotations

import ipaddress
import re

from llmx.text import CONTROL

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which every machine knows itself."""
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
USER = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}"
"""An ssh user."""
INTERFACE = r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,14}"
"""A network interface: 15 characters at most, as the kernel has it."""
REACH = r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}"
"""An address and a port: ``198.51.100.7:30846``, ``[fd00::1]:30846``."""
FINGERPRINT = r"SHA256:[A-Za-z0-9+/]{43}"
"""Fingerprint of a host's key, as ``ssh-keygen -l`` prints it."""
PATH = f"[^\"'\\\\{CONTROL}]*"
"""A path that ``ssh_config`` can hold, in double quotes where it has a space."""


def ipv6(text: str) -> str | None:
    """The bare IPv6 address in ``text`` (``fd00::1`` or ``[fd00::1]``); None where it is none, and
    for one with a zone (``fe80::1%eth0``), which means another interface on every host."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.IPv6Address(inner)
    except ValueError:
        return None
    return None if address.scope_id else str(address)


def ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in ``text``; None for a DNS name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def bare(address: str) -> str:
    """The address as programs take it: IPv6 without brackets, the rest as it is."""
    return ipv6(address) or address


def alias(address: str) -> str:
    """A name for a host that has only an address: ``fd00::1`` becomes ``ipv6-fd00--1``."""
    bare_ipv6 = ipv6(address)
    return f"ipv6-{bare_ipv6.replace(':', '-')}" if bare_ipv6 else address


def canonical(address: str) -> str:
    """Equal for two spellings of one address."""
    parsed = ip(bare(address))
    return str(parsed) if parsed else address.lower().rstrip(".")


def is_loopback(address: str) -> bool:
    """Whether only the host itself reaches it there."""
    parsed = ip(bare(address))
    return parsed.is_loopback if parsed else canonical(address) in ("localhost", "ip6-localhost")


def name_problem(name: str, *, keys: str = "hardware.") -> str | None:
    """Why ``name`` cannot stand in a hostfile, with the fix; None where it can.

    ``keys``: what stands before ``user`` and ``ssh_port`` where they are set.
    """
    if not name:
        return "the name is missing; write e.g. node-a"
    if "@" in name:
        user, _, host = name.partition("@")
        return f'a user does not belong here; write "{host[:60]}" and set {keys}user={user[:60]}'
    if "%" in name and ":" in name:
        return "a zone (%) differs from host to host; write an address without one"
    if ":" in name and not name.startswith("["):
        host, _, port = name.partition(":")
        if re.fullmatch(r"[0-9]{1,5}", port):
            return f'a port does not belong here; write "{host[:60]}" and set {keys}ssh_port={port}'
        return "a name has no colon; write the address after address:"
    if "[" in name or "," in name:
        return "ranges and lists are not expanded; write one host a line"
    if not NAME.fullmatch(name):
        return "a host name has letters, digits, dots, hyphens and underscores only"
    return None


def address_problem(address: str, *, port_key: str = "ssh_port") -> str | None:
    """Why no host can be reached at ``address``, with the fix; None where one can."""
    if not address:
        return "the address is empty; write a DNS name or an IP address, or leave it out"
    if any(letter.isspace() or not letter.isprintable() for letter in address):
        return "an address is one word; write a DNS name or an IP address"
    if "://" in address or "/" in address:
        return "an address is no URL and no network; write the DNS name or the IP address alone"
    if "@" in address:
        user, _, host = address.rpartition("@")
        return f"a user does not belong to the address; write {host[:60]} and user: {user[:60]}"
    parsed = ip(bare(address))
    if parsed is not None:
        if getattr(parsed, "scope_id", None):
            return "a zone (%) differs from host to host; write an address without one"
        if parsed.is_unspecified or parsed.is_multicast:
            return "it is not the address of one host; write the one where the others reach it"
        return None
    match = re.fullmatch(r"\[(.*)\]:([0-9]{1,5})|([^:\[\]]+):([0-9]{1,5})", address)
    if match:
        host, port = match[1] or match[3], match[2] or match[4]
        return f"a port does not belong to the address; write {host[:60]} and {port_key}: {port}"
    if ":" in address or "[" in address or "]" in address:
        return "it is no IPv6 address; write one such as fd00::1, or a DNS name"
    if re.fullmatch(r"[0-9.]+", address):
        return "it is no IPv4 address; write four numbers up to 255, such as 10.0.0.1"
    if not NAME.fullmatch(address.rstrip(".")):
        return "a DNS name has letters, digits, dots, hyphens and underscores only"
    return None
