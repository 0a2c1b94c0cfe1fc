"""Curves in the page itself: sharp on any screen, readable on a phone, without a script.

The lines are SVG that stretches with the page; the labels are HTML beside it and keep their size.
An axis is logarithmic where its values spread over more than a decade; steps are linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from llmx import text as human

Point = tuple[float, float]

COLOURS = (
    "#2f81c7", "#d9822b", "#3a9e6a", "#a15cc0", "#b3643f", "#d0567f", "#4aa6ad", "#8f8f3a"
)  # fmt: skip
BLUE, ORANGE, GRAY, RED = COLOURS[0], COLOURS[1], "#888888", "#c9302c"
MAX_POINTS = 600
"""Of one line; beyond, the least and the largest value of each stretch are drawn."""
SIZE = 1000
"""Units of the drawing, in both directions."""
LOG_FROM = 20.0
"""Largest by smallest value from which on an axis is logarithmic."""
NARROWEST = 240
"""Pixels of a chart on a phone; labels that would lie over each other there are left out."""
LETTER = 7.0
"""Pixels of a character of a label."""

STYLE = """
.chart { margin: .5rem 0 1.5rem; } .legend { margin: .3rem 0 .6rem; }
.legend span { margin-right: 1.2rem; }
.plot { position: relative; height: 20rem; margin: .8rem 1rem 2.2rem 4rem; }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 0 1rem; }
.small .plot { height: 8rem; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot i { position: absolute; font: 12px/1 system-ui, sans-serif; white-space: nowrap; }
.plot i.y { right: 100%; transform: translateY(-50%); padding-right: .4rem; }
.plot i.x { top: 100%; transform: translateX(-50%); padding-top: .4rem; }
.plot path { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round; }
.plot path.grid { stroke: #8883; stroke-width: 1; }
.plot path.mark { stroke-width: 1.2; stroke-dasharray: 4 4; }
.plot path.faint { opacity: .4; stroke-width: 1; } .plot path.dots { stroke-width: 7; }
"""


@dataclass(frozen=True)
class Line:
    """One line of a chart; NaN leaves a gap."""

    points: Sequence[Point]
    name: str = ""
    """For the legend; empty for none."""
    colour: str = BLUE
    kind: str = ""
    """``faint``, ``dots``, ``mark`` (a vertical line at each x) or a plain line."""
    title: str = ""
    """Shown where the pointer is on the line."""


@dataclass(frozen=True)
class Scale:
    """An axis: the part of its length, 0 to 1, at which a value lies, and its labels."""

    low: float
    high: float
    is_log: bool
    ticks: Sequence[tuple[float, str]]
    """Value and text of each label."""

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def scale_of(values: Sequence[float], *, is_tight: bool = False) -> Scale:
    """The scale of finite values, to the next label beyond them.

    ``is_tight``: it ends with the values and is linear, as of steps.
    """
    low, high = min(values), max(values)
    is_log = low > 1e-300 and high / low >= LOG_FROM and not is_tight
    if is_log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [10.0**decade for decade in decades]
        ticks = ticks[:: math.ceil(len(ticks) / 8)]
    else:
        if 0 <= low < high / 2 and not is_tight:
            low = 0.0
        if high - low < 1e-300:
            margin = 0.5 if is_tight or not low else max(abs(low) / 2, 1e-9)
            low, high = low - margin, high + margin
        step = max(nice_step((high - low) / 5), 1.0 if is_tight else 0.0)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = [index * step for index in range(first, last + 1)]
    if not is_tight:
        low, high = min(low, ticks[0]), max(high, ticks[-1])
    labels = zip(ticks, labels_of(ticks), strict=True)
    return Scale(low, high, is_log, [(tick, text) for tick, text in labels if low <= tick <= high])


def scale_of_names(names: Sequence[str]) -> Scale:
    """The scale on which the first name is at 0, the second at 1."""
    ticks = [(float(at), human.one_line(name, limit=16)) for at, name in enumerate(names)]
    return Scale(-0.5, len(names) - 0.5, False, ticks)


def nice_step(width: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least ``width``."""
    size = 10.0 ** math.floor(math.log10(width))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= width * (1 - 1e-9))


def labels_of(ticks: Sequence[float]) -> list[str]:
    """Labels in three digits, or in as many as tell them apart."""
    labels = [human.count(tick) if abs(tick) >= 1_000 else f"{tick:.4g}" for tick in ticks]
    return labels if len(set(labels)) == len(labels) else [f"{tick:,.7g}" for tick in ticks]


def chart(lines: Sequence[Line], *, across: Scale | None = None) -> str:
    """HTML of one chart; empty where nothing is finite. ``across``: the horizontal axis, if it is
    not one of steps."""
    points = [point for line in lines for point in line.points if line.kind != "mark"]
    finite = [value for _, value in points if math.isfinite(value)]
    if not finite:
        return ""
    across = across or scale_of([x for x, _ in points], is_tight=True)
    up = scale_of(finite)
    levels = [(SIZE * (1 - up.place(tick)), text) for tick, text in up.ticks]
    paths = [f'<path class="grid" d="{"".join(f"M0 {y:.1f}H{SIZE}" for y, _ in levels)}"/>']
    for line in lines:
        title = f"<title>{escape(line.title)}</title>" if line.title else ""
        if path := _path(line, across, up):
            paths.append(
                f'<path class="{line.kind}" style="stroke:{line.colour}" d="{path}">{title}</path>'
            )
    labels = [f'<i class="y" style="top:{y / SIZE:.2%}">{text}</i>' for y, text in levels]
    end = -math.inf
    for tick, text in across.ticks:
        place, half = across.place(tick), LETTER * len(text) / 2
        if NARROWEST * place - half >= end:
            labels.append(f'<i class="x" style="left:{place:.2%}">{escape(text)}</i>')
            end = NARROWEST * place + half + LETTER
    signs = {"": "━", "faint": "─", "dots": "●", "mark": "┆"}
    legend = "".join(
        f'<span><i style="color:{line.colour}">{signs[line.kind]}</i> {escape(line.name)}</span>'
        for line in lines
        if line.name
    )
    return (
        '<div class="chart">' + (f'<p class="legend">{legend}</p>' if legend else "") +
        f'<div class="plot"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(paths)}</svg>{"".join(labels)}</div></div>'
    )  # fmt: skip


def _path(line: Line, across: Scale, up: Scale) -> str:
    if line.kind == "mark":
        inside = [x for x, _ in line.points if across.low <= x <= across.high]
        return "".join(f"M{SIZE * across.place(x):.1f} 0V{SIZE}" for x in inside)
    words: list[str] = []
    is_drawing = False
    for x, value in thinned(line.points):
        if not math.isfinite(value):
            is_drawing = False
            continue
        place = f"{SIZE * across.place(x):.1f} {SIZE * (1 - up.place(value)):.1f}"
        is_dot = line.kind == "dots"
        words.append(f"M{place}h0" if is_dot else f"{'L' if is_drawing else 'M'}{place}")
        is_drawing = True
    # A single value is a dot: a line of no length is drawn by its round ends.
    return "".join(words) + ("h0" if len(words) == 1 and line.kind != "dots" else "")


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about MAX_POINTS: of each stretch the least and the largest value, gaps kept."""
    if len(points) <= MAX_POINTS:
        return points
    length = math.ceil(2 * len(points) / MAX_POINTS)
    chosen: list[Point] = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        finite = sorted((p for p in stretch if math.isfinite(p[1])), key=lambda point: point[1])
        gap = [point for point in stretch if not math.isfinite(point[1])][:1]
        end = [points[-1]] if start + length >= len(points) else []
        chosen += sorted({*finite[:1], *finite[-1:], *gap, *end}, key=lambda point: point[0])
    return chosen
