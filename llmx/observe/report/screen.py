"""The console that plan and report are printed on, and the blocks of ``observe.page`` on it.

Plain off a terminal, never a crash; control characters in names and fields of a run's files are
shown as escapes, so that they do not steer the terminal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from llmx.observe.page import Block
from llmx.text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PLAIN_WIDTH = 100
"""Columns where there is no terminal to ask (a log file, a pipe)."""
STYLES = {
    "✓": "green", "✗": "red", "not yet": "dim", "fits": "green", "does not fit": "bold red",
    "refused": "bold red",
}  # fmt: skip
"""Style of a cell of such a text, or of a mark that a cell begins with."""


def open_console(stream: TextIO, *, width: int | None = None) -> Console:
    """A rich console on ``stream``: colours on a terminal only, at least 40 columns."""
    from rich.console import Console
    from rich.segment import Segment

    class Harmless(Console):
        """Prints control characters as escapes."""

        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for text, style, control in super().render(*args, **options):
                yield Segment(text if control else printable(text), style, control)

    # A check mark on a terminal that knows ASCII only must not end the run.
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        with contextlib.suppress(OSError, ValueError):
            reconfigure(errors="replace")
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = PLAIN_WIDTH
    return Harmless(
        file=stream,
        width=max(40, width) if width else None,
        highlight=False,
        # Prompts, paths and error messages are text, whatever brackets they hold.
        markup=False,
        emoji=False,
    )


def is_plain(console: Console) -> bool:
    """Whether only ASCII can be drawn on the console."""
    return not (console.encoding or "").lower().startswith("utf")


def print_blocks(
    console: Console, blocks: Iterable[Block | None], *, is_blank: bool = True
) -> None:
    """Print blocks below each other. Texts, commands and paths are never wrapped by us: they are
    there to be copied.

    ``is_blank``: nothing stands above, or an empty line.
    """
    from rich.text import Text

    for item in rendered(blocks, is_blank=is_blank):
        console.print(item, soft_wrap=isinstance(item, Text))


def rendered(blocks: Iterable[Block | None], *, is_blank: bool = True) -> Iterator[RenderableType]:
    """Blocks as rich has them, with an empty line before each but a text."""
    from rich.table import Table
    from rich.text import Text

    for block in filter(None, blocks):
        ((kind, value),) = block.items()
        has_heads = kind == "table" and bool(value["heads"])
        if kind != "text" and not has_heads and not is_blank:
            yield Text("")
        is_blank = has_heads or kind == "heading"  # a table with heads has empty lines of its own
        if has_heads:
            yield columns_table(**value)
        elif kind == "table" and value["kinds"][-1] == "code":
            widest = max(len(name) for name, _ in value["rows"])
            for name, text in value["rows"]:
                yield Text.assemble((f" {name:<{widest}}  ", "bold"), text)
        elif kind == "table":
            yield pairs_table(value["rows"])
        elif kind == "list":
            warnings = Table.grid(padding=(0, 1))
            for text in value:  # each wrapped under itself
                warnings.add_row(Text(" !", style="bold yellow"), Text(printable(text), "yellow"))
            yield warnings
        elif kind == "code":
            yield Text("\n".join(f"  {line}" for line in value.splitlines()), style="dim")
        else:
            yield Text(value, style="bold" if kind == "heading" else "")


def columns_table(
    rows: Iterable[Iterable[Any]],
    kinds: Iterable[str],
    heads: Iterable[str],
    best: int | None = None,
    styles: Sequence[str] = (),
) -> Table:
    """A table of ``observe.page.table`` with heads: a line below them, and none between cells.

    ``styles``: of each row, as rich has them."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for head, kind in zip(heads, kinds, strict=True):
        justify: Any = "right" if kind == "number" else "left"
        is_short = kind in ("number", "short")
        grid.add_column(head, justify=justify, overflow="fold", no_wrap=is_short)
    for number, row in enumerate(rows):
        if not any(row):
            grid.add_section()
            continue
        style = styles[number] if styles else ""
        grid.add_row(*map(_cell, row), style="bold" if number == best else style)
    return grid


def _cell(text: str) -> Text:
    from rich.text import Text

    cell = Text(printable(text), style=STYLES.get(text, ""))
    if text[:1] in STYLES:
        cell.stylize(STYLES[text[:1]], 0, 1)
    return cell


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
