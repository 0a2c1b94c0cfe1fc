"""The supervisor's own files: its lock, its state, its attempts, and where the next one begins.

``supervisor.lock`` (one supervisor a run), ``supervisor.json`` (its state now), ``attempts.jsonl``
(how each attempt ended), ``resume.json`` (where the next one begins), ``run.json`` (the run's id).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmx.errors import LaunchError
from llmx.launch.agents.agent import owner_of
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.run.tail import read_records

REFRESH_S = 3.0
"""``supervisor.json`` is written at each change, and this often while nothing changes."""


@contextlib.contextmanager
def supervisor_lock(run_dir: RunDir, run_id: str) -> Iterator[None]:
    """Hold the run for this process; LaunchError names the process that already does.

    A copy of a run directory has the same id: two of them at once on one machine would end each
    other's ranks, so the second one is refused too.
    """
    run_dir.root.mkdir(parents=True, exist_ok=True)
    with _held(run_dir, run_id, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as descriptor:
        for temporary in run_dir.root.glob(".*.tmp"):  # of a supervisor that was killed
            temporary.unlink(missing_ok=True)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        with contextlib.suppress(OSError):  # a full disk; the lock holds without its content
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        yield


def refuse_alive(run_dir: RunDir, run_id: str) -> None:
    """LaunchError where a supervisor of this run lives. Writes nothing."""
    if run_dir.supervisor_lock.exists():
        with _held(run_dir, run_id, os.O_RDONLY, fcntl.LOCK_SH):
            pass


@contextlib.contextmanager
def _held(run_dir: RunDir, run_id: str, flags: int, lock: int) -> Iterator[int]:
    """The open file of the lock, and the name of the run's id on this machine."""
    descriptor = os.open(run_dir.supervisor_lock, flags, 0o644)
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(_held_message(run_dir)) from None
        try:
            claim.bind(f"\0llmx-run-{run_id}")  # freed when this process ends, however it ends
            claim.listen()
        except OSError:
            # A process of another user only blocks the name.
            if owner_of(f"llmx-run-{run_id}")[1] == os.getuid():
                raise LaunchError(
                    f"{run_dir.root}: a run with the same id ({run_id}) is running from another "
                    "directory: this one is a copy of it. Remove run.json here to make it a run of "
                    "its own."
                ) from None
        yield descriptor
    finally:
        claim.close()
        os.close(descriptor)


def _held_message(run_dir: RunDir) -> str:
    try:
        holder = json.loads(run_dir.supervisor_lock.read_text(encoding="utf-8"))
        who = f"process {holder['pid']} on {holder['host']}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["time"]))
        end = f"`kill {holder['pid']}` there saves a checkpoint and ends it."
    except (OSError, ValueError, KeyError, TypeError):
        who, since, end = "another process", "a moment ago", "End it first."
    return (
        f"{run_dir.root}: this run is already running, supervised by {who} since {since}. "
        f"`python -m llmx watch {run_dir.root}` shows it; {end}"
    )


class Journal:
    """``supervisor.json`` and ``attempts.jsonl`` of one run. Nothing here fails the run: on a full
    disk the lines of attempts are kept and written later."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.attempts = read_attempts(run_dir)
        """All lines of ``attempts.jsonl``, also of earlier supervisors."""
        self._unwritten: list[dict[str, Any]] = []
        """Lines that could not be written yet (full disk)."""
        self._now: dict[str, Any] = {"attempt": len(self.attempts)}
        self._written_at = 0.0

    @property
    def restarts(self) -> int:
        """The number of automatic restarts."""
        return sum(line.get("decision") == "restart" for line in self.attempts)

    def state(
        self,
        state: str,
        *,
        attempt: int | None = None,
        why: str = "",
        until: float | None = None,
    ) -> None:
        """Record what the supervisor does from now on. ``attempt``: None leaves it unchanged;
        ``until``: seconds since the epoch."""
        self._now = {
            "state": state,
            "attempt": self._now["attempt"] if attempt is None else attempt,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "until": until,
            "why": why,
        }
        self._write()

    def heartbeat(self, why: str | None = None) -> None:
        """Refresh the time in ``supervisor.json``, and ``why`` unless it is None, every few
        seconds; call it often."""
        if "state" in self._now and time.monotonic() - self._written_at > REFRESH_S:
            self._now["time"] = time.time()
            self._now["why"] = self._now["why"] if why is None else why
            self._write()

    def add_attempt(self, line: dict[str, Any]) -> None:
        """Append the line of an attempt that is over, now or as soon as the disk has space."""
        self.attempts.append(line)
        self._unwritten.append(line)
        self._append()

    def _append(self) -> None:
        with contextlib.suppress(OSError):
            while self._unwritten:
                append_line(self.run_dir.attempts, self._unwritten[0])
                del self._unwritten[0]

    def _write(self) -> None:
        self._written_at = time.monotonic()
        with contextlib.suppress(OSError):
            write_json(self.run_dir.supervisor, self._now)
        self._append()


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line, durably; OSError leaves the file as it was."""
    line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
    with path.open("ab", buffering=0) as stream:
        size = stream.tell()
        if size and not path.read_bytes().endswith(b"\n"):
            line = b"\n" + line  # the last one is incomplete: a crash
        try:
            if stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(stream.fileno())
        except OSError:
            os.ftruncate(stream.fileno(), size)
            raise


def read_attempts(run_dir: RunDir) -> list[dict[str, Any]]:
    """The lines of ``attempts.jsonl``; an incomplete one is left out."""
    return read_records(run_dir.attempts)


def read_resume(run_dir: RunDir) -> tuple[int | None, list[int]]:
    """``resume.json``: the step to resume from (None: the newest checkpoint), and steps to skip."""
    try:
        values = read_json(run_dir.resume)
        step = values.get("step")
        return (None if step is None else int(step)), [int(s) for s in values.get("skip_steps", [])]
    except (OSError, ValueError, TypeError, AttributeError):
        return None, []


def read_rollbacks(run_dir: RunDir) -> list[int]:
    """The rollbacks of a run: every step that the user went back to, the first one first. Later
    checkpoints of an abandoned branch are never used again, on whichever disk they are."""
    try:
        return [int(step) for step in read_json(run_dir.resume).get("went_back", [])]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def write_resume(
    run_dir: RunDir,
    *,
    step: int | None,
    skip_steps: list[int],
    attempt: int,
    rollbacks: list[int] | None = None,
) -> None:
    """Set where the next attempt begins. ``rollbacks``: None leaves them unchanged."""
    rollbacks = read_rollbacks(run_dir) if rollbacks is None else rollbacks
    values = {"step": step, "skip_steps": sorted(set(skip_steps)), "attempt": attempt}
    write_json(run_dir.resume, {**values, **({"went_back": rollbacks} if rollbacks else {})})
