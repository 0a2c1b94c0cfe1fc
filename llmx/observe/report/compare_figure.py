"""Both loss curves in one picture: ``python -m llmx compare RUN_A RUN_B``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.observe.report.figure import (
    SMOOTHED_FROM,
    drawable,
    installed_fonts,
    loss_axes,
    points,
    set_floor,
    smoothed,
)
from llmx.observe.report.run_data import RunData

COLOURS = ("tab:blue", "tab:orange")


def draw_both(a: RunData, b: RunData, names: tuple[str, str], path: Path) -> bool:
    """Write the picture to ``path``; False where neither run has a loss yet."""
    if not any(data.train or data.evals for data in (a, b)):
        return False
    with loss_axes(path) as axes:
        from matplotlib.ticker import MaxNLocator

        fonts = installed_fonts()
        for index, (data, name) in enumerate(zip((a, b), names, strict=True)):
            # The second run dashed: where both are equal, both are seen.
            _draw(axes, data, drawable(name, fonts), COLOURS[index], "-" if index == 0 else "--")
        lines = [records for data in (a, b) for records in (data.train, data.evals)]
        set_floor(axes, [value for records in lines for _, value in points(records, "loss")])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend = axes.legend(loc="upper right", framealpha=0.8, edgecolor="none")
        for text in legend.get_texts():
            text.set_fontfamily(fonts)
            text.set_parse_math(False)
    return True


def _draw(axes: Any, data: RunData, name: str, colour: str, style: str) -> None:
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
