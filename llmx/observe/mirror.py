"""Runs on another machine: the files that ``status`` and ``watch`` read, copied here by rsync.

What is read is the copy, by the same code as a run of this machine. ssh and rsync do it; nothing
else is needed there.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.errors import ConfigError, LaunchError

CONNECT_TIMEOUT_S = 10
SILENT_S = 20
"""A connection without an answer for so long is given up."""
FILES = (
    "config.yaml", "plan.json", "run.json", "supervisor.json", "supervisor.lock", "result.json",
    "attempts.jsonl", "rank-*.json", "manifest.json",
)  # fmt: skip
LONG_FILES = ("metrics.jsonl", "console.log")
FACTS = "pwd; hostname; date +%s.%N; df -Pk . | tail -n 1; cd /proc; echo [0-9]*"


@dataclass(frozen=True)
class RunLocation:
    """The path of a run, here or on another machine."""

    path: str
    host: str = ""
    """As ssh takes it, ``user@host``; empty for this machine."""
    ssh_config: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.path}" if self.host else self.path


def parse_location(word: str, *, ssh_config: str | None = None) -> RunLocation:
    """``user@host:path`` as scp reads it: a colon before any slash. A path that exists is one."""
    match = re.match(r"(?P<host>[^/:]+):(?P<path>.*)$", word, re.DOTALL)
    if match is None or Path(word).exists():
        return RunLocation(word)
    if match["host"].startswith("-"):
        raise ConfigError(f"{word}: a host name does not begin with a dash. Write user@host:path.")
    return RunLocation(match["path"].removeprefix("~/") or ".", match["host"], ssh_config)


@dataclass(frozen=True)
class Machine:
    """The machine that a run is on, at one moment."""

    root: str
    """The directory that the copy is of."""
    host: str
    now: float
    free_bytes: int | None
    processes: frozenset[str] | None
    """The numbers of those that run there; None for this machine, which is asked for one."""


class Mirror:
    """The copy of a directory on another machine. One connection serves all copies, so that a
    password is typed once."""

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self._directory = tempfile.TemporaryDirectory(prefix="llmx-")
        self.root = Path(self._directory.name) / "copy"
        self._socket = f"{self._directory.name}/ssh"
        self._master: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *error: object) -> None:
        self._disconnect()
        self._directory.cleanup()

    def refresh(self, names: Sequence[str]) -> Machine:
        """Copy the files of these ``names`` that have changed.

        Raises:
            ConfigError: there is no such directory.
            LaunchError: there is no connection; in ssh's own words.
        """
        path = shlex.quote(self.location.path)
        missing = f"no such directory: {self.location.path}"
        answer = self.run(
            f"cd -- {path} 2>/dev/null || {{ echo {shlex.quote(missing)} >&2; exit 2; }}; {FACTS}"
        )
        root, host, now, disk, *processes = answer.splitlines()
        self.copy(root, ["--include=*/", *(f"--include={name}" for name in names), "--exclude=*"])
        free = disk.split()[3]
        return Machine(
            root,
            host,
            float(now.removesuffix(".N").removesuffix(".%N")),
            1024 * int(free) if free.isdecimal() else None,
            frozenset(" ".join(processes).split()),
        )

    def copy(self, root: str, words: Sequence[str], *, files: Sequence[str] = ()) -> None:
        """Copy files of ``root``: those that the ``words`` of rsync select, or these ``files``."""
        argv = ["rsync", "-rstz", "--timeout", str(SILENT_S), "-e", shlex.join(self._ssh()), *words]
        argv += ["--files-from=-"] if files else ["--delete"]
        argv += ["--", f"{self.location.host}:{root}/", str(self.root)]
        self._ask(argv, "\n".join(files))

    def run(self, script: str) -> str:
        """What a script of ``sh`` prints there."""
        if self._master is None or self._master.poll() is not None:
            self._connect()
        return self._ask([*self._ssh(), self.location.host, script])

    def _ask(self, argv: list[str], words: str = "") -> str:
        try:
            done = subprocess.run(
                argv, input=words, capture_output=True, text=True, errors="replace", check=False
            )
        except FileNotFoundError:
            raise LaunchError(f"{argv[0]} is not installed here; install it.") from None
        lines = done.stderr.strip().splitlines()
        if done.returncode == 2 and argv[0] == "ssh":
            raise ConfigError(f"{self.location.host}: {lines[-1] if lines else 'no directory'}.")
        # 24: a file was removed there meanwhile.
        if done.returncode not in (0, 24):
            self._disconnect()
            reason = lines[0] if lines else "the connection closed"
            host = self.location.host
            fix = f"Try: ssh {host} true"
            if "rsync" in reason and "not found" in reason:
                fix = f"Install rsync on {host}."
            raise LaunchError(f"{host}: {reason.rstrip('.')}. {fix}")
        return done.stdout

    def _ssh(self) -> list[str]:
        config = ["-F", self.location.ssh_config] if self.location.ssh_config else []
        options = [f"ConnectTimeout={CONNECT_TIMEOUT_S}", "ServerAliveInterval=5"]
        options += ["ServerAliveCountMax=3", f"ControlPath={self._socket}"]
        return ["ssh", *config, *(word for option in options for word in ("-o", option)), "-T"]

    def _connect(self) -> None:
        """Open the connection; where that fails, the next command says why."""
        argv = [*self._ssh(), "-M", "-N", self.location.host]
        with contextlib.suppress(FileNotFoundError):
            self._master = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            while self._master.poll() is None and not Path(self._socket).exists():
                time.sleep(0.02)

    def _disconnect(self) -> None:
        if self._master is not None:
            self._master.terminate()
            self._master.wait()
            Path(self._socket).unlink(missing_ok=True)
            self._master = None
