"""Requests to end a run: Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP to the supervisor.

The first request lets the ranks save a checkpoint, a second one ends them at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from llmx.text import clock

SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "hang-up"}
BEFORE_LIMIT_S = 900.0
"""Slurm signals a job at most so long before its time limit (``--signal``); earlier, it is a
preemption or scancel."""


class Interrupted(Exception):
    """The shutdown was requested before anything was started."""


def sender_of(number: int, environ: Mapping[str, str], *, now: float) -> tuple[str, str]:
    """The sender of a signal, by the job that the supervisor runs in, and a text about it:
    schedulers send SIGTERM and SIGUSR1. ``now``: seconds since the epoch.

    The sender is ``user`` (the terminal, kill, ``stop``), ``time_limit``, or ``scheduler`` (a
    preemption, or scancel).
    """
    name = signal.Signals(number)
    job = environ.get("SLURM_JOB_ID")
    if name in _NAMES or not job:
        return "user", _NAMES.get(name, name.name)
    of_job = f"{name.name} of Slurm job {job}"
    end = environ.get("SLURM_JOB_END_TIME", "")  # seconds since the epoch
    if not end.isdecimal():
        return "scheduler", f"{of_job} (its time limit, a preemption or scancel)"
    left_s = int(end) - now
    if left_s > BEFORE_LIMIT_S:
        text = f"{of_job} (preempted or cancelled, {clock(left_s)} before its limit)"
        return "scheduler", text
    text = f"{name.name} before the time limit of Slurm job {job}, {clock(max(0, left_s))} left"
    return "time_limit", text


def catch(handler: Any) -> dict[signal.Signals, Any]:
    """Handle the signals that end a run; the handlers before. Only the main thread can: another one
    leaves it to the owner of that. nohup and background shells ignore a signal: it stays so."""
    is_main = threading.current_thread() is threading.main_thread()
    return {
        number: signal.signal(number, handler)
        for number in (SHUTDOWN_SIGNALS if is_main else ())
        if signal.getsignal(number) != signal.SIG_IGN
    }


STOP_POLL_S = 0.5


class ShutdownRequest:
    """Whether the shutdown was requested: how often, when and by which signal."""

    def __init__(self) -> None:
        self.count = 0
        self.source = ""
        """The first signal, as the user knows it: ``Ctrl-C``, ``SIGTERM``."""
        self.kind = ""
        """Who sent it (``sender_of``)."""
        self.signal = ""
        """The name of the first signal; empty where there was none."""
        self.time: float | None = None
        """Seconds since the epoch, of the first request."""
        self.event = threading.Event()
        """Set by each request, so that waits end."""
        self.raises = False
        """While nothing is running yet: a request raises ``Interrupted`` in the main thread."""

    @contextlib.contextmanager
    def handle_signals(
        self, notify: Callable[[str], None], *, stop_file: Path | None = None
    ) -> Iterator[None]:
        """Handle the signals in this block. Ctrl-Z is refused; a ``stop_file`` is SIGTERM."""

        def refuse(number: int, frame: FrameType | None) -> None:
            notify("Ctrl-Z is refused: a suspended supervisor ends the run; use launch.detach=true")

        saved = catch(self._on_signal)
        if threading.current_thread() is threading.main_thread():
            saved[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, refuse)
        is_over = threading.Event()
        if saved and stop_file is not None:
            stop_file.unlink(missing_ok=True)  # of an earlier supervisor
            threading.Thread(
                target=_await_stop_file, args=(stop_file, is_over), name="stop-file", daemon=True
            ).start()
        try:
            yield
        finally:
            is_over.set()
            for number, handler in saved.items():
                signal.signal(number, handler)

    def request(self, source: str, kind: str = "user") -> None:
        """Record a request for the shutdown; ``source`` is shown for the first one."""
        self.count += 1
        self.source, self.kind = self.source or source, self.kind or kind
        self.time = self.time or time.time()
        self.event.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        kind, text = sender_of(number, os.environ, now=time.time())
        self.signal = self.signal or signal.Signals(number).name
        self.request(text, kind)
        if self.raises:
            self.raises = False
            raise Interrupted


def _await_stop_file(path: Path, is_over: threading.Event) -> None:
    """Send SIGTERM to this process once ``path`` is there; a thread, since the main one may be in a
    copy that takes minutes."""
    while not is_over.wait(STOP_POLL_S):
        if path.exists():
            path.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return
