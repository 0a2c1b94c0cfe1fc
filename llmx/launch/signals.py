"""How a user, or a scheduler, asks a supervisor to end its run: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP.

The first request lets the ranks save, a second one ends them at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "hang-up"}


class Interrupted(Exception):
    """The user asked to end while nothing was running yet."""


class Asked:
    """Who asked to end the run, and how often."""

    def __init__(self) -> None:
        self.count = 0
        self.by = ""
        self.at: float | None = None
        """Seconds since the epoch, of the first time."""
        self.wake = threading.Event()
        """Set by each request: what ends a wait."""
        self.interruptible = False
        """Nothing is running: a request raises ``Interrupted`` where the main thread is."""

    @contextlib.contextmanager
    def listening(self, say: Callable[[str], None]) -> Iterator[None]:
        """Handle the signals in this block. Ctrl-Z is refused."""

        def refuse(number: int, frame: FrameType | None) -> None:
            say("Ctrl-Z is refused: a paused supervisor would end the run; use tmux or nohup")

        saved: dict[signal.Signals, Any] = {}
        try:
            for number in ENDING:
                # nohup and background shells have a signal ignored: then so do we.
                if signal.getsignal(number) != signal.SIG_IGN:
                    saved[number] = signal.signal(number, self._handle)
            saved[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, refuse)
        except ValueError:
            saved = {}  # not the main thread: whoever owns it ends us
        try:
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        self.count += 1
        self.by = self.by or _NAMES.get(name, name.name)
        self.at = self.at or time.time()
        self.wake.set()
        if self.interruptible:
            self.interruptible = False
            raise Interrupted
