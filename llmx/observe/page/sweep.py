"""A sweep as JSON: the best trial, its objective over each swept key, loss curves, the table.

``sweep.html`` is the page with it, in one file that opens anywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llmx import text as human
from llmx.observe.page import Block, Json, block, document, page, table, thinned, tiles
from llmx.observe.report.sweep_data import CSV, axes, value_of
from llmx.observe.report.sweep_table import (
    MARKDOWN,
    best_and_command,
    best_lines,
    cells,
    failures,
    headline,
    measure_of,
    measures,
    print_sweep,
    settings_of,
    write_sweep,
)
from llmx.run.rundir import write_text
from llmx.run.sweepdir import ENDED, WELL, Sweep, Trial
from llmx.text import plural

PAGE = "sweep.html"
MAX_CURVES = 120
MAX_POINTS = 500
"""Points of one of the curves."""
MAX_CELLS, MANY_AS = 10, 6
"""Numbers of a key that have a row of the heat map each; more are put together into MANY_AS."""
MAX_LINES = 8
"""Combinations of the other keys that get a line of their own: as many as there are colours."""

BETTER: dict[Any, int] = {max: 1, min: -1, None: 0}
"""Which direction of a metric is better, for the heat map."""

Link = Callable[[Trial], str]
"""The address at which a trial's run is shown; empty where it is not."""


def report_sweep(sweep: Sweep, out: Path, *, width: int | None = None) -> None:
    """Write ``sweep.csv``, ``sweep.md`` and ``sweep.html`` into ``out``, and print the table."""
    files, warning = [CSV, MARKDOWN, PAGE], ""
    place = Path(os.path.abspath(out))  # as the run directories are: paths in it are relative
    try:
        write_sweep(sweep.trials, directory=place, best=best_lines(sweep))
        content = sweep_page(sweep, link=lambda trial: _saved(trial, place))
        write_text(place / PAGE, document(content["title"], content))
    except OSError as error:
        # A full or read-only disk: what can be printed is printed all the same.
        files = []
        warning = f" {error.filename or out}: not written ({error.strerror})."
    print_sweep(sweep, directory=out, stream=sys.stdout, files=files, width=width)
    if warning:
        print(warning)
    sys.stdout.flush()


def _saved(trial: Trial, out: Path) -> str:
    """The path of the run's report, else of its directory, relative to ``out``."""
    if not trial.run_dir.is_dir():
        return ""
    report = trial.run_dir / "report.html"
    target = report if report.is_file() else trial.run_dir
    return quote(os.path.relpath(target, out))


def sweep_page(sweep: Sweep, *, link: Link, note: str = "") -> Json:
    """The whole page; ``note``: that nothing of it runs any more."""
    trials = sweep.trials
    ended_well = any(trial.outcome in WELL for trial in trials)
    state = "open" if not sweep.complete else "ok" if ended_well else "failed"
    title = sweep.directory.name
    if not re.search("[A-Za-z]", title) and axes(trials):  # Hydra's directory, a date and a time
        title = f"Sweep over {', '.join(axes(trials))}"
    curves, undrawn = loss_curves(sweep)
    better = "more" if sweep.mode == "max" else "less"
    objective = f"{measure_of(sweep.objective, trials).title}, {better} is better"
    charts = objective_charts(sweep)
    best, command = best_and_command(sweep)
    return page(
        f"{title}: {headline(trials)}",
        state,
        {
            "Best": [block("text", note), block("text", best), block("code", command)],
            "Summary": [tiles(_summary(sweep))],
            "Objective": [block("text", objective if charts else ""), block("charts", charts)],
            "Settings and metrics": [block("trials", settings_and_metrics(sweep))],
            "Curves": [],
            "Not drawn": [block("text", plural(undrawn, "trial") if undrawn else "")],
            "Trials": [_table(sweep, link)],
            "Failed and left out": [block("list", failures(trials))],
        },
        curves=curves,
    )


def in_order(values: Iterable[str]) -> tuple[list[str], list[float]]:
    """Each value once: numbers by size, else ``stage2`` before ``stage10``; and their sizes, where
    all are finite numbers."""

    def padded(value: str) -> str:
        return re.sub(r"\d+", lambda digits: digits[0].zfill(20), value)

    distinct = dict.fromkeys(values)
    with contextlib.suppress(ValueError):
        sizes = {value: float(value) for value in distinct}
        if all(map(math.isfinite, sizes.values())):
            ordered = sorted(sizes, key=lambda value: (sizes[value], value))
            return ordered, [sizes[value] for value in ordered]
    return sorted(distinct, key=padded), []


def objective_charts(sweep: Sweep) -> list[Json]:
    """The objective over the values of each swept key: a line for each combination of the other
    keys, or dots where there are too many."""
    names = axes(sweep.trials)
    objectives = _finite_values(sweep.trials, sweep.objective)
    ended = [
        trial for trial, value in zip(sweep.trials, objectives, strict=True) if value is not None
    ]
    charts = []
    for key in _keys(ended) if len(ended) > 1 else ():
        other_names = [name for name in names if name != key["name"]]
        places = key["sizes"] or range(len(key["values"]))
        groups: dict[str, list[tuple[float, float]]] = {}
        for trial, at in zip(ended, key["of"], strict=True):
            value = trial.value(sweep.objective)
            if at is not None and value is not None:
                groups.setdefault(settings_of(trial, other_names), []).append((places[at], value))
        has_lines = len(groups) <= MAX_LINES
        series = []
        for colour, (settings, points) in enumerate(groups.items()):
            x, y = zip(*sorted(points), strict=True)
            kind = "line dots" if has_lines else "dots"
            line = {"name": settings, "x": x, "y": y, "kind": kind}
            series.append({**line, "colour": colour if has_lines else 0})
        labels = [] if key["sizes"] else key["values"]
        charts.append({"title": f"over {key['name']}", "series": series, "names": labels})
    return charts


def settings_and_metrics(sweep: Sweep) -> Json | None:
    """Every trial's values of the swept keys, and what it measured: for the heat map and the
    parallel coordinates. None with fewer than two keys, or without two trials that ended well."""
    trials = [trial for trial in sweep.trials if trial.outcome and trial.outcome != "same"]
    keys, metrics = _keys(trials), []
    for name, measure in measures(trials).items():
        values = _finite_values(trials, name)
        if name == "steps" or sum(value is not None for value in values) < 2:
            continue
        scale = 100 if measure.unit == "%" else 1
        metrics.append(
            {
                "id": name,
                "name": f"{measure.title} ({measure.unit})" if measure.unit else measure.title,
                "better": BETTER[measure.better],
                "values": [v and float(f"{v * scale:.6g}") for v in values],
            }
        )
    if len(keys) < 2 or not metrics:
        return None
    names, ids = axes(trials), [metric["id"] for metric in metrics]
    return {
        "keys": keys,
        "metrics": metrics,
        "objective": ids.index(sweep.objective) if sweep.objective in ids else 0,
        "trials": [
            {"name": f"{trial.label} {settings_of(trial, names)}", "word": trial.word}
            for trial in trials
        ],
        "best": next((at for at, trial in enumerate(trials) if trial is sweep.best), None),
    }


def _finite_values(trials: Sequence[Trial], objective: str) -> list[float | None]:
    """The value of each trial that ended well; None where it has no finite one."""
    values = [trial.value(objective) if trial.outcome in WELL else None for trial in trials]
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _keys(trials: Sequence[Trial]) -> list[Json]:
    """The swept keys with more than one value: the values in order, which one each trial has
    (``of``), and to which cell of the heat map a value belongs (``groups``, with ``labels``): many
    numbers are put together."""
    keys = []
    for name in axes(trials):
        typed = [value_of(trial, name) for trial in trials]
        values, sizes = in_order(value for value in typed if value is not None)
        if len(values) < 2:
            continue
        texts = [human.one_line(value, limit=16) for value in values]
        groups, labels = list(range(len(values))), texts
        if sizes and len(values) > MAX_CELLS:
            groups = [at * MANY_AS // len(values) for at in range(len(values))]
            parts = [
                [size for size, group in zip(sizes, groups, strict=True) if group == number]
                for number in range(MANY_AS)
            ]
            labels = [f"{part[0]:.3g} to {part[-1]:.3g}" for part in parts]
        keys.append(
            {
                "name": name,
                "values": texts,
                "sizes": sizes,
                "of": [None if value is None else values.index(value) for value in typed],
                "groups": groups,
                "labels": labels,
            }
        )
    return keys


def loss_curves(sweep: Sweep) -> tuple[Json, int]:
    """The training losses of all trials, by what they are, and how many are left out; curves that
    look alike are one."""
    with_curve = [trial for trial in sweep.trials if len(trial.curve) > 1]
    with_curve = [trial for trial in with_curve if trial.outcome != "same"]
    best, names = sweep.best, axes(sweep.trials)
    stride = math.ceil(len(with_curve) / MAX_CURVES)
    alike: dict[tuple[str, ...], list[Trial]] = {}
    for at, trial in enumerate(with_curve):
        if trial is best or at % stride == 0:
            alike.setdefault(tuple(f"{x}: {y:.3g}" for x, y in trial.curve), []).append(trial)
    curves: Json = {}
    for group in alike.values():
        title = " = ".join(
            f"{trial.label} {settings_of(trial, names)}"
            + ("" if trial.outcome == "ok" else f": {trial.word}")
            for trial in group
        )
        points = thinned(group[0].curve, lambda point: point[1], MAX_POINTS)
        steps, losses = zip(*points, strict=True)
        curves[title] = {"train": {"step": steps, "loss": losses}, "best": best in group}
    return curves, len(with_curve) - sum(map(len, alike.values()))


def _summary(sweep: Sweep) -> list[tuple[str, str]]:
    trials = sweep.trials
    rows = [("typed", shlex.join(sweep.words))] if sweep.words else []
    begins = [trial.started for trial in trials if trial.started]
    began = sweep.started or (min(begins) if begins else None)
    ends = [trial.ended for trial in trials if trial.ended]
    if began:
        rows.append(("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))))
        if ends and max(ends) > began:
            word = "time" if all(trial.state == ENDED for trial in trials) else "time so far"
            rows.append((word, human.duration(max(ends) - began)))
    return [*rows, ("directory", str(sweep.directory))]


def _table(sweep: Sweep, link: Link) -> Block | None:
    """The table of the terminal, the best trial first, with a link to each run."""
    heads, rows = cells(sweep.ranked)
    linked: list[list[Any]] = []
    for trial, (index, *numbers) in zip(sweep.ranked, rows, strict=True):
        href = link(trial)
        run = {"text": trial.run_dir.name, "href": href} if href else ""
        linked.append([index, run, *numbers])
    kinds = ["number", "short", "words", "short", *["number"] * (len(heads) - 3)]
    best = 0 if sweep.best else None
    return table(linked, kinds=kinds, heads=[heads[0], "run", *heads[1:]], best=best)
