"""The ssh settings of one run: a file of its own, so that every host may have its own port.

DeepSpeed knows one ``--ssh_port`` for all hosts and checks only the first one. Instead,
every ssh of a run (pdsh's, mpirun's, rsync's, the agents') reads ``RUN_DIR/ssh_config``.

``ssh -F RUN_DIR/ssh_config HOST`` logs in exactly as the run does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from llmx.config.addresses import PATH, USER, address_problem, name_problem
from llmx.config.build import shown
from llmx.errors import ConfigError
from llmx.plan.types import HostPlan

CONNECT_TIMEOUT_S = 10
ALIVE_INTERVAL_S = 15
ALIVE_COUNT = 4


def render_ssh_config(hosts: Iterable[HostPlan]) -> str:
    """One block a host, then the user's and the system's own settings.

    ssh takes the *first* value it finds for a key, so what stands here wins and a jump host
    or a cipher of ``~/.ssh/config`` still applies.

    Raises ConfigError for a value that ssh would read as more than that value, whatever has
    checked it before: a line break in an address would be a ``ProxyCommand`` of its own.
    """
    blocks = ["# Written by llmx for this run. Log in with: ssh -F THIS_FILE HOST\n"]
    for host in hosts:
        _check(host)
        lines = [f"Host {host.name}"]
        # What the config leaves at its default is left to the user's own settings.
        if host.address != host.name:
            lines.append(f"    HostName {host.address}")
        if host.ssh_port != 22:
            lines.append(f"    Port {host.ssh_port}")
        if host.user:
            lines.append(f"    User {host.user}")
        if host.identity_file:
            lines.append(f"    IdentityFile {_path(host.identity_file)}")
            lines.append("    IdentitiesOnly yes")
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
                # What people have for their terminals: a command, a forwarded port that only one
                # ssh can have, a master that stays with our pipes open. One that is there is used.
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
    """``ssh`` to ``host`` running ``remote``, quoted for the login shell there."""
    return ["ssh", "-F", str(ssh_config), host, shlex.join(remote)]


def _check(host: HostPlan) -> None:
    problems = [
        ("name", host.name, name_problem(host.name)),
        ("address", host.address, address_problem(host.address)),
        (
            "user",
            host.user,
            None if re.fullmatch(USER, host.user or "x") else "it is not a user name",
        ),
        (
            "identity_file",
            host.identity_file,
            None
            if re.fullmatch(PATH, host.identity_file or "") and "${" not in str(host.identity_file)
            else "it is not a plain path",
        ),
    ]
    for key, value, problem in problems:
        if problem:
            raise ConfigError(f"host {shown(host.name)}: {key}={shown(value)}: {problem}.")


def _path(path: str) -> str:
    """As one word that ssh reads as this path: it expands ``%h`` and takes ``#`` for a comment."""
    path = path.replace("%", "%%")
    return path if re.fullmatch(r"[\w@%+=:,./~-]+", path, re.ASCII) else f'"{path}"'
