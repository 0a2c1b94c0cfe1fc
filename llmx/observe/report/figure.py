"""``loss.png``: losses over the steps, of one run or of two (``python -m llmx compare``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.observe.run import Run
from llmx.run.metrics.declared import loss_title
from llmx.run.metrics.lines import Record, step_of
from llmx.run.rundir import replacing

SMOOTHED_FROM = 40
"""Points from which on a smoothed line helps."""

STYLES = (("tab:blue", "tab:orange", "-"), ("tab:green", "tab:red", "--"))
"""Style of each run: the colours of training and of evaluation, and how a line is drawn. The second
run is dashed: where both are equal, both are seen."""


def draw_losses(runs: Sequence[Run], path: Path) -> bool:
    """Write the picture of one run, or of two (A and B), to ``path``; False where none has a loss
    yet."""
    names = ("",) if len(runs) == 1 else ("A, ", "B, ")
    curves = [
        (name, points(run.train), points(run.evals)) for name, run in zip(names, runs, strict=True)
    ]
    losses = [value for _, train, evals in curves for _, value in train + evals]
    if not losses:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120, layout="constrained")
    try:
        for (name, train, evals), style in zip(curves, STYLES, strict=False):
            _draw_run(axes, name, train, evals, style)
        finite = [value for value in losses if math.isfinite(value)]
        if finite and 0 <= min(finite) < 0.5 * max(finite):
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper right", framealpha=0.8, edgecolor="none")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(loss_title(run.records for run in runs))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        with replacing(path) as stream:
            figure.savefig(stream, format="png")
    finally:
        pyplot.close(figure)
    return True


def _draw_run(
    axes: Any,
    name: str,
    train: list[tuple[int, float]],
    evals: list[tuple[int, float]],
    style: tuple[str, str, str],
) -> None:
    colour, eval_colour, dashes = style
    if train:
        steps, losses = zip(*train, strict=True)
        last = next((loss for loss in reversed(losses) if math.isfinite(loss)), math.nan)
        label = f"{name}train: {human.number(last)} at step {steps[-1]:,}"
        if len(losses) >= SMOOTHED_FROM:
            axes.plot(steps, losses, dashes, color=colour, alpha=0.35)
            losses = tuple(smoothed(list(losses)))
        axes.plot(steps, losses, dashes, color=colour, label=label, linewidth=2)
        # A loss that is not a number leaves a hole in a line; show where.
        for step, loss in train:
            if not math.isfinite(loss):
                axes.axvline(step, color="tab:red", alpha=0.6)
    if evals:
        steps, losses = zip(*evals, strict=True)
        # A line through two points (before and after) would look like a measured curve.
        marker = f"o{dashes}" if len(evals) > 2 else "o"
        label = f"{name}evaluation: {human.number(losses[-1])}"
        axes.plot(steps, losses, marker, color=eval_colour, label=label)


def smoothed(values: list[float]) -> list[float]:
    """Mean over about a thirtieth of the run around each value: no lag behind the curve."""
    half = max(1, len(values) // 60)
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)  # symmetric, also at the ends
        values_near = [v for v in values[index - reach : index + reach + 1] if math.isfinite(v)]
        means.append(sum(values_near) / len(values_near) if values_near else math.nan)
    return means


def points(records: list[Record]) -> list[tuple[int, float]]:
    """Step and loss of each line that has one; NaN for a loss that was not finite."""
    return [
        (step_of(record), math.nan if record.get("loss") is None else float(record["loss"]))
        for record in records
        if record.get("loss") is not None or record.get("nonfinite")
    ]
