"""``loss.png``: train loss, smoothed loss, evaluation loss, learning rate over the steps; and the
loss curves of two runs in one picture (``python -m llmx compare``); and what an evaluation measures
that is no number (``tables.json``), as a picture (``confusion_matrix.png``)."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.observe.report.run_data import RunData
from llmx.run.rundir import replacing

SMOOTHED_FROM = 40
"""Points from which on a smoothed line helps."""

COLOURS = ("tab:blue", "tab:orange")
"""Of the first and the second run."""

CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Microsoft YaHei",
    "SimHei",
    "Unifont",
)
"""Fonts with Chinese, Japanese and Korean that a machine may have; matplotlib brings none."""


def draw_loss(data: RunData, path: Path) -> bool:
    """Write the picture to ``path``; False where there is nothing to draw yet."""
    train = points(data.train, "loss")
    evals = points(data.evals, "loss")
    if not train and not evals:
        return False
    with loss_axes(path) as axes:
        _draw_lr(axes, data)
        _draw_curves(axes, train, evals)
        set_floor(axes, [value for _, value in train + evals])
        axes.legend(loc="upper right", framealpha=0.8, edgecolor="none")
        fonts = installed_fonts()
        axes.set_title(
            drawable(_title(data), fonts), fontfamily=fonts, loc="left", parse_math=False
        )
    return True


@contextlib.contextmanager
def loss_axes(path: Path) -> Iterator[Any]:
    """Axes for losses over steps; the picture is written to ``path`` at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120, layout="constrained")
    try:
        yield axes
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats per target token)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        with replacing(path) as stream:
            figure.savefig(stream, format="png")
    finally:
        pyplot.close(figure)


def set_floor(axes: Any, losses: Iterable[float]) -> None:
    """Begin at 0 where that shows the curve better than a cut axis."""
    finite = [value for value in losses if math.isfinite(value)]
    if finite and 0 <= min(finite) < 0.5 * max(finite):
        axes.set_ylim(bottom=0)


def _draw_curves(axes: Any, train: list[tuple[int, float]], evals: list[tuple[int, float]]) -> None:
    if train:
        steps, values = zip(*train, strict=True)
        many = len(values) >= SMOOTHED_FROM
        last = _last("train", values)
        axes.plot(
            steps, values, color="tab:blue", alpha=0.35 if many else 1, label=None if many else last
        )
        if many:
            axes.plot(steps, smoothed(list(values)), color="tab:blue", linewidth=2, label=last)
        _mark_gaps(axes, steps, values)
    if evals:
        steps, values = zip(*evals, strict=True)
        # A line through two points (before and after) would look like a measured curve.
        style = "o-" if len(evals) > 2 else "o"
        axes.plot(steps, values, style, color="tab:orange", label=_last("evaluation", values))


def _last(name: str, values: tuple[float, ...]) -> str:
    return f"{name}, {human.number(values[-1])} at the end"


def _mark_gaps(axes: Any, steps: tuple[int, ...], values: tuple[float, ...]) -> None:
    """A loss that is not a number leaves a hole in a line; show where."""
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    for index, step in enumerate(bad):
        axes.axvline(step, color="tab:red", alpha=0.6, label=None if index else "loss is NaN")


def _draw_lr(axes: Any, data: RunData) -> None:
    rates = points(data.train, "lr")
    if not rates:
        return
    second = axes.twinx()
    second.plot(*zip(*rates, strict=True), color="tab:gray", linestyle=":", linewidth=1.2)
    second.set_ylabel("learning rate (dotted)", color="tab:gray")
    second.tick_params(axis="y", colors="tab:gray")
    second.set_ylim(bottom=0)
    second.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    second.spines["top"].set_visible(False)
    # The losses lie over the learning rate.
    axes.set_zorder(second.get_zorder() + 1)
    axes.patch.set_visible(False)


def smoothed(values: list[float]) -> list[float]:
    """Mean over about a thirtieth of the run around each value: no lag behind the curve."""
    half = max(1, len(values) // 60)
    result = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)  # symmetric, also at the ends
        near = [v for v in values[index - reach : index + reach + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result


def points(records: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    points = []
    for record in records:
        value = record.get(key)
        if value is None and not (key == "loss" and record.get("nonfinite")):
            continue
        points.append((int(record["step"]), math.nan if value is None else float(value)))
    return points


def _title(data: RunData) -> str:
    model = (data.config.get("model") or {}).get("name") or ""
    kind = (data.config.get("task") or {}).get("kind") or ""
    what = ", ".join(word for word in (kind, model) if word)
    return human.one_line(data.name, limit=60) + (f"  ({what})" if what else "")


def installed_fonts() -> list[str]:
    """matplotlib's own font, then those with CJK that are installed here."""
    from matplotlib import font_manager

    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in CJK_FONTS if name in installed)]


def drawable(text: str, fonts: list[str]) -> str:
    """``text`` with ``…`` for what no font here can draw, instead of boxes and warnings."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    covered: set[int] = set()
    for name in fonts:
        covered |= set(FT2Font(font_manager.findfont(name)).get_charmap())
    letters: list[str] = []
    for letter in text:
        shown = letter if ord(letter) in covered else "…"
        if shown != "…" or letters[-1:] != ["…"]:
            letters.append(shown)
    return "".join(letters)


def draw_both(a: RunData, b: RunData, names: tuple[str, str], path: Path) -> bool:
    """Write the picture to ``path``; False where neither run has a loss yet."""
    if not any(data.train or data.evals for data in (a, b)):
        return False
    with loss_axes(path) as axes:
        from matplotlib.ticker import MaxNLocator

        fonts = installed_fonts()
        for index, (data, name) in enumerate(zip((a, b), names, strict=True)):
            # The second run dashed: where both are equal, both are seen.
            _draw_one(
                axes, data, drawable(name, fonts), COLOURS[index], "-" if index == 0 else "--"
            )
        lines = [records for data in (a, b) for records in (data.train, data.evals)]
        set_floor(axes, [value for records in lines for _, value in points(records, "loss")])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend = axes.legend(loc="upper right", framealpha=0.8, edgecolor="none")
        for text in legend.get_texts():
            text.set_fontfamily(fonts)
            text.set_parse_math(False)
    return True


def _draw_one(axes: Any, data: RunData, name: str, colour: str, style: str) -> None:
    train, evals = points(data.train, "loss"), points(data.evals, "loss")
    if train:
        steps, values = zip(*train, strict=True)
        last = next((value for value in reversed(values) if math.isfinite(value)), math.nan)
        label = f"{name}: {human.number(last)} at step {steps[-1]:,}"
        many = len(values) >= SMOOTHED_FROM
        axes.plot(
            steps, values, style, color=colour, alpha=0.3 if many else 1,
            label=None if many else label,
        )  # fmt: skip
        if many:
            axes.plot(steps, smoothed(list(values)), style, color=colour, linewidth=2, label=label)
    if evals:
        steps, values = zip(*evals, strict=True)
        label = f"{name}, evaluation: {human.number(values[-1])}"
        mark = "o" if style == "-" else "x"
        axes.plot(steps, values, mark, color=colour, markersize=7, label=label)


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
    numbers = []
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
        numbers.append(table)
    return numbers


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
