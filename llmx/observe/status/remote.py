"""Facts of a run on another machine, over ssh, which needs nothing there but a Python 3.

The sources of ``observer.py`` and ``llmx.run.tail`` are sent there; the program ends when the
connection does.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from llmx.errors import ConfigError, LaunchError
from llmx.hardware.remote import BOOTSTRAP, framed, program_of
from llmx.observe.status import observer
from llmx.observe.status.view import Facts
from llmx.run import tail

CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255
"""The exit code of ssh where it is its own."""
SILENT_S = 20.0
"""Without a word for so long (facts come every few seconds) a connection is given up."""


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
    return RunLocation(match["path"] or ".", match["host"], ssh_config)


def fetch_facts(location: RunLocation, *, limit: int) -> Facts:
    """The facts once; LaunchError with ssh's own words where there are none."""
    process = _start(location, (tail, observer), [location.path, str(limit), "0"])
    out, err = process.communicate()
    return _facts(location, out.splitlines()[-1] if out.strip() else b"", err)


def stream_facts(location: RunLocation, *, every_s: float) -> Iterator[Facts]:
    """The facts every so often, until the connection breaks: then LaunchError."""
    process = _start(location, (tail, observer), [location.path, "1", str(every_s)])
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, name="watch-ssh", daemon=True).start()
    try:
        # The first answer may wait for a password.
        patience_s: float | None = None
        while True:
            try:
                line = lines.get(timeout=patience_s)
            except queue.Empty:
                raise LaunchError(f"{location.host} has been silent for {SILENT_S:.0f} s") from None
            if not line:
                process.wait()
                assert process.stderr is not None
                _facts(location, b"", process.stderr.read())
            yield _facts(location, line, b"")
            patience_s = SILENT_S + every_s
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def run_there(location: RunLocation, module: ModuleType, words: list[str]) -> int:
    """Run ``main(words)`` of a module there, with its output on this terminal; its exit code, or
    that of LaunchError where ssh has said why there is no connection."""
    process = _start(location, (module,), words, output=None)
    try:
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    return LaunchError.exit_code if code == SSH_FAILED else code


def _start(
    location: RunLocation,
    modules: tuple[ModuleType, ...],
    words: list[str],
    *,
    output: int | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start ``main(words)`` of the last module there. ``output``: where stdout and stderr go."""
    arguments = shlex.join(words)
    script = (
        f"for p in python3 python; do command -v $p >/dev/null 2>&1 && "
        f"exec $p -I -S -u -c {shlex.quote(BOOTSTRAP)} {arguments}; done; "
        'echo "no python3 on this host" >&2; exit 127'
    )
    argv = ["ssh", *(["-F", location.ssh_config] if location.ssh_config else [])]
    argv += ["-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=5"]
    argv += ["-o", "ServerAliveCountMax=3", "-T", location.host]
    argv += [shlex.join(["/bin/sh", "-c", script])]
    try:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=output, stderr=output)
    except FileNotFoundError:
        raise LaunchError("ssh is not installed here; install openssh-client.") from None
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # ssh ended, and has said why
        process.stdin.write(framed(program_of(modules)))
        process.stdin.flush()
    # The far program ends when its stdin does: so it is kept open.
    return process


def _facts(location: RunLocation, line: bytes, err: bytes) -> Facts:
    try:
        facts = json.loads(line)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        stderr_lines = err.decode("utf-8", "replace").strip().splitlines()
        why = stderr_lines[-1] if stderr_lines else "the connection closed"
        raise LaunchError(f"{location.host}: {why}. Try: ssh {location.host} true")
    if "error" in facts:
        raise ConfigError(f"{location.host}: {facts['error']}.")
    return facts
