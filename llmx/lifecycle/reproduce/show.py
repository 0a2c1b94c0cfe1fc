"""What the user sees: the table of differences before, the result after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from llmx.observe.report.screen import open_console
from llmx.run.metrics.equality import Outcome
from llmx.run.provenance.differences import BREAKS, HARMLESS, MAY, MEANING, SEVERITIES, Difference

STYLES = {BREAKS: "bold red", MAY: "yellow", HARMLESS: "dim"}


def print_differences(
    found: Sequence[Difference], missing: Sequence[str], *, stream: TextIO
) -> None:
    """By severity: what, then, now, what to do. One line where nothing differs."""
    from rich.table import Table
    from rich.text import Text

    console = open_console(stream)
    if not found:
        console.print(
            "  nothing differs from the recorded code, packages, devices, inputs and config"
        )
    for severity in SEVERITIES:
        rows = [difference for difference in found if difference.severity == severity]
        if not rows:
            continue
        console.print(Text(f"\n {MEANING[severity]}", style=STYLES[severity]))
        table = Table(box=None, pad_edge=True, header_style="dim", expand=False)
        advised = any(row.advice for row in rows)
        for name in ("what", "then", "now", *(["what to do"] if advised else [])):
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(row.what, row.then, row.now, *([row.advice] if advised else []))
        console.print(table)
    if missing:
        console.print(f"\n not recorded then, so not compared: {', '.join(missing)}")
    console.print()


def print_outcome(
    outcome: Outcome,
    other_inputs: Sequence[str],
    found: Sequence[Difference] = (),
    *,
    stream: TextIO,
    where: str,
) -> None:
    """The result, beside it what speaks against it, and where it is written.

    ``found``: what differed before the start; the table of it is far up by now.
    """
    from rich.text import Text

    console = open_console(stream)
    breaking = [difference for difference in found if difference.severity == BREAKS]
    sure = outcome.is_proven and not other_inputs and not breaking
    style = "bold green" if sure else "bold yellow"
    mark = "✓" if sure else "=" if outcome.identical else "≠" if outcome.lines else "?"
    console.print(Text(f"\n{mark} reproduction: {outcome.summary()}", style=style))
    if other_inputs:
        console.print(
            "  The ranks read other inputs than those of the first run: "
            f"{', '.join(other_inputs)} (by fingerprints over every byte).",
            style="bold red",
        )
    if breaking:
        console.print(
            "  These differences from the first run break bitwise equality:", style="bold red"
        )
        for row in breaking:
            console.print(Text(f"    {row.what}: {row.then} then, {row.now} now", style="red"))
        if outcome.identical:
            console.print(
                "  The values are equal nevertheless: these had no effect on what was compared.",
                style="red",
            )
    console.print(Text(f"  written to {where}"), soft_wrap=True)
