"""What an evaluation measures and is no number, from ``tables.json``; and its pictures.

``python -m llmx report RUN_DIR`` shows a table in ``report.html`` and draws it beside
(``confusion_matrix.png``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.observe.report.figure import drawable, installed_fonts
from llmx.observe.report.run_data import RunData
from llmx.run.rundir import replacing

WRITTEN_UP_TO = 20
"""Columns up to which a picture has the numbers in its cells."""
STRONGEST = 0.85
"""Opacity of a cell that holds all of its row."""


@dataclass(frozen=True)
class Numbers:
    """A table of numbers with names for rows and columns."""

    title: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]

    @property
    def name(self) -> str:
        """The title without what it says of rows and columns."""
        return self.title.partition(":")[0]

    @property
    def file_name(self) -> str:
        """Of its picture: ``confusion_matrix.png``."""
        words = re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")
        return f"{words or 'table'}.png"


def tables(data: RunData) -> list[Numbers]:
    """The tables of a run; one that cannot be read is left out, with a warning."""
    found = []
    for entry in data.tables.get("tables") or []:
        try:
            values = [[float(value) for value in row] for row in entry["values"]]
            table = Numbers(
                str(entry["title"]), list(map(str, entry["rows"])),
                list(map(str, entry["columns"])), values,
            )  # fmt: skip
            if [len(row) for row in values] != [len(table.columns)] * len(table.rows):
                raise ValueError("its rows have other lengths than its columns")
        except (KeyError, TypeError, ValueError) as error:
            warning = f"tables.json: a table cannot be read and is left out: {error}"
            if warning not in data.warnings:
                data.warnings.append(warning)
            continue
        found.append(table)
    return found


def shares(row: Sequence[float]) -> list[float]:
    """How strongly each cell is shaded: by its part of the row."""
    total = sum(abs(value) for value in row)
    return [STRONGEST * abs(value) / total if total else 0.0 for value in row]


def draw_table(table: Numbers, path: Path) -> None:
    """Write the picture of a table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fonts = installed_fonts()
    size = min(3.0 + 0.5 * len(table.columns), 14.0)
    figure, axes = pyplot.subplots(figsize=(size + 1, size), dpi=120, layout="constrained")
    try:
        axes.imshow([shares(row) for row in table.values], cmap="Blues", vmin=0, vmax=1)
        for number, names in ((0, table.rows), (1, table.columns)):
            axis = axes.yaxis if number == 0 else axes.xaxis
            shown = [drawable(name[:20], fonts) for name in names]
            axis.set_ticks(
                range(len(names)), shown, fontfamily=fonts, rotation=0 if number == 0 else 45,
                parse_math=False,
            )  # fmt: skip
        if len(table.columns) <= WRITTEN_UP_TO:
            for y, row in enumerate(table.values):
                for x, (value, part) in enumerate(zip(row, shares(row), strict=True)):
                    colour = "white" if part > STRONGEST / 2 else "black"
                    axes.text(x, y, f"{value:,g}", ha="center", va="center", color=colour)
        actual, _, predicted = table.title.rpartition(":")[2].partition(" by ")
        axes.set_ylabel(actual.strip())
        axes.set_xlabel(predicted.strip())
        title = drawable(table.name, fonts)
        axes.set_title(title, fontfamily=fonts, loc="left", parse_math=False)
        with replacing(path) as stream:
            figure.savefig(stream, format="png")
    finally:
        pyplot.close(figure)
