"""A sweep as one table: what each trial was, how it ended, its loss, speed and memory.

The launcher plugin prints it when the last trial is over, failed ones included, and writes it to
``sweep.csv`` and ``sweep.md`` in the sweep's directory after every trial.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from llmx import text as human
from llmx.errors import LlmxError
from llmx.observe.report.run_data import RunData, load_run
from llmx.observe.report.screen import open_console
from llmx.run.metrics import Metric, metric_of
from llmx.run.rundir import write_text
from llmx.text import plural

CSV, MARKDOWN = "sweep.csv", "sweep.md"
BEST = "*"


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep; None where a number is not known."""

    index: int
    overrides: tuple[str, ...]
    run_dir: Path
    outcome: str
    """As in ``result.json``; ``planned`` of a dry run, ``refused`` where it was never started."""
    cause: str = ""
    fix: str = ""
    steps: int | None = None
    loss: float | None = None
    """Of training: the mean of the last logged interval where it is known, else its last step."""
    eval_loss: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """What the task measures besides the loss, by name, at the last evaluation that did."""
    declared: Mapping[str, Metric] = field(default_factory=dict)
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    """Of the fullest rank; of a trial that was only planned, as predicted."""
    seconds: float | None = None


def read_trial(
    index: int, overrides: Sequence[str], run_dir: Path, *, error: BaseException | None = None
) -> Trial:
    """A trial as its run directory tells; ``error``: what ended it otherwise."""
    words = tuple(overrides)
    try:
        data = load_run(run_dir)
    except LlmxError:
        outcome = "refused" if isinstance(error, LlmxError) else "failed" if error else "ok"
        cause = f"{error}" if isinstance(error, LlmxError) else repr(error) if error else ""
        return Trial(index, words, run_dir, outcome, cause)
    return _of_run(index, words, data, error)


def _of_run(
    index: int, overrides: tuple[str, ...], data: RunData, error: BaseException | None
) -> Trial:
    values, result = data.summary, data.result or {}
    outcome, cause = str(result.get("outcome") or ""), str(result.get("cause") or "")
    if not outcome:
        outcome = "failed" if error or data.was_started else "planned"
        cause = str(error or "")
    memory = values.get("memory_gib_max")
    if memory is None and outcome == "planned":
        parts = [plan.items() for plan in data.plan.get("memory") or []]
        apart = ("host_gib", "capacity_gib")
        totals = [sum(v for k, v in p if k.endswith("_gib") and k not in apart) for p in parts]
        memory = max(totals, default=None)
    last = data.train[-1] if data.train else {}
    loss = last.get("loss_mean")
    points = data.metric_points("eval")
    trained = {name: [p for p in found if p[0] > 0] for name, found in points.items()}
    took = (result.get("ended") or 0.0) - (result.get("started") or 0.0)
    return Trial(
        index,
        overrides,
        data.run.root,
        outcome,
        cause,
        str(result.get("fix") or ""),
        steps=values.get("steps"),
        loss=loss if loss is not None else values.get("final_loss"),
        eval_loss=values.get("final_eval_loss"),
        metrics={name: p[-1][1] if p else None for name, p in trained.items()},
        declared=data.declared,
        tokens_per_s=values.get("tokens_per_s"),
        memory_gib=memory,
        seconds=took if took > 0 else None,
    )


def axes(trials: Sequence[Trial]) -> list[str]:
    """The keys that differ between trials, in the order of the command line."""
    values: dict[str, set[str]] = {}
    for trial in trials:
        for word in trial.overrides:
            key, _, value = word.partition("=")
            values.setdefault(key.lstrip("+"), set()).add(value)
    found = [key for key, seen in values.items() if len(seen) > 1]
    return found or list(values)


def print_sweep(trials: Sequence[Trial], *, directory: Path, stream: TextIO) -> None:
    """The table, why each failed trial failed, and where all of it lies."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = open_console(stream)
    head, rows = _cells(trials)
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for at, name in enumerate(head):
        left = at in (1, 2)
        grid.add_column(
            name,
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=at != 1,
        )
    for trial, row in zip(trials, rows, strict=True):
        style = "" if trial.outcome in ("ok", "planned") else "red"
        grid.add_row(*(Text(cell, style="bold" if BEST in cell else style) for cell in row))
    planned = any(trial.outcome == "planned" for trial in trials)
    done = sum(trial.outcome in ("ok", "planned") for trial in trials)
    verb = "planned" if planned else "ended well"
    console.print()
    console.print(Text(f"Sweep: {done} of {plural(len(trials), 'trial')} {verb}", style="bold"))
    console.print(grid)
    if any(BEST in cell for row in rows for cell in row):
        console.print(f" {BEST} best of its column")
    for line in failures(trials):
        console.print(Text(f" {line}"), soft_wrap=True)
    console.print(Text(f" {directory}: {CSV}, {MARKDOWN}, a directory a trial"), soft_wrap=True)


def write_sweep(trials: Sequence[Trial], *, directory: Path) -> None:
    """``sweep.csv`` (every number as it is) and ``sweep.md`` (the table)."""
    write_text(directory / CSV, to_csv(trials, directory=directory))
    write_text(directory / MARKDOWN, to_markdown(trials))


def to_csv(trials: Sequence[Trial], *, directory: Path) -> str:
    """A line a trial, a column for each key of the sweep; numbers without rounding."""
    names = axes(trials)
    before, after = ("steps", "loss", "eval_loss"), ("tokens_per_s", "memory_gib", "seconds")
    metrics = _metrics(trials)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["trial", *names, "outcome", *before, *metrics, *after, "run_dir", "cause", "fix"]
    )
    for trial in trials:
        values = _values(trial)
        measured = [
            *(getattr(trial, name) for name in before),
            *(trial.metrics.get(name) for name in metrics),
            *(getattr(trial, name) for name in after),
        ]
        writer.writerow(
            [
                trial.index,
                *(values.get(name, "") for name in names),
                trial.outcome,
                *("" if value is None else value for value in measured),
                _near(trial.run_dir, directory) if trial.run_dir.is_dir() else "",
                trial.cause,
                trial.fix,
            ]
        )
    return stream.getvalue()


def to_markdown(trials: Sequence[Trial]) -> str:
    """The table for a note or an issue."""
    head, rows = _cells(trials)
    lines = [_markdown(head), _markdown(["---"] * len(head)), *map(_markdown, rows)]
    if any(BEST in cell for row in rows for cell in row):
        lines += ["", f"{BEST} best of its column"]
    lines += [line for each in failures(trials) for line in ("", each)]
    return "\n".join(lines) + "\n"


def failures(trials: Sequence[Trial]) -> list[str]:
    """A line for each trial that did not end well: why, and what helps."""
    lines = []
    for trial in trials:
        if trial.outcome not in ("ok", "planned") and (trial.cause or trial.fix):
            text = "; ".join(part for part in (trial.cause, trial.fix) if part)
            lines.append(f"[{trial.index}] {trial.outcome}: {human.one_line(text, limit=400)}")
    return lines


def _cells(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Head and rows; columns that nobody has a number for are left out."""
    columns: list[tuple[str, Any, list[Any], Callable[[Any], str]]] = [
        ("steps", None, [t.steps for t in trials], lambda v: f"{v:,}"),
        ("loss", min, [t.loss for t in trials], human.number),
        ("eval loss", min, [t.eval_loss for t in trials], human.number),
    ]
    for name, metric in _metrics(trials).items():
        best_of = {True: max, False: min, None: None}[metric.higher_is_better]
        columns.append((metric.title, best_of, [t.metrics.get(name) for t in trials], metric.shown))
    columns += [
        ("tokens/s", max, [t.tokens_per_s for t in trials], human.count),
        ("GiB", min, [t.memory_gib for t in trials], human.gib),
        ("time", None, [t.seconds for t in trials], human.duration),
    ]
    names = axes(trials)
    rows = [
        [
            str(t.index),
            " ".join(f"{n}={_values(t)[n]}" for n in names if n in _values(t)),
            t.outcome,
        ]
        for t in trials
    ]
    head = ["#", "trial", "outcome"]
    for title, best_of, values, shown in columns:
        if all(value is None for value in values):
            continue
        head.append(title)
        good = [v for v, trial in zip(values, trials, strict=True) if trial.outcome == "ok"]
        known = [value for value in good if value is not None]
        finite = [value for value in known if value == value]
        # By what is shown: of two that read alike, neither is the better one.
        best = shown(best_of(finite)) if best_of and len({*map(shown, finite)}) > 1 else None
        for trial, row, value in zip(trials, rows, values, strict=True):
            cell = "" if value is None else shown(value)
            row.append(f"{cell}{BEST}" if trial.outcome == "ok" and cell == best else cell)
    return head, rows


def _metrics(trials: Sequence[Trial]) -> dict[str, Metric]:
    """Every metric of any trial, in the order in which they are met."""
    return {name: metric_of(name, trial.declared) for trial in trials for name in trial.metrics}


def _values(trial: Trial) -> dict[str, str]:
    pairs = (word.partition("=") for word in trial.overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def _near(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def best_of(trials: Sequence[Trial], objective: str, mode: str) -> Trial | None:
    """The trial that is best at the objective; None where none that ended well has a value."""
    kind, _, name = objective.rpartition("/")
    found = []
    for trial in trials:
        value = {
            "tokens_per_s": trial.tokens_per_s,
            "train/loss": trial.loss,
            "eval/loss": trial.eval_loss,
        }.get(objective, trial.metrics.get(name) if kind == "eval" else None)
        if trial.outcome == "ok" and value is not None and value == value:
            found.append((-value if mode == "max" else value, trial.memory_gib or 0.0, trial))
    return min(found, key=lambda each: (each[0], each[1], each[2].index))[2] if found else None
