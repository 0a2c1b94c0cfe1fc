"""Signals to a rank: it saves a checkpoint and exits, or exits at once where it cannot save.

Imported before torch, so it uses the standard library only. Tried by
``python -m pytest tests/unit/test_train_worker.py``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from llmx.train.status import RankStatus

INTERRUPTED = 128 + signal.SIGTERM
"""Exit code of a rank that exited on a signal."""

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1)
"""Request a checkpoint before the exit, where one can be saved."""
STACKS = signal.SIGUSR2
UNSAFE_STACKS = signal.SIGQUIT
"""Of a rank that does not answer ``STACKS`` and is about to be ended: some C code holds the
interpreter's lock. faulthandler then reads frames that are changing, which may kill the rank."""
SAME_REQUEST_S = 2.0
"""Where all processes of a host or job receive SIGTERM, a rank gets it twice: directly, and from
its launcher, which forwards its own. Within this time they are one request."""


class ShutdownRequest:
    """Whether the shutdown was requested, and whether the loop can save a checkpoint first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enabled = False
        self._requested = ""

    def enable(self, can_save: bool) -> None:
        """From now on the loop checks for a request at every step, saves and exits."""
        with self._lock:
            self._enabled = can_save

    def disable(self) -> str:
        """From now on a request ends the rank at once. Returns the signal of an earlier request,
        else an empty string."""
        with self._lock:
            self._enabled = False
            return self._requested

    def request(self, name: str) -> bool:
        """Record a request; False where the loop does not handle requests."""
        with self._lock:
            if self._enabled:
                self._requested = self._requested or name
            return self._enabled

    @property
    def requested(self) -> str:
        """The signal of the first request; empty where there was none."""
        return self._requested


class TermSignals:
    """Distinguishes a second request from the first one received twice."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_second(self, now_s: float) -> bool:
        """Of a SIGTERM received now (monotonic clock)."""
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


def write_stacks() -> None:
    """Write the stacks of all threads to the rank's log, in faulthandler's format, the main thread
    last. The interpreter's lock is held, so no thread moves meanwhile."""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    lines = []
    for ident in sorted(frames, key=lambda ident: ident == main):
        lines.append(f"Thread 0x{ident:016x} (most recent call first):")
        frame: FrameType | None = frames[ident]
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
    handler writes to the wake-up descriptor itself, and a thread reads it.
    """
    stop = ShutdownRequest()
    faulthandler.register(UNSAFE_STACKS, file=sys.stderr, all_threads=True, chain=False)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in (*GRACEFUL, signal.SIGINT, STACKS):
        signal.signal(number, lambda *_: None)
    signal.siginterrupt(STACKS, False)  # system calls of libraries go on
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait() -> None:
        terms = TermSignals()
        while data := os.read(read_end, 1):
            number = data[0]
            if number == STACKS:
                write_stacks()
                continue
            at_once = number == signal.SIGINT or (
                number == signal.SIGTERM and terms.is_second(time.monotonic())
            )
            if at_once or (number in GRACEFUL and not stop.request(signal.Signals(number).name)):
                exit_interrupted(status)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return stop
