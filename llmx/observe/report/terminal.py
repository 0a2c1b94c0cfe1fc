"""The end of a run on the terminal: result, completions, summary, warnings, where it all lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from llmx import text as human
from llmx.observe.report import wording
from llmx.observe.report.plan_table import warnings_table
from llmx.observe.report.run_data import RunData
from llmx.observe.report.screen import columns_table, open_console, pairs_table
from llmx.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

WIDEST_TABLE = 110
"""Columns beyond which a table of sentences is harder to read, not easier."""

MARKS = {"ok": ("✓", "bold green"), "failed": ("✗", "bold red"), "open": ("…", "bold yellow")}


def print_report(data: RunData, *, stream: TextIO, width: int | None = None) -> None:
    """Print the report to ``stream``; plain text where it is not a terminal."""
    from rich.text import Text

    console = open_console(stream, width=width)
    _result(console, data)
    if data.samples.get("rows"):
        console.print(completions_table(data, width=min(console.width, WIDEST_TABLE)))
        left = len(data.samples["rows"]) - wording.SHOWN_COMPLETIONS
        if left > 0:
            console.print(f" and {left} more in {data.run.samples}\n", soft_wrap=True)
    if samples := data.rollouts[: wording.SHOWN_SAMPLES]:
        console.print(f" samples of step {samples[0]['step']:,}")
        console.print(samples_table(samples, width=min(console.width, WIDEST_TABLE)))
    rows = wording.summary_rows(data, is_brief=True)
    if rows:
        console.print(pairs_table(rows))
    warnings = [printable(text) for text in wording.warnings(data)]
    if warnings:
        console.print()
        console.print(warnings_table(tuple(warnings)))
    if rows or warnings:
        console.print()
    places = wording.locations(data)
    widest = max(len(name) for name, _ in places)
    for name, place in places:
        # Paths and commands are never wrapped: they are there to be copied.
        line = Text.assemble((f" {name:<{widest}}  ", "bold"), place)
        console.print(line, soft_wrap=True)


def _result(console: Console, data: RunData) -> None:
    from rich.text import Text

    headline = wording.headline(data)
    mark, style = MARKS[headline.state]
    console.print()
    console.print(Text(f"{mark} {printable(f'{data.name}: {headline.line}')}", style=style))
    if headline.cause or headline.fix:
        why = (("cause", headline.cause), ("fix", headline.fix))
        console.print(pairs_table([(name, text) for name, text in why if text]))
    excerpt = printable(wording.traceback_excerpt(data))
    if excerpt:
        console.print()
        console.print(Text("\n".join("  " + line for line in excerpt.splitlines()), style="dim"))
    if not data.samples.get("rows"):
        console.print()  # the table of completions begins with an empty line of its own


def completions_table(data: RunData, *, width: int) -> Table:
    """A few eval prompts: the expected completion, that before training, that after it."""
    from rich.text import Text

    table = columns_table(width=width)
    table.add_column("prompt", ratio=5, overflow="fold")
    table.add_column("expected", ratio=2, overflow="fold")
    table.add_column("before", ratio=3, overflow="fold")
    table.add_column("after", ratio=3, overflow="fold")
    # About three lines a cell.
    prompt, completion = 3 * width * 5 // 13, 3 * width * 2 // 13
    for row in wording.completions(data, limit=wording.SHOWN_COMPLETIONS):
        table.add_row(
            Text(human.one_line(row.prompt, limit=prompt)),
            Text(human.one_line(row.expected, limit=completion)),
            _marked(row.before, row.right_before, limit=completion),
            _marked(row.after, row.right_after, limit=completion),
        )
    return table


def samples_table(samples: list[dict[str, Any]], *, width: int) -> Table:
    """Samples that a task has generated, with each part of their reward."""
    from rich.text import Text

    table = columns_table(width=width)
    table.add_column("prompt", ratio=4, overflow="fold")
    table.add_column("completion", ratio=5, overflow="fold")
    table.add_column("rewards", ratio=3, overflow="fold")
    table.add_column("advantage", justify="right")
    for row in samples:
        rewards = (f"{name} {wording.number(value)}" for name, value in row["rewards"].items())
        table.add_row(
            Text(human.one_line(row["prompt"], limit=3 * width * 4 // 13)),
            Text(human.one_line(row["completion"], limit=3 * width * 5 // 13) or "(nothing)"),
            Text("\n".join(rewards)),
            Text(wording.number(row["advantage"])),
        )
    return table


def _marked(completion: str, right: bool | None, *, limit: int) -> Text:
    from rich.text import Text

    if right is None:
        return Text("not yet", style="dim")
    text = human.one_line(completion, limit=limit) or "(nothing)"
    return Text.assemble(("✓ ", "green") if right else ("✗ ", "red"), text)
