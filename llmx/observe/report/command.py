"""Report on a run or on a sweep: tables here, pictures and an HTML page beside.

    python -m llmx report RUN_DIR [--width N]
    python -m llmx report SWEEP_DIR [--out DIR] [--objective NAME] [--width N]

Reads directories only; works for what still trains, and for what failed. Of a run it writes
``loss.png`` and ``report.html``, of a sweep ``sweep.csv``, ``sweep.md`` and ``sweep.html``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from llmx.errors import ConfigError, DiskFullError, did_you_mean, disk_is_full
from llmx.observe.page import block, document, table
from llmx.observe.page.run import completions, generated, run_page, step_of_samples
from llmx.observe.page.sweep import report_sweep
from llmx.observe.report import wording
from llmx.observe.report.figure import draw_losses
from llmx.observe.report.screen import open_console, print_blocks
from llmx.observe.report.sweep_data import load_sweep
from llmx.observe.report.sweep_table import measures
from llmx.observe.run import Run, load_run
from llmx.run.rundir import RunDir, write_text

SHOWN_COMPLETIONS = 6
SHOWN_SAMPLES = 4
WIDEST_TABLE = 110
"""Columns beyond which a table of sentences is harder to read, not easier."""
MARKS = {"ok": ("✓", "bold green"), "failed": ("✗", "bold red"), "open": ("…", "bold yellow")}


def run(options: argparse.Namespace) -> int:
    """The command; returns the exit code (0 also for a run that failed: it is reported)."""
    path = Path(options.run_dir)
    if RunDir(path).config.is_file():
        if options.out or options.objective:
            flag = "--out" if options.out else "--objective"
            raise ConfigError(f"{flag} is for sweeps, and {path} is a run. Leave {flag} out.")
        return _report(path, width=options.width)
    sweep, objective = load_sweep(path), options.objective
    names = [name for name in measures(sweep.trials) if name != "steps"]
    if objective and objective not in names:
        raise ConfigError(
            f"--objective {objective}: no trial has such a number."
            f"{did_you_mean(objective, names)} Choose one of {', '.join(names)}."
        )
    if objective and objective != sweep.objective:
        sweep = replace(sweep, objective=objective, has_own_objective=False)
    report_sweep(sweep, options.out or path, width=options.width)
    return 0


def _report(run_dir: Path, *, width: int | None) -> int:
    run = load_run(run_dir)
    code = 0
    try:
        draw_losses([run], run.dir.loss_curve)  # where there is a loss
        write_text(run.dir.report, document(run.name, run_page(run)))
    except OSError as error:
        # A full or read-only disk: what can be printed is printed all the same.
        run.damage.append(f"{error.filename or run.dir.root}: not written ({error.strerror}).")
        code = DiskFullError.exit_code if disk_is_full(error) else 0
    print_report(run, width=width)
    return code


def print_report(run: Run, *, width: int | None = None) -> None:
    """Print the end of a run: result, completions, summary, warnings, where it all lies."""
    from rich.text import Text

    console = open_console(sys.stdout, width=width)
    state, line = wording.headline(run)
    mark, style = MARKS[state]
    console.print()
    console.print(Text(f"{mark} {run.name}: {line}", style=style))
    limit = 3 * min(console.width, WIDEST_TABLE) // 5  # about three lines of a cell
    print_blocks(console, [table(wording.reasons(run))])
    blocks = [
        block("code", wording.traceback_excerpt(run)),
        *completions(run, count=SHOWN_COMPLETIONS, limit=limit),
        block("heading", step_of_samples(run) if run.rollouts else ""),
        *generated(run, count=SHOWN_SAMPLES, limit=limit),
        table(wording.summary_rows(run, is_brief=True)),
        block("list", wording.warnings(run)),
        table(wording.locations(run), kinds=("name", "code")),
    ]
    print_blocks(console, blocks, is_blank=False)
