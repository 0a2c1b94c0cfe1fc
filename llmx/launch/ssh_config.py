"""``RUN_DIR/ssh_config``: the ssh settings of one run, with a port and a key for each host.

DeepSpeed has one ``--ssh_port`` for all hosts and checks only the first one. Instead every ssh of a
run (of pdsh, mpirun, rsync and the agents) reads this file.

``ssh -F RUN_DIR/ssh_config HOST`` logs in exactly as the run does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from llmx.config.addresses import FINGERPRINT, PATH, USER, address_problem, name_problem
from llmx.config.build import shown
from llmx.errors import ConfigError
from llmx.plan.types import HostPlan

CONNECT_TIMEOUT_S = 10
# Arguments: the fingerprint of the host's key (NONE: ssh asks which keys it should prefer), the
# expected one, and the line of known_hosts. ssh itself runs it for the key that the host has shown,
# so there is no second connection that another machine could answer, and jump hosts change nothing.
CHECK_KEY = (
    'if [ "$1" = "$2" ]; then echo "$3 $4 $5"; elif [ "$1" != NONE ]; then '
    'echo "error: $3 has the host key $1 ($4) instead of fingerprint=$2" >&2; fi'
)
ALIVE_INTERVAL_S = 15
ALIVE_COUNT = 4


def render_ssh_config(hosts: Iterable[HostPlan]) -> str:
    """One block for each host, then the settings of the user and of the system.

    ssh takes the *first* value of a key, so these win, and a jump host or a cipher of
    ``~/.ssh/config`` still applies.

    Raises ConfigError for a value that ssh would misread, whatever has checked it before (plan.json
    may have been edited): a line break in an address could add a ``ProxyCommand``.
    """
    blocks = ["# Written by llmx for this run. Log in with: ssh -F THIS_FILE HOST\n"]
    for host in hosts:
        _check(host)
        lines = [f"Host {host.name}"]
        # Defaults of the config are left to the user's own settings.
        if host.address != host.name:
            lines.append(f"    HostName {host.address}")
        if host.ssh_port != 22:
            lines.append(f"    Port {host.ssh_port}")
        if host.user:
            lines.append(f"    User {host.user}")
        if host.identity_file:
            lines.append(f"    IdentityFile {_path(host.identity_file)}")
            lines.append("    IdentitiesOnly yes")
        if host.fingerprint:
            lines += [
                "    StrictHostKeyChecking yes",
                "    UserKnownHostsFile /dev/null",
                "    GlobalKnownHostsFile /dev/null",
                f"    KnownHostsCommand /bin/sh -c '{CHECK_KEY}' sh %f {host.fingerprint} %H %t %K",
                "    VerifyHostKeyDNS no",
                "    ControlPath none",  # a master of the user's has checked another key
            ]
        blocks.append("\n".join(lines) + "\n")
    blocks.append(
        "\n".join(
            [
                "Host *",
                "    BatchMode yes",
                f"    ConnectTimeout {CONNECT_TIMEOUT_S}",
                f"    ServerAliveInterval {ALIVE_INTERVAL_S}",
                f"    ServerAliveCountMax {ALIVE_COUNT}",
                "    StrictHostKeyChecking accept-new",
                "    LogLevel ERROR",
                # Users set these for terminals: a command, a forwarded port that only one ssh can
                # have, a master that keeps our pipes open. A master that runs already is used.
                "    RemoteCommand none",
                "    RequestTTY no",
                "    ClearAllForwardings yes",
                "    ControlMaster no",
            ]
        )
        + "\n"
    )
    blocks.append("Include ~/.ssh/config\nInclude /etc/ssh/ssh_config\n")
    return "\n".join(blocks)


def ssh_argv(ssh_config: Path, host: str, remote: list[str]) -> list[str]:
    """``ssh`` to ``host`` running ``remote``, quoted for the login shell there: no word of it is
    read as code."""
    return ["ssh", "-F", str(ssh_config), host, shlex.join(remote)]


def _check(host: HostPlan) -> None:
    """ConfigError for a value that ssh would read as something else: plan.json may be edited."""
    problems = {
        "name": name_problem(host.name),
        "address": address_problem(host.address),
        "user": _unlike(USER, host.user, "it is not a user name"),
        "identity_file": _unlike(
            PATH, host.identity_file, "it must be a path without quotes and variables"
        ),
        "fingerprint": _unlike(FINGERPRINT, host.fingerprint, "it is no SHA256 fingerprint"),
    }
    for key, problem in problems.items():
        if problem:
            value = shown(getattr(host, key))
            raise ConfigError(f"host {shown(host.name)}: {key}={value}: {problem}.")


def _unlike(pattern: str, value: str | None, problem: str) -> str | None:
    """The problem of a value that is set and does not match."""
    return problem if value and (not re.fullmatch(pattern, value) or "${" in value) else None


def _path(path: str) -> str:
    """The path as one word: ssh expands ``%h``, and ``#`` begins a comment."""
    path = path.replace("%", "%%")
    return path if re.fullmatch(r"[\w@%+=:,./~-]+", path, re.ASCII) else f'"{path}"'
