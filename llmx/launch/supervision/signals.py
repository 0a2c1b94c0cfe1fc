"""Requests to end a run: Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP to the supervisor.

The first request lets the ranks save a checkpoint, a second one ends them at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "hang-up"}


class Interrupted(Exception):
    """The shutdown was requested before anything was started."""


class ShutdownRequest:
    """Whether the shutdown was requested: how often, when and by which signal."""

    def __init__(self) -> None:
        self.count = 0
        self.source = ""
        """The first signal, as the user knows it: ``Ctrl-C``, ``SIGTERM``."""
        self.time: float | None = None
        """Seconds since the epoch, of the first request."""
        self.event = threading.Event()
        """Set by each request, so that waits end."""
        self.raises = False
        """While nothing is running yet: a request raises ``Interrupted`` in the main thread."""

    @contextlib.contextmanager
    def handle_signals(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Handle the signals in this block. Ctrl-Z is refused."""

        def refuse(number: int, frame: FrameType | None) -> None:
            notify("Ctrl-Z is refused: a suspended supervisor would end the run; use tmux or nohup")

        saved: dict[signal.Signals, Any] = {}
        try:
            for number in SHUTDOWN_SIGNALS:
                # nohup and background shells ignore a signal: then it stays ignored.
                if signal.getsignal(number) != signal.SIG_IGN:
                    saved[number] = signal.signal(number, self._on_signal)
            saved[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, refuse)
        except ValueError:
            saved = {}  # not the main thread, whose owner handles signals
        try:
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)

    def request(self, source: str) -> None:
        """Record a request for the shutdown; ``source`` is shown for the first one."""
        self.count += 1
        self.source = self.source or source
        self.time = self.time or time.time()
        self.event.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        self.request(_NAMES.get(name, name.name))
        if self.raises:
            self.raises = False
            raise Interrupted
