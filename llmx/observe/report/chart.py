"""Curves in the page itself: sharp on any screen, readable on a phone, without a script.

The lines are SVG that stretches with the page; the labels are HTML beside it and keep their size.
A linear and a logarithmic axis are both drawn, and CSS shows the one that is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from llmx import text as human

Point = tuple[float, float]

MOST_POINTS = 600
"""Of one line; beyond, the least and the largest value of each stretch are drawn."""
SIZE = 1000
"""Units of the drawing, in both directions."""

STYLE = """
.chart { margin: .5rem 0 1.5rem; }
.chart input { margin: 0 .3rem 0 0; } .chart label { margin-right: 1rem; }
.legend { margin: .3rem 0 .6rem; } .legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend b { font-weight: 400; white-space: nowrap; }
.plot { position: relative; height: 20rem; margin: .8rem 1rem 2.2rem 4rem; }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: 0 1rem; }
.small .plot { height: 8rem; } .small h3 { font-size: .95rem; margin: .4rem 0; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot i { position: absolute; font: 12px/1 system-ui, sans-serif; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.plot i.y { right: 100%; transform: translateY(-50%); padding-right: .4rem; }
.plot i.x { top: 100%; transform: translateX(-50%); padding-top: .4rem; }
.plot path { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round; }
.plot path.grid { stroke: #8883; stroke-width: 1; }
.plot path.mark { stroke-width: 1.2; stroke-dasharray: 4 4; }
.plot path.faint { opacity: .35; stroke-width: 1; } .plot path.dots { stroke-width: 7; }
.plot path.thin { opacity: .8; stroke-width: 1.2; } .plot path.thin:hover { stroke-width: 4; }
.blue { stroke: #2f81c7; color: #2f81c7; } .orange { stroke: #d9822b; color: #d9822b; }
.gray { stroke: #888; color: #888; } .red { stroke: #c9302c; color: #c9302c; }
.axis-log:not(:checked) ~ .log, .axis-log:checked ~ .linear { display: none; }
"""


@dataclass(frozen=True)
class Line:
    """One line of a chart; NaN leaves a gap."""

    name: str
    """For the legend; empty for none."""
    points: Sequence[Point]
    colour: str
    """Of ``STYLE`` (``blue``), or a colour of CSS (``#2f81c7``)."""
    kind: str = ""
    """``faint``, ``thin``, ``dots`` or a plain line."""
    title: str = ""
    """Shown where the pointer is on the line."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step; the first of a name is in the legend."""

    step: int
    name: str
    colour: str


@dataclass(frozen=True)
class Labels:
    """What stands below a chart whose points are no steps but places between 0 and 1."""

    ticks: Sequence[tuple[float, str]]


def chart(
    lines: Sequence[Line],
    *,
    marks: Sequence[Mark] = (),
    log: bool = False,
    steps: int = 5,
    labels: Labels | None = None,
    logarithmic: bool = False,
) -> str:
    """HTML of one chart; ``log`` offers a logarithmic axis, too. Empty where nothing is finite.

    ``steps``: about as many labels stand below. ``logarithmic``: only that axis.
    """
    linear = _plot(lines, marks, log=logarithmic, steps=steps, labels=labels)
    if not linear:
        return ""
    as_log = _plot(lines, marks, log=True, steps=steps, labels=labels) if log else ""
    choice = ""
    if as_log:
        choice = (
            '<input type="radio" name="axis" class="axis-linear" id="axis-linear" checked>'
            '<label for="axis-linear">linear</label>'
            '<input type="radio" name="axis" class="axis-log" id="axis-log">'
            '<label for="axis-log">logarithmic</label>'
        )
    return (
        f'<div class="chart">{choice}{_legend(lines, marks)}'
        f'<div class="plot linear">{linear}</div>'
        + (f'<div class="plot log">{as_log}</div>' if as_log else "")
        + "</div>"
    )


def _legend(lines: Sequence[Line], marks: Sequence[Mark]) -> str:
    signs = {"": "━", "faint": "─", "thin": "─", "dots": "●"}
    entries = [(line.colour, signs[line.kind], line.name) for line in lines if line.name]
    entries += [(mark.colour, "┆", name) for name, mark in {m.name: m for m in marks}.items()]
    if not entries:
        return ""
    spans = [
        f"<span><i {_coloured(colour)}>{sign}</i> {_unbroken(name)}</span>"
        for colour, sign, name in entries
    ]
    return f'<p class="legend">{"".join(spans)}</p>'


def _unbroken(name: str) -> str:
    """Where a legend may break, it breaks between words."""
    return " ".join(f"<b>{escape(word)}</b>" for word in name.split(" "))


def _coloured(colour: str, *kinds: str) -> str:
    """Attributes of an element; a colour of CSS is no class."""
    named = colour.isalpha()
    classes = " ".join([*([colour] if named else []), *(kind for kind in kinds if kind)])
    style = "" if named else f' style="stroke:{escape(colour)};color:{escape(colour)}"'
    return f'class="{classes}"{style}'


def _plot(
    lines: Sequence[Line],
    marks: Sequence[Mark],
    *,
    log: bool,
    steps: int,
    labels: Labels | None,
) -> str:
    finite = [
        (step, value)
        for line in lines
        for step, value in line.points
        if math.isfinite(value) and (value > 0 or not log)
    ]
    if not finite:
        return ""
    values = [value for _, value in finite]
    first, last = 0.0, 1.0
    if labels is None:
        first = min(step for line in lines for step, _ in line.points)
        last = max(step for line in lines for step, _ in line.points)
        below = step_ticks(int(first), int(last), count=steps)
        names = [(float(step), human.count(step)) for step in below]
    else:
        names = list(labels.ticks)
    low, high, ticks = log_axis(values) if log else linear_axis(values)
    width = max(1.0, last - first)

    def x(step: float) -> float:
        return SIZE * (step - first) / width

    def y(value: float) -> float:
        if log:
            return SIZE * (1 - math.log(value / low) / math.log(high / low))
        return SIZE * (1 - (value - low) / (high - low))

    parts = [f'<path class="grid" d="{"".join(f"M0 {y(t):.1f}H{SIZE}" for t in ticks)}"/>']
    for mark in marks:
        if first <= mark.step <= last:
            parts.append(f'<path class="mark {mark.colour}" d="M{x(mark.step):.1f} 0V{SIZE}"/>')
    for line in lines:
        path = _path(line, x, y, positive=log)
        if path:
            title = f"<title>{escape(line.title)}</title>" if line.title else ""
            parts.append(f'<path {_coloured(line.colour, line.kind)} d="{path}">{title}</path>')
    written = [
        f'<i class="y" style="top:{y(tick) / SIZE:.2%}">{label}</i>'
        for tick, label in zip(ticks, numbers(ticks), strict=True)
    ]
    written += [
        f'<i class="x" style="left:{x(place) / SIZE:.2%}">{escape(name)}</i>'
        for place, name in names
    ]
    drawing = "".join(parts)
    return (
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" aria-hidden="true">'
        f"{drawing}</svg>{''.join(written)}"
    )


def _path(
    line: Line, x: Callable[[float], float], y: Callable[[float], float], *, positive: bool
) -> str:
    words: list[str] = []
    drawing = False
    for step, value in thinned(line.points):
        if not math.isfinite(value) or (positive and value <= 0):
            drawing = False
            continue
        place = f"{x(step):.1f} {y(value):.1f}"
        if line.kind == "dots":
            words.append(f"M{place}h0")
        else:
            words.append(f"{'L' if drawing else 'M'}{place}")
        drawing = True
    # A single value is a dot: a line of no length is drawn by its round ends.
    return "".join(words) + ("h0" if len(words) == 1 and line.kind != "dots" else "")


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about MOST_POINTS: of each stretch the least and the largest value, gaps kept."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    points_left: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        # One that is not finite is gap enough.
        chosen = set([point for point in stretch if not math.isfinite(point[1])][:1])
        if finite:
            chosen |= {min(finite, key=_value), max(finite, key=_value)}
        if start + size >= len(points):
            chosen.add(points[-1])
        points_left += sorted(chosen, key=lambda point: point[0])
    return points_left


def _value(point: Point) -> float:
    return point[1]


def linear_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """(lowest, highest, ticks): from zero where the values come near it."""
    low, high = min(values), max(values)
    if 0 <= low < 0.5 * high:
        low = 0.0
    if high <= low:
        size = abs(low) or 1.0
        low, high = low - 0.5 * size, high + 0.5 * size
    step = nice_step((high - low) / 5)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return low, high, [low + index * step for index in range(round((high - low) / step) + 1)]


def log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """(lowest, highest, ticks) of positive values, at 1, 2 and 5 or at powers of ten."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = low / 2, high * 2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    marks = [factor * 10.0**decade for decade in decades for factor in factors]
    below = max((mark for mark in marks if mark <= low), default=low)
    above = min((mark for mark in marks if mark >= high), default=high)
    ticks = [mark for mark in marks if below <= mark <= above]
    return below, above, ticks[:: math.ceil(len(ticks) / 8)] or ticks


def nice_step(width: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least ``width``."""
    size = 10.0 ** math.floor(math.log10(width))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= width * (1 - 1e-9))


def step_ticks(first: int, last: int, *, count: int) -> list[int]:
    """About ``count`` steps, the first and the last among them."""
    if last <= first:
        return [first]
    size = max(1, round(nice_step((last - first) / count)))
    inner = range((first // size + 1) * size, last, size)
    # Beside the ends there is no room for another label.
    margin = (last - first) / (2 * count)
    return [first, *(step for step in inner if first + margin < step < last - margin), last]


def numbers(ticks: Sequence[float]) -> list[str]:
    """Labels in three digits, or in as many as tell them apart."""
    labels = [_number(tick) for tick in ticks]
    return labels if len(set(labels)) == len(labels) else [f"{tick:,.7g}" for tick in ticks]


def _number(value: float) -> str:
    if value and abs(value) < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-")
    return human.count(value) if abs(value) >= 1_000 else f"{value:g}"
