"""``sweep.html``: a sweep in one file that opens anywhere: the best trial, charts, the table.

Nothing is loaded from a network, and every text of the sweep is escaped.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path
from urllib.parse import quote

from llmx import text as human
from llmx.observe.report.markup import Html, bullets, document, escaped, heading, pre, table
from llmx.observe.report.sweep_charts import loss_curves, objective_charts
from llmx.observe.report.sweep_data import axes
from llmx.observe.report.sweep_table import (
    best_command,
    best_lines,
    cells,
    failures,
    headline,
    known_of,
    settings_of,
    title_of,
    write_sweep,
)
from llmx.run.rundir import write_text
from llmx.run.sweepdir import ENDED, WELL, Sweep, Trial

PAGE = "sweep.html"


def write_report(sweep: Sweep, out: Path) -> None:
    """Write ``sweep.csv``, ``sweep.md`` and ``sweep.html`` into ``out``."""
    out = Path(os.path.abspath(out))  # as the run directories are: paths in it are relative
    write_sweep(sweep.trials, directory=out, best=best_lines(sweep))
    write_text(out / PAGE, sweep_page(sweep, out=out))


def sweep_page(sweep: Sweep, *, out: Path) -> str:
    """The page as text; links are relative to ``out``, where it will lie."""
    trials = sweep.trials
    ended_well = any(trial.outcome in WELL for trial in trials)
    state = "open" if not sweep.complete else "ok" if ended_well else "failed"
    title = (
        " + ".join(dict.fromkeys(trial.sweep for trial in trials if trial.sweep))
        or sweep.directory.name
    )
    if not re.search("[A-Za-z]", title) and axes(trials):  # Hydra's directory, a date and a time
        title = f"Sweep over {', '.join(axes(trials))}"
    parts = [
        f'<h1 class="{state}">{escaped(f"{title}: {headline(trials)}")}</h1>',
        _best(sweep),
        heading("Summary", table(_summary(sweep))),
        heading("Objective", objective_charts(sweep)),
        heading("Loss", loss_curves(sweep)),
        heading("Trials", _table(sweep, out)),
        heading("Failed and left out", bullets(failures(trials))),
        heading("Warnings", bullets(sweep.warnings)),
    ]
    return document(title, parts)


def _best(sweep: Sweep) -> str:
    best = sweep.best
    if best is None:
        return ""
    name = title_of(sweep.objective, sweep.trials)
    settings = settings_of(best, axes(sweep.trials))
    return (
        f"<p><b>Best by {escaped(name)}: {escaped(f'{best.label} {settings}')}</b> "
        f"({escaped(known_of(best, sweep.objective))}). To train with it:</p>"
        f"{pre(best_command(sweep, best))}"
    )


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


def _table(sweep: Sweep, out: Path) -> str:
    """The table of the terminal, the best trial first, with a link to each run."""
    heads, rows = cells(sweep.ranked)
    linked = []
    for trial, (index, *numbers) in zip(sweep.ranked, rows, strict=True):
        href, name = _link(trial, out), escaped(trial.run_dir.name)
        linked.append([index, Html(f'<a href="{href}">{name}</a>' if href else ""), *numbers])
    kinds = ["number", "short", "words", "short", *["number"] * (len(heads) - 3)]
    best = 0 if sweep.best else None
    return table(linked, kinds=kinds, heads=[heads[0], "run", *heads[1:]], best=best)


def _link(trial: Trial, out: Path) -> str:
    """Link to the run's report, else to its directory, relative to ``out``; empty without one."""
    if not trial.run_dir.is_dir():
        return ""
    report = trial.run_dir / "report.html"
    target = report if report.is_file() else trial.run_dir
    return quote(os.path.relpath(target, os.path.abspath(out)))
