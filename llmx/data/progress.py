"""Progress of a preparation: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from llmx.text import clock

EVERY_S = 10.0
"""Seconds between two lines of a log."""
MIB = 1 << 20


class PreparationProgress:
    """Counts what is done and shows it on ``stream`` (default: stderr).

    ``total_bytes``: bytes of all sources on disk, of which ``read`` tells how many were read,
    for the time that is left; 0 where it is not known.
    """

    def __init__(
        self,
        title: str,
        *,
        total_bytes: int = 0,
        read: Callable[[], int] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.title = title
        self.bytes = 0
        """Bytes of text that were encoded."""
        self.tokens = 0
        self._total = total_bytes
        self._read = read or (lambda: self.bytes)
        self._stream = stream or sys.stderr
        self._started = self._said = time.monotonic()
        self._from = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> PreparationProgress:
        self._started = self._said = time.monotonic()
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

    def begin_here(self) -> None:
        """Estimate the remaining time from here on: earlier rows were prepared before."""
        self._from = self._read()
        self._started = time.monotonic()

    def add(self, *, size: int, tokens: int = 0) -> None:
        """``size`` bytes of text became ``tokens`` tokens."""
        self.bytes += size
        self.tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._read(), rates=self.rates(now))
        elif now - self._said >= EVERY_S:
            self._said = now
            print(f"{self.title}: {self.rates(now)}", file=self._stream, flush=True)

    def fraction(self) -> float:
        """The fraction of the sources that was read, 0 to 1; 0 where their size is unknown."""
        return min(1.0, self._read() / self._total) if self._total else 0.0

    def rates(self, now: float | None = None) -> str:
        """``34%, 812.0 MiB, 19.3 MiB/s, 4.6 M tokens/s, 2:31 left``"""
        seconds = max(1e-3, (now or time.monotonic()) - self._started)
        done = self.fraction()
        parts = [f"{done:.0%}"] if done else []
        parts += [f"{self.bytes / MIB:,.1f} MiB", f"{self.bytes / seconds / MIB:,.1f} MiB/s"]
        if self.tokens:
            parts.append(f"{self.tokens / seconds / 1e6:,.2f} M tokens/s")
        fresh = self._read() - self._from
        if done and fresh > 0:
            parts.append(f"{clock(max(0, self._total - self._read()) * seconds / fresh)} left")
        return ", ".join(parts)
