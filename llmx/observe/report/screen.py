"""The console that plan and report are printed on: plain off a terminal, never a crash."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 100
"""Columns where there is no terminal to ask (a log file, a pipe)."""


def open_console(stream: TextIO, *, width: int | None = None) -> Console:
    """A rich console on ``stream``: colours on a terminal only, at least 40 columns."""
    from rich.console import Console

    # A check mark on a terminal that knows ASCII only must not end the run.
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        with contextlib.suppress(OSError, ValueError):
            reconfigure(errors="replace")
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = PLAIN_WIDTH
    return Console(
        file=stream,
        width=max(40, width) if width else None,
        highlight=False,
        # Prompts, paths and error messages are text, whatever brackets they hold.
        markup=False,
        emoji=False,
    )
