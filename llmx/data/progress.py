"""Progress of a preparation: one line that changes on a terminal, a line now and then in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from llmx.data.source.records import Meter
from llmx.text import clock, printable

EVERY_S = 10.0
"""Seconds between two lines of a log."""
REDRAW_S = 0.1
"""Seconds between two states of the line on a terminal."""
MIB = 1 << 20


class PreparationProgress:
    """Counts what is done and shows it on ``stream`` (default: stderr).

    ``total_bytes``: bytes of all sources on disk, of which ``meter`` counts how many were read,
    for the time that is left; 0 where it is not known.
    """

    def __init__(
        self,
        title: str,
        *,
        total_bytes: int = 0,
        meter: Meter | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.title = printable(title, keep="")
        self.bytes = 0
        """Bytes of text that were encoded."""
        self.tokens = 0
        self._total = total_bytes
        self._meter: Meter | PreparationProgress = self if meter is None else meter
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> PreparationProgress:
        self._started = self._shown = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def add(self, *, size: int, tokens: int = 0) -> None:
        """``size`` bytes of text became ``tokens`` tokens."""
        self.bytes += size
        self.tokens += tokens
        now = time.monotonic()
        if now - self._shown < (REDRAW_S if self._on_terminal else EVERY_S):
            return
        self._shown = now
        line = f"{self.title}: {self.rates(now)}"
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)

    def fraction(self) -> float:
        """The fraction of the sources that was read, 0 to 1; 0 where their size is unknown."""
        return min(1.0, self._meter.bytes / self._total) if self._total else 0.0

    def rates(self, now: float | None = None) -> str:
        """``34%, 812.0 MiB, 19.3 MiB/s, 4.6 M tokens/s, 2:31 left``"""
        seconds = max(1e-3, (now or time.monotonic()) - self._started)
        done = self.fraction()
        parts = [f"{done:.0%}"] if done else []
        parts += [f"{self.bytes / MIB:,.1f} MiB", f"{self.bytes / seconds / MIB:,.1f} MiB/s"]
        if self.tokens:
            parts.append(f"{self.tokens / seconds / 1e6:,.2f} M tokens/s")
        if done:
            left_s = max(0, self._total - self._meter.bytes) * seconds / self._meter.bytes
            parts.append(f"{clock(left_s)} left")
        return ", ".join(parts)
