"""The status of a rank, and the signals that it answers.

``ranks/rank-NNN.json`` is kept fresh by a heartbeat thread. At a signal a rank saves a checkpoint
and exits, or exits at once where it cannot save. Imported before torch, so this module uses the
standard library only.

Shown by ``cat RUN_DIR/ranks/rank-000.json`` while a run is on; tried by ``python -m pytest
tests/unit/test_train_worker.py``.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from llmx.checkpoint.manifest import CheckpointError
from llmx.errors import ConfigError, DataError, storage_fault
from llmx.redact import redact
from llmx.run.rundir import RunDir, replacing

HEARTBEAT_S = 5.0


class RankStatus:
    """The status file of one rank. Thread-safe; every write replaces the file atomically."""

    def __init__(self, run_dir: RunDir, *, rank: int) -> None:
        self._path = run_dir.rank_status(rank)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._values: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "state": "starting",
            "step": 0,
            "saved_step": None,
            "time": time.time(),
            "error": None,
        }
        self._thread: threading.Thread | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def state(self) -> str:
        return str(self._values["state"])

    def enter(self, state: str) -> None:
        """Change the state, at once on disk. A final state is never left."""
        with self._lock:
            if self._final():
                return
            self._values["state"] = state
            # On a full disk the heartbeat tries again; but to have finished must be on disk.
            with contextlib.suppress(*(() if state == "finished" else (OSError,))):
                self._write()

    def at_step(self, step: int) -> None:
        """Record the step; the heartbeat writes it."""
        self._values["step"] = step

    def saved(self, step: int) -> None:
        """Record the newest committed checkpoint; the heartbeat writes it."""
        self._values["saved_step"] = step

    def fail(self, error: BaseException) -> None:
        """Enter ``failed`` with the error as the contract wants it."""
        with self._lock:
            if self._final():
                return
            self._values["state"] = "failed"
            self._values["error"] = describe(error, self._path.parent.parent)
            with contextlib.suppress(OSError):  # the rank's log has it, too
                self._write()

    def start_heartbeat(self) -> None:
        """Refresh the file about every 5 s from a daemon thread."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop_heartbeat(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=HEARTBEAT_S)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            # A full disk must not kill the heartbeat: the loop will fail on it and report it.
            with self._lock, contextlib.suppress(OSError):
                self._write()

    def _final(self) -> bool:
        return self._values["state"] in ("finished", "failed", "interrupted")

    def _write(self) -> None:
        self._values["time"] = time.time()
        # Not write_json, which would make a run directory again that was removed.
        with replacing(self._path) as stream:
            stream.write(json.dumps(self._values, indent=2).encode())


def describe(error: BaseException, run_dir: Path) -> dict[str, Any]:
    """The ``error`` entry of a status file."""
    return {
        "type": type(error).__name__,
        "message": redact(str(error)),
        "traceback": redact("".join(traceback.format_exception(error))),
        "category": category(error, run_dir),
        # Where the error is one of a certain step, as of divergence.
        "step": getattr(error, "step", None),
        "time": time.time(),
    }


def category(error: BaseException, run_dir: Path) -> str:
    """``nan``, ``disk_full``, ``data`` or ``config`` of an error whose type says it, else empty:
    the supervisor finds the outcome of all others (``llmx.failures``)."""
    if isinstance(error, FloatingPointError):
        return "nan"
    fault = storage_fault(error)
    # A cache on a read-only disk was never writable; the run directory was.
    place = Path(str((fault and fault.filename) or run_dir))
    if fault and (fault.errno != errno.EROFS or place.is_relative_to(run_dir)):
        return "disk_full"
    # Of a damaged checkpoint a restart would fail in the same way.
    if isinstance(error, DataError | CheckpointError):
        return "data"
    return "config" if isinstance(error, ConfigError) else ""


INTERRUPTED = 128 + signal.SIGTERM
"""Exit code of a rank that exited on a signal."""

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1)
"""Request a checkpoint before the exit, where one can be saved."""
STACKS = signal.SIGUSR2
UNSAFE_STACKS = signal.SIGQUIT
"""Signal to a rank that does not answer ``STACKS`` and is about to be ended: some C code holds the
interpreter's lock. faulthandler then reads frames that are changing, which may kill the rank."""
ANSWER_S = 0.5
"""So long the main thread has to write the stacks itself."""
PIPE_BYTES = 4096
SAME_REQUEST_S = 2.0
"""Where all processes of a host or job receive SIGTERM, a rank gets it twice: directly, and from
its launcher, which forwards its own. Within this time they are one request."""


class ShutdownRequest:
    """Whether the shutdown was requested, and whether the loop can save a checkpoint first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enabled = False
        self.requested = ""
        """The signal of the first request; empty where there was none."""

    def enable(self, can_save: bool) -> None:
        """Let the loop handle requests: it checks at every step, saves and exits."""
        with self._lock:
            self._enabled = can_save

    def disable(self) -> str:
        """Let a request end the rank at once. Returns the signal of an earlier request,
        else an empty string."""
        with self._lock:
            self._enabled = False
            return self.requested

    def request(self, name: str) -> bool:
        """Record a request; False where the loop does not handle requests."""
        with self._lock:
            if self._enabled:
                self.requested = self.requested or name
            return self._enabled


class TermSignals:
    """Distinguishes a second request from the first one received twice."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_second(self, now_s: float) -> bool:
        """Whether a SIGTERM received now (monotonic clock) is a second request."""
        if self._first_s is None:
            self._first_s = now_s
        return now_s - self._first_s > SAME_REQUEST_S


def exit_interrupted(status: RankStatus) -> NoReturn:
    """Exit now with the status ``interrupted``, whatever the threads are doing."""
    try:
        status.enter("interrupted")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Also on a full disk. Not sys.exit: clean-up would wait for collectives.
        os._exit(INTERRUPTED)


def write_stacks(main_frame: FrameType | None = None) -> None:
    """Write the stacks of all threads to the rank's log, in faulthandler's format, the main thread
    last. ``main_frame``: where the main thread was, if it is the one that calls this."""
    main = threading.main_thread().ident
    # Before Python 3.12 a collection within this call waits for a lock that the call itself holds.
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    lines = []
    for ident in sorted(frames, key=lambda ident: ident == main):
        lines.append(f"Thread 0x{ident:016x} (most recent call first):")
        frame: FrameType | None = (main_frame if ident == main else None) or frames[ident]
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
        lines.append("")
    # Not sys.stderr: the main thread may hold its lock.
    os.write(2, "\n".join([*lines, ""]).encode(errors="replace"))


def handle_signals(status: RankStatus) -> ShutdownRequest:
    """SIGUSR1 and the first SIGTERM are requests; SIGINT and a later SIGTERM end this rank at once.
    SIGUSR2 writes the stacks of all threads to stderr, which is the rank's log.

    A handler in Python waits for the main thread, which may be blocked in a collective. The C
    handler writes to the wake-up descriptor itself, and a thread reads it. That thread writes the
    stacks only if the main thread has not done so after ``ANSWER_S``.
    """
    stop = ShutdownRequest()
    answer_read, answer_write = os.pipe()  # no Event: a signal within its lock would wait for it
    taken_over = False

    def answer(_: int, frame: FrameType | None) -> None:
        """In the main thread: its frames are read by itself. Python 3.11 gives the lock away while
        it clears a frame that has a handle of a collective, and to read that one kills the rank."""
        nonlocal taken_over
        if not taken_over:
            write_stacks(frame)
            os.write(answer_write, b"x")
        taken_over = False

    faulthandler.register(UNSAFE_STACKS, file=sys.stderr, all_threads=True, chain=False)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in (*GRACEFUL, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(STACKS, answer)
    signal.siginterrupt(STACKS, False)  # system calls of libraries go on
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait() -> None:
        nonlocal taken_over
        terms = TermSignals()
        while data := os.read(read_end, 1):
            number = data[0]
            if number == STACKS:
                if select.select([answer_read], [], [], ANSWER_S)[0]:
                    os.read(answer_read, PIPE_BYTES)
                else:  # the main thread is in C, and leaves no frame
                    write_stacks()
                    taken_over = True
                continue
            at_once = number == signal.SIGINT or (
                number == signal.SIGTERM and terms.is_second(time.monotonic())
            )
            if at_once or (number in GRACEFUL and not stop.request(signal.Signals(number).name)):
                exit_interrupted(status)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return stop
