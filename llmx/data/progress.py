"""How far a preparation is: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

EVERY_S = 10.0
"""Seconds between two lines of a log."""
MIB = 1 << 20


class Progress:
    """Counts what is done and shows it on ``stream`` (default: stderr).

    ``total_bytes``: size of the sources where it tells how much text there is, for the time
    that is left; 0 where it does not (compressed files).
    """

    def __init__(self, title: str, *, total_bytes: int, stream: TextIO | None = None) -> None:
        self.title = title
        self.bytes = 0
        self.tokens = 0
        self._total = total_bytes
        self._stream = stream or sys.stderr
        self._started = self._said = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            from rich import progress as rich_progress
            from rich.console import Console

            columns = [
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(),
                rich_progress.TextColumn("{task.fields[rates]}"),
            ]
            console = Console(file=self._stream)
            self._bar = rich_progress.Progress(*columns, console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self._total or None, rates="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, *, size: int, tokens: int) -> None:
        """``size`` bytes of text became ``tokens`` tokens."""
        self.bytes += size
        self.tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.bytes, rates=self.rates(now))
        elif now - self._said >= EVERY_S:
            self._said = now
            print(f"{self.title}: {self.rates(now)}", file=self._stream, flush=True)

    def rates(self, now: float | None = None) -> str:
        """``812.0 MiB, 19.3 MiB/s, 4.6 M tokens/s, 2:31 left``"""
        seconds = max(1e-3, (now or time.monotonic()) - self._started)
        speed = self.bytes / seconds
        parts = [
            f"{self.bytes / MIB:,.1f} MiB",
            f"{speed / MIB:,.1f} MiB/s",
            f"{self.tokens / seconds / 1e6:,.2f} M tokens/s",
        ]
        if self._total and speed:
            left = max(0, self._total - self.bytes) / speed
            parts.append(f"{clock(left)} left")
        return ", ".join(parts)


def clock(seconds: float) -> str:
    """``0:07``, ``2:31``, ``4:05:59``"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
