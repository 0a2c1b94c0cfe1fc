"""The charts of a sweep: the objective over each swept key, and the loss curves of the trials."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from llmx.observe.report.chart import (
    BLUE,
    COLOURS,
    GRAY,
    Line,
    chart,
    scale_of,
    scale_of_names,
)
from llmx.observe.report.markup import escaped
from llmx.observe.report.sweep_data import SWEEP, axes, value_of
from llmx.observe.report.sweep_table import settings_of, title_of
from llmx.run.sweepdir import WELL, Sweep, Trial
from llmx.text import plural

MAX_CURVES = 120


def number_of(text: str) -> float | None:
    """The finite number that a typed value is, if it is one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def in_order(values: Sequence[str]) -> list[str]:
    """Each value once: numbers by size, else ``stage2`` before ``stage10``."""

    def padded(value: str) -> str:
        return re.sub(r"\d+", lambda digits: digits[0].zfill(20), value)

    sizes = {value: number_of(value) for value in values}
    return sorted(sizes, key=lambda value: (sizes[value] or 0.0, padded(value)))


def objective_charts(sweep: Sweep) -> str:
    """Draw the objective over the values of each swept key: a line for each combination of
    the other keys, or dots where there are more combinations than colours."""
    names = axes(sweep.trials)
    ended = [
        (trial, value)
        for trial in sweep.trials
        if trial.outcome in WELL
        and (value := trial.value(sweep.objective)) is not None
        and math.isfinite(value)
    ]
    charts = []
    for name in names if len(ended) > 1 else ():
        other_names = [other for other in names if other not in (name, SWEEP)]
        typed = {trial.label: value_of(trial, name) for trial, _ in ended}
        values = in_order([value for value in typed.values() if value is not None])
        if len(values) < 2:
            continue
        sizes = [size for value in values if (size := number_of(value)) is not None]
        is_numeric = len(sizes) == len(values)
        across = scale_of(sizes) if is_numeric else scale_of_names(values)
        places = dict(zip(values, sizes if is_numeric else range(len(values)), strict=True))
        groups: dict[str, list[tuple[float, float]]] = {}
        for trial, objective in ended:
            if (text := typed[trial.label]) is not None:
                point = (places[text], objective)
                groups.setdefault(settings_of(trial, other_names), []).append(point)
        has_lines = len(groups) <= len(COLOURS)
        lines = []
        for at, (settings, points) in enumerate(groups.items()):
            colour = COLOURS[at] if has_lines else BLUE
            if has_lines:
                lines.append(Line(sorted(points), settings, colour, title=settings))
            lines.append(Line(sorted(points), "", colour, "dots", settings))
        picture = chart(lines, across=across)
        charts.append(f"<div><h3>over {escaped(name)}</h3>{picture}</div>")
    if not charts:
        return ""
    better = "more" if sweep.mode == "max" else "less"
    title = f"{title_of(sweep.objective, sweep.trials)}, {better} is better"
    return f'<p>{escaped(title)}</p><div class="small">{"".join(charts)}</div>'


def loss_curves(sweep: Sweep) -> str:
    """The training losses of all trials, the best in bold; curves that look alike are one line."""
    with_curve = [trial for trial in sweep.trials if len(trial.curve) > 1]
    with_curve = [trial for trial in with_curve if trial.outcome != "same"]
    best, names = sweep.best, axes(sweep.trials)
    stride = math.ceil(len(with_curve) / MAX_CURVES)
    alike: dict[tuple[str, ...], list[Trial]] = {}
    for at, trial in enumerate(with_curve):
        if trial is best or at % stride == 0:
            alike.setdefault(tuple(f"{x}: {y:.3g}" for x, y in trial.curve), []).append(trial)
    lines = []
    for at, group in enumerate(alike.values()):
        title = " = ".join(
            f"{trial.label} {settings_of(trial, names)}"
            + ("" if trial.outcome == "ok" else f": {trial.word}")
            for trial in group
        )
        colour = COLOURS[at] if len(alike) <= len(COLOURS) else BLUE if best in group else GRAY
        is_named = len(alike) <= len(COLOURS) or best in group
        kind = "" if best in group else "faint"
        lines.append(Line(group[0].curve, title if is_named else "", colour, kind, title))
    # The best is drawn last, over the others.
    picture = chart(sorted(lines, key=lambda line: line.kind == ""))
    if not picture:
        return ""
    missing = len(with_curve) - sum(map(len, alike.values()))
    note = f"<p>{plural(missing, 'trial')} not drawn.</p>" if missing else ""
    return f"<p>nats per target token, over optimizer steps</p>{picture}{note}"
