"""The console that plan and report are printed on: plain off a terminal, never a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO, cast

from llmx.text import printable

if TYPE_CHECKING:
    from rich.console import (
        Console,
        ConsoleOptions,
        ConsoleRenderable,
        RenderableType,
        RenderHook,
        RenderResult,
    )
    from rich.measure import Measurement
    from rich.table import Table

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
    console = Console(
        file=stream,
        width=max(40, width) if width else None,
        highlight=False,
        # Prompts, paths and error messages are text, whatever brackets they hold.
        markup=False,
        emoji=False,
    )
    console.push_render_hook(cast("RenderHook", _AllHarmless()))
    return console


def columns_table(*, width: int | None = None) -> Table:
    """A table without columns yet: a line below its head, and none between cells."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", width=width)


def pairs_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Names in bold, each with its text beside it."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(f" {name}", Text(printable(text)))
    return table


class Harmless:
    """Something to print, with control characters as escapes: names of metrics, and fields of a
    run's files, must not steer the terminal."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for text, style, control in console.render(self._renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement.get(console, options, self._renderable)


class _AllHarmless:
    """A ``RenderHook`` of rich that makes everything harmless that is printed."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Harmless(renderable) for renderable in renderables]
