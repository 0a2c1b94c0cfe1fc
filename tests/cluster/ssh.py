"""The files of ssh: keys, the server's and the client's configuration."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.host import Host


def make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "llmx-test-cluster", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def sshd_config(host: Host) -> str:
    """The server's configuration: keys only, nothing of the machine's own."""
    return (
        f"Port {host.ssh_port}\n"
        f"HostKey {host.directory / 'host_key'}\n"
        f"AuthorizedKeysFile {host.cluster.identity_file}.pub\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n"
        "StrictModes no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n"
        f"PidFile {host.directory / 'sshd.pid'}\nSubsystem sftp internal-sftp\n"
    )


def ssh_config(hosts: Iterable[Host]) -> str:
    """A client's configuration: ``ssh -F FILE node-b`` from any host, and from outside."""
    return "\n".join(
        f"Host {host.name} {host.address}\n  HostName {host.address}\n  Port {host.ssh_port}\n"
        f"  User root\n  IdentityFile {host.cluster.identity_file}\n  IdentitiesOnly yes\n"
        "  BatchMode yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        "  LogLevel ERROR\n"
        for host in hosts
    )


def unlocked_shadow(directory: Path) -> Path | None:
    """A copy of /etc/shadow in which root may log in by key; None where it already may."""
    lines = Path("/etc/shadow").read_text().splitlines(keepends=True)
    if not any(line.startswith("root:!") for line in lines):
        return None
    copy = directory / "shadow"
    copy.touch(mode=0o600)
    copy.write_text("".join(_unlocked(line) for line in lines))
    return copy


def _unlocked(line: str) -> str:
    name, password, rest = line.split(":", 2)
    return f"{name}:*:{rest}" if name == "root" and password.startswith("!") else line
