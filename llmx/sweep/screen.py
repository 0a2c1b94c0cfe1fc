"""What a sweep shows while it runs: a live table on a terminal, else a line for each change.

The same as ``python -m llmx watch SWEEP_DIR`` shows.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.errors import LlmxError
from llmx.observe.report.screen import is_plain, open_console
from llmx.observe.report.sweep_data import SweepReader
from llmx.observe.status.sweep import look
from llmx.text import printable

if TYPE_CHECKING:
    from rich.live import Live

REFRESH_S = 1.0
SHARE = 30.0
"""Reading the trials takes at most this part of the time, so that it takes no core from them."""


class Screen:
    """Shows one batch of trials. ``close`` leaves the terminal as it was."""

    def __init__(self, directory: Path) -> None:
        self._reader = SweepReader(directory)
        self._live: Live | None = None
        self._next = 0.0

    def line(self, text: str, *, failed: bool = False) -> None:
        """A line that stays, above the table."""
        stream = sys.stderr if failed else sys.stdout
        print(printable(text), file=stream, flush=True)

    def began(self, text: str) -> None:
        """A trial runs in the background."""
        if self._live is None and sys.stdout.isatty():
            from rich.live import Live

            console = open_console(sys.stdout)
            self._live = Live("", console=console, auto_refresh=False, transient=True)
            self._live.start()
        if self._live is None:
            self.line(text)
        self.tick(now=True)

    def ended(self, text: str, *, failed: bool) -> None:
        """Print how a trial has ended, and how far the sweep is."""
        self.line(text, failed=failed)
        if self._live is None:
            with contextlib.suppress(LlmxError, OSError):
                snapshot = look(self._reader)
                if len(snapshot.sweep.trials) > 1:
                    self.line(f"  {snapshot.line()}")
        self.tick(now=True)

    def tick(self, *, now: bool = False) -> None:
        """Refresh the picture where it is due."""
        started = time.monotonic()
        if self._live is None or (started < self._next and not now):
            return
        plain = is_plain(self._live.console)
        with contextlib.suppress(LlmxError, OSError):
            self._live.update(look(self._reader).panel(plain), refresh=True)
        took = time.monotonic() - started
        self._next = started + max(REFRESH_S, SHARE * took)

    def close(self) -> None:
        """Remove the picture at the end of a batch of trials."""
        if self._live is not None:
            self._live.stop()
            self._live = None
