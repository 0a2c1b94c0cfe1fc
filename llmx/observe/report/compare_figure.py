"""Both loss curves in one picture: ``python -m llmx compare RUN_A RUN_B``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.observe.report.figure import SMOOTHED_FROM, drawable, installed_fonts, points, smoothed
from llmx.observe.report.run_data import RunData

COLOURS = ("tab:blue", "tab:orange")


def draw_both(a: RunData, b: RunData, names: tuple[str, str], path: Path) -> bool:
    """Write the picture to ``path``; False where neither run has a loss yet."""
    if not any(data.train or data.evals for data in (a, b)):
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    fonts = installed_fonts()
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120, layout="constrained")
    try:
        for index, (data, name) in enumerate(zip((a, b), names, strict=True)):
            # The second run dashed: where both are equal, both are seen.
            _draw(axes, data, drawable(name, fonts), COLOURS[index], "-" if index == 0 else "--")
        finite = [
            value
            for data in (a, b)
            for _, value in [*points(data.train, "loss"), *points(data.evals, "loss")]
            if math.isfinite(value)
        ]
        if finite and 0 <= min(finite) < 0.5 * max(finite):
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats per target token)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        legend = axes.legend(loc="upper right", framealpha=0.8, edgecolor="none")
        for text in legend.get_texts():
            text.set_fontfamily(fonts)
            text.set_parse_math(False)
        # Written beside and renamed: a reader never sees half a picture.
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            figure.savefig(temporary, format="png")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    finally:
        pyplot.close(figure)
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
