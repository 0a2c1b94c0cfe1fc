"""How a rank is asked to end: after saving where it can be saved, at once where it cannot.

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
from typing import NoReturn

from llmx.train.status import RankStatus

INTERRUPTED = 128 + signal.SIGTERM
"""Exit code of a rank that left because it was asked to."""

POLITE = (signal.SIGTERM, signal.SIGUSR1)
"""Ask for a checkpoint first, where one can be made."""
STACKS = signal.SIGUSR2
SAME_REQUEST_S = 2.0
"""Where a whole host or job is told to end, a rank gets SIGTERM twice: with all the others, and
from its launcher, which passes its own on. Within so long it is one request."""


class StopRequest:
    """Whether this rank was asked to end, and whether the loop can still save before it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed = False
        self._asked = ""

    def arm(self, can_save: bool) -> None:
        """From here on the loop looks at every step whether it was asked, saves and leaves."""
        with self._lock:
            self._armed = can_save

    def disarm(self) -> str:
        """From here on a request ends the rank at once. Returns the signal of one that came in
        before, else an empty string."""
        with self._lock:
            self._armed = False
            return self._asked

    def ask(self, name: str) -> bool:
        """Pass a request on; False where nobody would see to it."""
        with self._lock:
            if self._armed:
                self._asked = self._asked or name
            return self._armed

    @property
    def asked(self) -> str:
        """The signal that asked first; empty when there was none."""
        return self._asked


class Terms:
    """Tells a second request from the first one that comes twice."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_second(self, now_s: float) -> bool:
        """Of a SIGTERM that comes now (monotonic clock)."""
        if self._first_s is None:
            self._first_s = now_s
        return now_s - self._first_s > SAME_REQUEST_S


def leave(status: RankStatus) -> NoReturn:
    """End this process now, as ``interrupted``, from wherever its threads are."""
    try:
        status.enter("interrupted")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Also on a full disk. Not sys.exit: clean-up would wait for collectives.
        os._exit(INTERRUPTED)


def end_on_signal(status: RankStatus) -> StopRequest:
    """SIGUSR1 and the first SIGTERM ask; SIGINT and a later SIGTERM end this rank at once.
    SIGUSR2 writes the stacks of all threads to stderr, which is the rank's log.

    A handler in Python waits for the main thread, which may sit in a collective that never
    ends. The wake-up descriptor is written by the C handler itself, and a thread reads it.
    """
    stop = StopRequest()
    faulthandler.register(STACKS, file=sys.stderr, all_threads=True, chain=False)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in (*POLITE, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait() -> None:
        terms = Terms()
        while data := os.read(read_end, 1):
            number = data[0]
            at_once = number == signal.SIGINT or (
                number == signal.SIGTERM and terms.is_second(time.monotonic())
            )
            if at_once or (number in POLITE and not stop.ask(signal.Signals(number).name)):
                leave(status)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return stop
