"""The pictures of a sweep: heat maps, lines over one axis, parallel coordinates, loss curves.

HTML and inline SVG, as in ``chart``: sharp on any screen, no script, nothing loaded. Text of the
sweep is escaped here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from llmx import text as human
from llmx.observe.report import chart
from llmx.observe.report.chart import Labels, Line, linear_axis, log_axis, numbers
from llmx.observe.report.markup import escaped
from llmx.observe.report.sweep_data import SWEEP, axes, value_of
from llmx.observe.report.sweep_table import BEST, settings_of, shown_value, title_of
from llmx.run.sweepdir import WELL, Sweep, Trial
from llmx.text import plural

MOST_MAPS = 12
"""Combinations of further axes that have heat maps."""
MOST_CELLS = 24
"""Rows or columns of a heat map."""
LEAST_FILLED = 0.3
"""Of the cells of a heat map: with less, as of a random search, it shows nothing."""
MOST_LINES = 8
"""Lines of one chart over an axis; of more combinations dots are drawn."""
MOST_CURVES = 120
MANY_VALUES = 8
"""Of an axis of numbers; with more it counts as continuous."""
DECADES = 8.0
"""Largest by smallest value from which on an axis is logarithmic."""
SPREAD = 30.0
"""The same of measured numbers."""
WIDEST_LABEL = 16
"""Characters of a label of an axis."""
NARROWEST = 260
"""Pixels of a chart on a phone; labels that would lie over each other there are left out."""
NARROWEST_SMALL = 150
"""The same of one of the charts that stand side by side."""
LETTER = 7.0
"""Pixels of a character of a label."""

WORST, MIDDLE, TOP = (47, 129, 199), (158, 92, 170), (217, 130, 43)
"""Colours of lines from the worst to the best trial; none is lost on a light or a dark page."""
GRAY = "#888888"
DISTINCT = (
    "blue", "orange", "#3a9e6a", "#a15cc0", "#b3643f", "#d0567f", "#4aa6ad", "#8f8f3a"
)  # fmt: skip
"""Colours of a few lines that are not ranked."""

STYLE = """
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 0 2rem; }
.maps > div { min-width: 0; } .maps h4 { font-size: .95rem; margin: .6rem 0 .3rem; }
.heat { min-width: 0; border-collapse: separate; border-spacing: 2px; }
.heat th { border: 0; padding: .25rem .5rem; font-weight: 400; width: auto; }
.heat thead th { text-align: center; } .heat td { min-width: 2.6rem; text-align: center; border: 0;
  padding: .35rem .6rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
.heat a { color: inherit; text-decoration: none; } .heat a:hover { text-decoration: underline; }
.heat td.top { outline: 2px solid currentColor; font-weight: 600; }
.heat td.bad { background: repeating-linear-gradient(135deg, #c9302c40 0 6px, #c9302c18 6px 12px); }
.heat td.off { background: repeating-linear-gradient(135deg, #8884 0 6px, #8881 6px 12px); }
.heat td.none { opacity: .4; }
.axes .plot { margin: 2.4rem 5rem 1rem 7.5rem; height: 18rem; }
.axes .plot i.name { bottom: 100%; transform: translateX(-50%); padding-bottom: .7rem;
  font-weight: 600; }
.axes .plot i.tick { transform: translate(-100%, -50%); padding-right: .35rem;
  text-shadow: 0 0 3px Canvas, 0 0 3px Canvas; }
.axes .plot path.axis { stroke: #8888; stroke-width: 1; }
.axes .plot path.lost { stroke-dasharray: 3 4; opacity: .5; stroke-width: 1.2; }
.legend span { white-space: normal; }
.scale b { display: inline-block; width: 7rem; height: .7rem; margin: 0 .5rem; border-radius: 2px;
  background: linear-gradient(to right, rgb(47 129 199), rgb(158 92 170), rgb(217 130 43)); }
"""


# --- Values of an axis -----------------------------------------------------------------------


def number_of(text: str | None) -> float | None:
    """The finite number that a typed value is, if it is one."""
    if text is None or not re.fullmatch(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def in_order(values: Sequence[str]) -> list[str]:
    """Each value once: numbers by size, ``stage2`` before ``stage10``, the others as typed."""
    seen = list(dict.fromkeys(values))
    if all(number_of(value) is not None for value in seen):
        return sorted(seen, key=lambda value: number_of(value) or 0.0)

    def natural(value: str) -> list[tuple[int, float, str]]:
        words = re.split(r"(\d+)", value)
        return [(0, float(word), "") if word.isdigit() else (1, 0.0, word) for word in words]

    stems = {re.sub(r"\d+", "", value) for value in seen}
    # Of one kind (stage1, stage2_offload): sorted; names of different things: as they were typed.
    return sorted(seen, key=natural) if len(stems) < len(seen) else seen


@dataclass(frozen=True)
class Scale:
    """Where the values of an axis lie, 0 to 1, and the labels of some."""

    places: dict[str, float]
    ticks: list[tuple[float, str]]
    continuous: bool
    """Numbers, in their own distances."""


def scale_of(values: Sequence[str]) -> Scale:
    """Numbers by size, logarithmic where they spread over a decade or so; names evenly."""
    seen = in_order(values)
    numbers_of = [number_of(value) for value in seen]
    sizes = [size for size in numbers_of if size is not None]
    if len(sizes) < len(seen) or len(set(sizes)) < 2:
        margin = 1 / (2 * len(seen)) if seen else 0.0
        places = {value: margin + at / len(seen) for at, value in enumerate(seen)}
        ticks = [(place, human.one_line(v, limit=WIDEST_LABEL)) for v, place in places.items()]
        return Scale(places, ticks, continuous=False)
    log = min(sizes) > 0 and max(sizes) / min(sizes) >= DECADES
    size_of = math.log if log else float
    low, high = size_of(min(sizes)), size_of(max(sizes))

    def place(size: float) -> float:
        return (size_of(size) - low) / (high - low)

    if len(seen) <= MANY_VALUES:
        ticks = [(place(size), value) for value, size in zip(seen, sizes, strict=True)]
    else:
        inside = (log_axis if log else linear_axis)(sizes)[2]
        inside = [tick for tick in inside if min(sizes) <= tick <= max(sizes)]
        ends = [min(sizes), *inside, max(sizes)] if len(inside) < 2 else inside
        ticks = list(zip(map(place, ends), numbers(ends), strict=True))
    return Scale(dict(zip(seen, map(place, sizes), strict=True)), ticks, continuous=True)


def apart(ticks: Sequence[tuple[float, str]], *, pixels: float) -> list[tuple[float, str]]:
    """The labels that stand beside each other on so many pixels."""
    shown: list[tuple[float, str]] = []
    free = -math.inf
    for place, name in ticks:
        half = LETTER * len(name) / 2
        if place * pixels - half >= free:
            shown.append((place, name))
            free = place * pixels + half + LETTER
    return shown


# --- Heat maps -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A number that is shown over the axes."""

    title: str
    value: Callable[[Trial], float | None]
    shown: Callable[[float, Trial], str]
    better: str
    """``max`` or ``min``; empty where more is simply more."""
    colour: str
    """RGB of the strongest cell."""


def measures_of(sweep: Sweep) -> list[Measure]:
    """The objective, tokens/s and the peak memory: what any trial has of them."""
    trials = sweep.trials

    def measure(name: str, mode: str, colour: str) -> Measure:
        return Measure(
            title_of(name, trials), lambda trial: trial.value(name),
            lambda value, trial: shown_value(name, value, trial), mode, colour,
        )  # fmt: skip

    better = {sweep.objective: sweep.mode, "tokens_per_s": "max", "memory_gib": ""}
    colours = {"memory_gib": "217 130 43"}
    return [
        measure(name, mode, colours.get(name, "47 129 199"))
        for name, mode in better.items()
        if any(trial.value(name) is not None for trial in trials)
    ]


def map_axes(trials: Sequence[Trial]) -> tuple[str, str | None] | None:
    """The axes of rows and columns of the heat maps; None where maps would be mostly empty."""
    names = [name for name in axes(trials) if name != SWEEP]
    small = [name for name in names if 2 <= len(_values(trials, name)) <= MOST_CELLS]
    if len(small) < 2:
        single = small[:1] if len(names) == 1 else []
        numeric = single and all(
            number_of(value) is not None for value in _values(trials, single[0])
        )
        return (single[0], None) if single and not numeric else None
    small.sort(key=lambda name: (name not in ("zero", "zero.stage"), _is_fractional(trials, name)))
    rows = small[0]
    others = sorted(small[1:], key=lambda name: name != "batch.micro_batch")
    columns = others[0]
    others = [name for name in names if name not in (rows, columns)]
    places = {tuple(value_of(trial, name) for name in names) for trial in trials}
    maps = {tuple(value_of(trial, name) for name in others) for trial in trials}
    size = len(maps) * len(_values(trials, rows)) * len(_values(trials, columns))
    return (rows, columns) if len(places) >= LEAST_FILLED * size else None


def _values(trials: Sequence[Trial], name: str) -> list[str]:
    values = [value_of(trial, name) for trial in trials]
    return in_order([value for value in values if value is not None])


def _is_fractional(trials: Sequence[Trial], name: str) -> bool:
    """A learning rate, say: its place is on an axis, rather than in a map."""
    sizes = [number_of(value) for value in _values(trials, name)]
    return any(size is not None and size != int(size) for size in sizes)


def heat_maps(sweep: Sweep, *, link: Callable[[Trial], str]) -> str:
    """A map of each measure for each combination of the other axes, all on one colour scale."""
    trials = sweep.trials
    chosen = map_axes(trials)
    if chosen is None:
        return ""
    rows, columns = chosen
    others = [name for name in axes(trials) if name not in chosen]
    if SWEEP in others and _disjoint(trials, [name for name in axes(trials) if name != SWEEP]):
        others.remove(SWEEP)
    groups: dict[tuple[str | None, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault(tuple(value_of(trial, name) for name in others), []).append(trial)
    measures, best = measures_of(sweep), sweep.best
    parts = [f"<p>{_reading(measures)}</p>"]
    for values, group in list(groups.items())[:MOST_MAPS]:
        title = " ".join(f"{name}={v}" for name, v in zip(others, values, strict=True) if v)
        parts.append(f"<h3>{escaped(title)}</h3>" if title else "")
        drawn = [
            f"<div><h4>{escaped(measure.title)}</h4>"
            + _heat_map(
                group, rows, columns, measure, of=_range(trials, measure), link=link,
                size=(_values(trials, rows), _values(trials, columns) if columns else []),
                best=best,
            )
            + "</div>"
            for measure in measures
        ]  # fmt: skip
        parts.append(f'<div class="maps">{"".join(drawn)}</div>')
    left = len(groups) - MOST_MAPS
    if left > 0:
        combinations = plural(left, "more combination")
        parts.append(f"<p>{combinations} of {escaped(', '.join(others))}: see the table.</p>")
    return "".join(parts)


def _disjoint(trials: Sequence[Trial], names: Sequence[str]) -> bool:
    """No two trials share a place on the axes: several sweeps can be one map."""
    places = [tuple(value_of(trial, name) for name in names) for trial in trials]
    return len(set(places)) == len(places)


def _reading(measures: Sequence[Measure]) -> str:
    low = any(measure.better == "min" for measure in measures)
    strong = "Darker is more" + (", of a loss less" if low else "")
    return (
        f"{strong}; {BEST} is the best trial. Hatched cells have no number: the word says how the "
        "trial ended, or why it was not run. A cell leads to its run."
    )


@dataclass(frozen=True)
class _Range:
    low: float
    high: float
    log: bool


def _range(trials: Sequence[Trial], measure: Measure) -> _Range | None:
    values = [
        value
        for trial in trials
        if trial.outcome in (*WELL, "same")
        and (value := measure.value(trial)) is not None
        and math.isfinite(value)
    ]
    if not values:
        return None
    low, high = min(values), max(values)
    return _Range(low, high, log=low > 0 and high / low > SPREAD)


def _strength(value: float, limits: _Range, better: str) -> float:
    if limits.high <= limits.low:
        return 0.35
    if limits.log:
        part = math.log(value / limits.low) / math.log(limits.high / limits.low)
    else:
        part = (value - limits.low) / (limits.high - limits.low)
    part = min(1.0, max(0.0, part))
    return 0.08 + 0.62 * (1 - part if better == "min" else part)


def _heat_map(
    trials: Sequence[Trial],
    rows: str,
    columns: str | None,
    measure: Measure,
    *,
    size: tuple[list[str], list[str]],
    of: _Range | None,
    link: Callable[[Trial], str],
    best: Trial | None,
) -> str:
    cells: dict[tuple[str | None, str | None], Trial] = {}
    for trial in trials:
        place = (value_of(trial, rows), value_of(trial, columns) if columns else None)
        old = cells.get(place)
        if old is None or (old.outcome not in WELL and trial.outcome in WELL):
            cells[place] = trial
    across: list[str | None] = [*size[1]] if columns else [None]
    corner = f"{rows} ↓" + (f" {columns} →" if columns else "")
    head = "".join(f"<th>{escaped(value)}</th>" for value in across if value is not None)
    lines = []
    for row in size[0]:
        shown = "".join(
            _cell(cells.get((row, column)), measure, of, link=link, best=best) for column in across
        )
        lines.append(f"<tr><th>{escaped(row)}</th>{shown}</tr>")
    return (
        f'<div class="scroll"><table class="heat"><thead><tr><th>{escaped(corner)}</th>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(
    trial: Trial | None,
    measure: Measure,
    of: _Range | None,
    *,
    link: Callable[[Trial], str],
    best: Trial | None,
) -> str:
    if trial is None:
        return '<td class="none" title="not in the sweep">·</td>'
    why = human.one_line(f"{trial.label} {trial.word}: {trial.cause}".rstrip(": "), limit=200)
    href = link(trial)

    def linked(text: str) -> str:
        return f'<a href="{escape(href)}">{escaped(text)}</a>' if href else escaped(text)

    value = measure.value(trial)
    well = trial.outcome in (*WELL, "same")
    if not well or value is None or of is None:
        kind = "bad" if trial.failed else "off"
        word = "no value" if trial.outcome == "ok" else trial.word
        return f'<td class="{kind}" title="{escaped(why)}">{linked(word)}</td>'
    shown = measure.shown(value, trial)
    if not math.isfinite(value):
        return f'<td class="bad" title="{escaped(why)}">{linked(shown)}</td>'
    top = trial is best
    style = f"background:rgb({measure.colour} / {_strength(value, of, measure.better):.2f})"
    text = linked(f"{shown}{BEST}" if top else shown)
    return f'<td{" class=top" if top else ""} style="{style}" title="{escaped(why)}">{text}</td>'


# --- Lines over an axis ----------------------------------------------------------------------


def lines_over_axes(sweep: Sweep) -> str:
    """For each axis of numbers, the objective over it, a line for each combination of the others;
    of the only axis, tokens/s and memory, too."""
    trials = sweep.trials
    names = [name for name in axes(trials) if name != SWEEP or len(axes(trials)) == 1]
    measures = measures_of(sweep)
    if not measures:
        return ""
    parts = []
    for name in names:
        values = _values(trials, name)
        if len(values) < 3 or any(number_of(value) is None for value in values):
            continue
        if len(names) > 1 and map_axes(trials) and not _is_fractional(trials, name):
            continue  # the heat maps show it
        drawn = _line_plot(trials, name, measures[0], pixels=NARROWEST)
        if drawn:
            parts.append(f"<h3>{escaped(f'{measures[0].title} over {name}')}</h3>{drawn}")
        if len(names) > 1:
            continue
        others = [
            f"<div><h3>{escaped(measure.title)}</h3>{drawn}</div>"
            for measure in measures[1:]
            if (drawn := _line_plot(trials, name, measure, pixels=NARROWEST_SMALL, note=False))
        ]
        parts.append(f'<div class="small">{"".join(others)}</div>' if others else "")
    return "".join(parts)


def _line_plot(
    trials: Sequence[Trial], name: str, measure: Measure, *, pixels: float, note: bool = True
) -> str:
    scale = scale_of(_values(trials, name))
    others = [other for other in axes(trials) if other != name]
    groups: dict[str, dict[float, float]] = {}
    lost: set[float] = set()
    for trial in trials:
        value, typed = measure.value(trial), value_of(trial, name)
        if typed is None:
            continue
        if value is None or not math.isfinite(value) or trial.failed:
            lost.add(scale.places[typed])
            continue
        if trial.outcome in WELL:
            groups.setdefault(settings_of(trial, others), {})[scale.places[typed]] = value
    lines: list[Line] = []
    if len(groups) <= MOST_LINES:
        for colour, (title, points) in zip(DISTINCT, groups.items(), strict=False):
            line = sorted(points.items())
            lines.append(Line(title, line, colour, title=title))
            lines.append(Line("", line, colour, "dots"))
    else:
        for title, points in groups.items():
            lines.append(Line("", sorted(points.items()), "blue", "dots", title))
    labels = Labels(apart(scale.ticks, pixels=pixels))
    sizes = [value for points in groups.values() for value in points.values()]
    wide = bool(sizes) and min(sizes) > 0 and max(sizes) / min(sizes) > SPREAD
    drawn = chart.chart(lines, labels=labels, logarithmic=wide)
    if not note or not drawn:
        return drawn
    ended = [value for value in _values(trials, name) if scale.places[value] in lost]
    if not ended:
        return drawn
    missing = ", ".join(ended[:MANY_VALUES]) + (", ..." if len(ended) > MANY_VALUES else "")
    return f"{drawn}<p>Trials without a number at {escaped(name)} {escaped(missing)}.</p>"


# --- Parallel coordinates --------------------------------------------------------------------


def _is_continuous(trials: Sequence[Trial], name: str) -> bool:
    values = _values(trials, name)
    return len(values) > MANY_VALUES and all(number_of(value) is not None for value in values)


def parallel_coordinates(sweep: Sweep) -> str:
    """A line a trial through its value on each axis, coloured by the objective, which is the last
    axis. Only where there are more than two axes, or continuous ones."""
    trials, objective, mode = sweep.trials, sweep.objective, sweep.mode
    names = axes(trials)
    if len(names) < 2 or len(trials) < 3:
        return ""
    if len(names) == 2 and not any(_is_continuous(trials, name) for name in names):
        return ""
    scales = [scale_of(_values(trials, name)) for name in names]
    ended = {
        trial.label: value
        for trial in trials
        if trial.outcome == "ok"
        and (value := trial.value(objective)) is not None
        and math.isfinite(value)
    }
    goal = _goal(list(ended.values()))
    best = sweep.best
    width = len(names) if goal else len(names) - 1
    drawn = []
    for trial in sorted(trials, key=lambda trial: (trial is best, trial.label in ended)):
        if trial.outcome == "same":
            continue
        places = []
        for name, scale in zip(names, scales, strict=True):
            typed = value_of(trial, name)
            places.append(None if typed is None else scale.places.get(typed))
        value = ended.get(trial.label)
        if goal and value is not None:
            places.append(goal[0](value))
        path = _through(places, width)
        if not path:
            continue
        title = f"{trial.label} {settings_of(trial, names)}: {trial.word}"
        if value is None:
            attributes = f'class="thin lost" style="stroke:{"#c9302c" if trial.failed else GRAY}"'
        else:
            title += f", {shown_value(objective, value, trial)}"
            part = goal[0](value) if goal else 0.5
            colour = colour_of(1 - part if mode == "min" else part)
            kind = "" if trial is best else "thin"
            attributes = f'class="{kind}" style="stroke:{colour}"'
        drawn.append(f'<path {attributes} d="{path}"><title>{escaped(title)}</title></path>')
    if not drawn:
        return ""
    heads = [*names, title_of(objective, trials)] if goal else names
    ticks = [scale.ticks for scale in scales] + ([goal[1]] if goal else [])
    grid, labels = [], []
    for at, (head, marks) in enumerate(zip(heads, ticks, strict=True)):
        x = at / width if width else 0.0
        grid.append(f'<path class="axis" d="M{chart.SIZE * x:.1f} 0V{chart.SIZE}"/>')
        short = human.one_line(head, limit=20)
        labels.append(f'<i class="name" style="left:{x:.2%}" title="{escaped(head)}">'
                      f"{escaped(short)}</i>")  # fmt: skip
        for place, name in _spread(marks):
            shown = human.one_line(name, limit=WIDEST_LABEL)
            labels.append(
                f'<i class="tick" style="left:{x:.2%};top:{1 - place:.2%}">{escaped(shown)}</i>'
            )
    return (
        f'{_colour_scale(mode)}<div class="scroll axes">'
        f'<div class="plot" style="min-width:{9.5 * max(1, width):.1f}rem">'
        f'<svg viewBox="0 0 {chart.SIZE} {chart.SIZE}" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(grid)}{"".join(drawn)}</svg>{"".join(labels)}</div></div>'
    )


def _through(places: Sequence[float | None], width: int) -> str:
    words, drawing = [], False
    for at, place in enumerate(places):
        if place is None:
            drawing = False
            continue
        x = chart.SIZE * at / width if width else 0.0
        words.append(f"{'L' if drawing else 'M'}{x:.1f} {chart.SIZE * (1 - place):.1f}")
        drawing = True
    return "".join(words) if len(words) > 1 else ""


def _spread(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The ticks that do not lie over each other along the height of the plot."""
    shown: list[tuple[float, str]] = []
    for place, name in sorted(ticks):
        if not shown or place - shown[-1][0] >= 0.055:
            shown.append((place, name))
    return shown


def _goal(
    values: Sequence[float],
) -> tuple[Callable[[float], float], list[tuple[float, str]]] | None:
    """Where a value of the objective lies, 0 to 1, and the labels of its axis."""
    if not values:
        return None
    log = min(values) > 0 and max(values) / min(values) > SPREAD
    low, high, ticks = log_axis(values) if log else linear_axis(values)
    size_of = math.log if log else float
    bottom, top = size_of(low), size_of(high)

    def place(value: float) -> float:
        return (size_of(value) - bottom) / (top - bottom)

    return place, list(zip(map(place, ticks), numbers(ticks), strict=True))


def colour_of(part: float) -> str:
    """From the worst (0) to the best (1)."""
    part = min(1.0, max(0.0, part))
    low, high = (WORST, MIDDLE) if part < 0.5 else (MIDDLE, TOP)
    share = 2 * part if part < 0.5 else 2 * part - 1
    mixed = (round(a + share * (b - a)) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _colour_scale(mode: str) -> str:
    more = "more" if mode == "max" else "less"
    return f'<p class="scale">worst<b></b>best ({more} is better)</p>'


# --- Loss curves -----------------------------------------------------------------------------


def loss_curves(sweep: Sweep) -> str:
    """The training losses of all trials, coloured by the objective, the best one bold."""
    trials, objective, mode = sweep.trials, sweep.objective, sweep.mode
    drawn = [trial for trial in trials if len(trial.curve) > 1 and trial.outcome != "same"]
    if not drawn:
        return ""
    names = axes(trials)
    best = replace(sweep, trials=drawn).best
    ranked = sorted(drawn, key=lambda trial: _rank(trial, objective, mode))
    left = len(ranked) - MOST_CURVES
    if left > 0:
        every = (len(ranked) - 1) / (MOST_CURVES - 1)
        ranked = [ranked[round(every * at)] for at in range(MOST_CURVES)]
    finite = [trial for trial in ranked if math.isfinite(_rank(trial, objective, mode))]
    places = {trial.label: at for at, trial in enumerate(finite)}
    few = len(ranked) <= MOST_LINES
    # Curves that look the same would hide each other: one line, with the names of all.
    alike: dict[tuple[str, ...], list[Trial]] = {}
    for trial in ranked:
        alike.setdefault(tuple(f"{x}: {y:.3g}" for x, y in trial.curve), []).append(trial)
    lines = []
    # The best is drawn last, over the others.
    for group in reversed(alike.values()):
        trial = best if best in group else group[0]
        if few:
            colour = DISTINCT[drawn.index(trial)]
        elif trial.label in places:
            colour = colour_of(1 - places[trial.label] / max(1, len(places) - 1))
        else:
            colour = GRAY
        title = " = ".join(
            f"{similar.label} {settings_of(similar, names)}"
            + ("" if similar.outcome == "ok" else f": {similar.word}")
            for similar in group
        )
        named = few or trial is best
        lines.append(
            Line(
                title if named else "", trial.curve, colour, "" if trial is best else "thin", title
            )
        )
    lines.sort(key=lambda line: line.kind == "")
    shown = chart.chart(lines, log=True)
    if not shown:
        return ""
    note = f"<p>{left} of {len(drawn)} trials are left out.</p>" if left > 0 else ""
    scale = "" if few else _colour_scale(mode)
    return f"<p>nats per target token, over optimizer steps</p>{scale}{shown}{note}"


def _rank(trial: Trial, objective: str, mode: str) -> float:
    """Less is better; not finite where the trial has no value."""
    value = trial.value(objective)
    if value is None or not math.isfinite(value) or trial.outcome != "ok":
        return math.inf
    return -value if mode == "max" else value
