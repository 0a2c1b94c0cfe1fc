"""A run or a directory of runs that is read again and again: here, or by a copy of one on another
machine.

ssh and rsync make the copy of the files that ``status`` and ``watch`` read; nothing else is needed
there. What is read is the copy, by the same code as a run of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.errors import ConfigError, LaunchError
from llmx.observe.run import Machine, Run, find_runs, is_run, live_first
from llmx.run.rundir import RunDir

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


class Source:
    """Where runs are. One connection serves all copies from another machine, so that a password is
    typed once. Whoever reads may get a ConfigError, that there is no such directory, or a
    LaunchError, that there is no connection."""

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        path = Path(location.path).expanduser()
        if location.host:
            self._directory = tempfile.TemporaryDirectory(prefix="llmx-")
            self._socket = f"{self._directory.name}/ssh"
            path = Path(self._directory.name) / "copy"
        self.root = RunDir(path).root
        self._master: subprocess.Popen[bytes] | None = None
        self._machine: Machine | None = None
        self._run: Run | None = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        if self._directory is not None:
            self._disconnect()
            self._directory.cleanup()

    @property
    def base(self) -> str:
        """The directory, as it is called on its machine."""
        return self._machine.root if self._machine else str(self.root)

    def is_run(self) -> bool:
        """Whether the directory is that of one run."""
        self._copy(FILES)
        return is_run(self.root)

    def run(self) -> Run:
        """The run as it is now; ConfigError where the directory is not that of one."""
        if self._run is None and not self.is_run():
            raise ConfigError(
                f"{self.location} is not a run directory. Runs there: python -m llmx status "
                f"{self.location}"
            )
        self._copy((*FILES, *LONG_FILES))
        self._run = Run(self.root, machine=self._machine, before=self._run)
        return self._run

    def runs(self, limit: int) -> tuple[list[Run], int]:
        """At most ``limit`` runs, those that may be alive first, then the newest; and how many
        there are. ``is_run`` comes first."""
        directories = find_runs(self.root)
        names = [os.path.relpath(root, self.root) for root in live_first(directories)[:limit]]
        if self.location.host and names:
            metrics = [f"{name}/metrics.jsonl" for name in names]
            self._rsync(self.base, ["--ignore-missing-args"], files=metrics)
        runs = [
            Run(self.root / name, is_brief=True, machine=self._machine, name=name) for name in names
        ]
        return runs, len(directories)

    def write_stop(self) -> None:
        """Ask the supervisor of the run to end it."""
        stop = RunDir(self.root).stop
        if self.location.host:
            self._ask_there(f"touch -- {shlex.quote(self.location.path)}/{stop.name}")
        else:
            stop.touch()

    def _copy(self, names: Sequence[str]) -> None:
        if self.location.host:
            self._refresh(names)
        elif not self.root.is_dir():
            raise ConfigError(
                f"no such directory: {self.location.path}. Give a run directory or one that "
                "contains runs, here or as user@host:path. The default is outputs/."
            )

    # --- Another machine -------------------------------------------------------------------------

    def _refresh(self, names: Sequence[str]) -> None:
        """Copy the files of these ``names`` that have changed."""
        path = shlex.quote(self.location.path)
        missing = f"no such directory: {self.location.path}"
        answer = self._ask_there(
            f"cd -- {path} 2>/dev/null || {{ echo {shlex.quote(missing)} >&2; exit 2; }}; {FACTS}"
        )
        root, host, now, disk, *processes = answer.splitlines()
        self._rsync(root, ["--include=*/", *(f"--include={name}" for name in names), "--exclude=*"])
        free = disk.split()[3]
        self._machine = Machine(
            root,
            host,
            float(now.removesuffix(".N").removesuffix(".%N")),
            1024 * int(free) if free.isdecimal() else None,
            frozenset(" ".join(processes).split()),
        )

    def _rsync(self, root: str, words: Sequence[str], *, files: Sequence[str] = ()) -> None:
        """Copy files of ``root``: those that the ``words`` of rsync select, or these ``files``."""
        argv = ["rsync", "-rstz", "--timeout", str(SILENT_S), "-e", shlex.join(self._ssh()), *words]
        argv += ["--files-from=-"] if files else ["--delete"]
        argv += ["--", f"{self.location.host}:{root}/", str(self.root)]
        self._ask(argv, "\n".join(files))

    def _ask_there(self, script: str) -> str:
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


def outputs() -> str:
    """The directory of runs for which none is given: ``$LLMX_OUTPUTS``, else ``outputs``."""
    return os.environ.get("LLMX_OUTPUTS", "outputs")


def location_of(options: argparse.Namespace) -> RunLocation:
    """The directory that a command was given, else that of all runs."""
    ssh_config = None if options.ssh_config is None else str(options.ssh_config)
    return parse_location(options.location or outputs(), ssh_config=ssh_config)
