"""``sweep.html``: a sweep in one file that opens anywhere: the best trial, maps, curves, the table.

Nothing is loaded from a network; every text of the sweep is escaped. A few lines of script sort the
table; without them it is in the order of the trials.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from pathlib import Path
from urllib.parse import quote

from llmx import text as human
from llmx.observe.report import sweep_charts
from llmx.observe.report.markup import bullets, document, escaped, heading, pairs, pre, prose
from llmx.observe.report.sweep_data import axes, value_of
from llmx.observe.report.sweep_table import (
    BEST,
    best_command,
    best_lines,
    cells,
    columns_of,
    failures,
    headline,
    known_of,
    settings_of,
    title_of,
    write_sweep,
)
from llmx.run.rundir import write_text
from llmx.run.sweepdir import ENDED, RUNNING, WAITING, WELL, Sweep, Trial

PAGE = "sweep.html"

STYLE = (
    sweep_charts.STYLE
    + """
body { max-width: 82rem; } .trials td { max-width: 30rem; }
.trials th button { all: unset; cursor: pointer; font-weight: 600; }
.trials th button:focus-visible { outline: 2px solid #2f81c7; }
.trials th[aria-sort=ascending] button::after { content: " ↑"; }
.trials th[aria-sort=descending] button::after { content: " ↓"; }
.trials tr.top td { font-weight: 600; } .trials tr.bad td.outcome { color: #c9302c; }
.trials tr.off { opacity: .65; }
@media (prefers-color-scheme: dark) { .trials tr.bad td.outcome { color: #ff7b72; } }
"""
)

SCRIPT = """
for (const table of document.querySelectorAll('table.trials')) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(each => each.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = row => row.cells[at].dataset.v;
    const order = (a, b) => {
      if (a === '' || b === '') return (a === '') - (b === '');
      const sign = down ? -1 : 1, x = Number(a), y = Number(b);
      return sign * (isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y);
    };
    [...body.rows].sort((a, b) => order(key(a), key(b))).forEach(row => body.append(row));
  }));
}
"""


def write_report(sweep: Sweep, out: Path) -> None:
    """Write ``sweep.csv``, ``sweep.md`` and ``sweep.html`` into ``out``."""
    out = Path(os.path.abspath(out))  # as the run directories are: paths in it are relative
    write_sweep(sweep.trials, directory=out, best=best_lines(sweep))
    write_text(out / PAGE, sweep_page(sweep, out=out))


def sweep_page(sweep: Sweep, *, out: Path) -> str:
    """The page as text; links are relative to ``out``, where it will lie."""
    trials = sweep.trials

    def link(trial: Trial) -> str:
        return _link(trial, out)

    maps = sweep_charts.heat_maps(sweep, link=link)
    over = sweep_charts.lines_over_axes(sweep)
    parallel = sweep_charts.parallel_coordinates(sweep)
    curves = sweep_charts.loss_curves(sweep)
    ended_well = any(trial.outcome in WELL for trial in trials)
    state = "open" if not sweep.complete else "ok" if ended_well else "failed"
    title = (
        " + ".join(dict.fromkeys(trial.sweep for trial in trials if trial.sweep))
        or sweep.directory.name
    )
    if not re.search("[A-Za-z]", title) and axes(trials):  # Hydra's directory, a date and a time
        title = f"Sweep over {', '.join(axes(trials))}"
    parts = [
        f'<h1 class="{state}">{prose(f"{title}: {headline(trials)}")}</h1>',
        _best(sweep),
        heading("Summary", pairs(_summary(sweep))),
        heading("Maps", maps),
        heading("Over one axis", over),
        heading("All axes", parallel),
        heading("Loss", curves),
        heading("Trials", _table(sweep, out)),
        heading("Failed and left out", bullets(failures(trials))),
        heading("Warnings", bullets(sweep.warnings)),
    ]
    return document(title, parts, style=STYLE, script=SCRIPT)


def _best(sweep: Sweep) -> str:
    best = sweep.best
    if best is None:
        return ""
    name = title_of(sweep.objective, sweep.trials)
    numbers = known_of(best, sweep.objective)
    command = best_command(sweep, best)
    settings = settings_of(best, axes(sweep.trials))
    return (
        f"<p><b>Best by {escaped(name)}: {prose(f'{best.label} {settings}')}</b> "
        f"({prose(numbers)}). To train with it:</p>{pre(command)}"
    )


def _summary(sweep: Sweep) -> list[tuple[str, str]]:
    trials = sweep.trials
    rows = []
    if sweep.words:
        rows.append(("typed", shlex.join(sweep.words)))
    better = "more" if sweep.mode == "max" else "less"
    rows.append(("objective", f"{title_of(sweep.objective, trials)}, {better} is better"))
    counts: dict[str, int] = {}
    for trial in trials:
        word = trial.outcome or trial.state
        counts[word] = counts.get(word, 0) + 1
    rows.append(("trials", ", ".join(f"{count} {word}" for word, count in counts.items())))
    begins = [trial.started for trial in trials if trial.started]
    began = sweep.started or (min(begins) if begins else None)
    ends = [trial.ended for trial in trials if trial.ended]
    if began:
        rows.append(("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))))
        if ends and max(ends) > began:
            word = "time" if all(trial.state == ENDED for trial in trials) else "time so far"
            rows.append((word, human.duration(max(ends) - began)))
    rows.append(("directory", str(sweep.directory)))
    return rows


def _link(trial: Trial, out: Path) -> str:
    """To the run's report, else to its directory, relative to ``out``; empty where it has none."""
    report = trial.run_dir / "report.html"
    if not trial.run_dir.is_dir():
        return ""
    target = report if report.is_file() else trial.run_dir
    try:
        near = os.path.relpath(target, os.path.abspath(out))
    except ValueError:  # another drive
        return target.as_uri()
    return quote(near)


def _table(sweep: Sweep, out: Path) -> str:
    trials = sweep.trials
    names, columns = axes(trials), columns_of(trials)
    _, rows = cells(trials)
    heads = [
        ("#", "number"),
        ("run", "short"),
        *((name, "short") for name in names),
        ("outcome", "short outcome"),
    ]
    heads += [(column.title, "number") for column in columns]
    head = "".join(
        f'<th class="{kind}"><button type="button">{escaped(name)}</button></th>'
        for name, kind in heads
    )
    best, lines = sweep.best, []
    for at, (trial, row) in enumerate(zip(trials, rows, strict=True)):
        href, run = _link(trial, out), trial.run_dir.name
        cells_of_row = [(str(at), str(trial.index), False)]
        anchor = f'<a href="{escaped(href)}">{escaped(run)}</a>' if href else ""
        cells_of_row.append((run if href else "", anchor, True))
        for name in names:
            typed = value_of(trial, name) or ""
            cells_of_row.append((typed, typed, False))
        cells_of_row.append(
            (trial.word, f"{trial.word}{BEST}" if trial is best else trial.word, False)
        )
        for column, cell in zip(columns, row[3:], strict=True):
            value = column.values[at]
            is_finite = value is not None and math.isfinite(value)
            cells_of_row.append((repr(value) if is_finite else "", cell, False))
        shown = "".join(
            f'<td class="{kind}" data-v="{escaped(key)}">{text if raw else prose(text)}</td>'
            for (key, text, raw), (_, kind) in zip(cells_of_row, heads, strict=True)
        )
        lines.append(f'<tr class="{_row_class(trial, best)}">{shown}</tr>')
    note = f"<p>Click a column header to sort; {BEST} marks the best value, and the best trial.</p>"
    return (
        f'{note}<div class="scroll"><table class="trials"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _row_class(trial: Trial, best: Trial | None) -> str:
    if trial is best:
        return "top"
    if trial.failed:
        return "bad"
    return "off" if trial.state in (WAITING, RUNNING) or trial.outcome in ("pruned", "same") else ""
