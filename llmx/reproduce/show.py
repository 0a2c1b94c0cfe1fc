"""What the user sees: the table of differences before, the verdict after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from llmx.provenance.differences import BREAKS, HARMLESS, MAY, MEANING, SEVERITIES, Difference
from llmx.report.screen import open_console
from llmx.reproduce.outcome import Outcome

STYLES = {BREAKS: "bold red", MAY: "yellow", HARMLESS: "dim"}


def print_differences(
    found: Sequence[Difference], missing: Sequence[str], *, stream: TextIO
) -> None:
    """By severity: what, then, now, what to do. One line where nothing differs."""
    from rich.table import Table
    from rich.text import Text

    console = open_console(stream)
    if not found:
        console.print("  nothing differs from the recorded code, packages, devices and inputs")
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
    outcome: Outcome, other_inputs: Sequence[str], *, stream: TextIO, where: str
) -> None:
    """The verdict, what the ranks read otherwise than then, and where it is written."""
    from rich.text import Text

    console = open_console(stream)
    style = "bold green" if outcome.identical else "bold yellow"
    mark = "✓" if outcome.identical else "≠"
    console.print(Text(f"\n{mark} reproduction: {outcome.verdict()}", style=style))
    if other_inputs:
        console.print(
            f"  the ranks did not read the same {', '.join(other_inputs)} as then (exact "
            "fingerprints)",
            style="bold red",
        )
    console.print(Text(f"  written to {where}"), soft_wrap=True)
