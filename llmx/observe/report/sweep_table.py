"""A sweep as one table: what each trial was, how it ended, its loss, speed and memory.

The launcher plugin prints it when the last trial is over, failed ones included, and writes it to
``sweep.csv`` and ``sweep.md`` in the sweep's directory after every trial.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from llmx import text as human
from llmx.observe.page import block, table
from llmx.observe.report.screen import open_console, print_blocks
from llmx.observe.report.sweep_data import CSV, axes, value_of
from llmx.run.metrics import Metric, metric_of
from llmx.run.rundir import write_text
from llmx.run.sweepdir import NOT_RUN, STOPPED, WELL, Sweep, Trial
from llmx.text import plural, shorter_path

MARKDOWN = "sweep.md"
BEST_CONFIG = "best.yaml"
BEST = "*"
TITLES = {
    "train/loss": "train loss",
    "eval/loss": "eval loss",
    "tokens_per_s": "tokens/s",
    "memory_gib": "peak memory (GiB)",
    "seconds": "time",
}
"""Objectives that are no metric of a task, for a reader."""


def print_sweep(
    trials: Sequence[Trial],
    *,
    directory: Path,
    stream: TextIO,
    best: Sequence[str] = (),
    width: int | None = None,
    files: Sequence[str] = (CSV, MARKDOWN),
) -> None:
    """The table, why trials failed or were left out, the best (``best_lines``), and where all of it
    lies."""
    heads, rows = cells(trials)
    kinds = ["number", "words", "short", *["number"] * (len(heads) - 3)]
    content = table(rows, heads=heads, kinds=kinds)
    if content is not None:
        content["table"]["styles"] = [_style(trial) for trial in trials]
    has_best = any(BEST in cell for row in rows for cell in row)
    lines = [f"{BEST} best of its column"] if has_best else []
    listed = ", ".join([*files, "one directory per trial"])
    lines += [*failures(trials), *best, f"{directory}: {listed}"]
    console = open_console(stream, width=width)
    title = block("heading", f"Sweep: {headline(trials)}")
    text = block("text", "\n".join(f" {line}" for line in lines))
    print_blocks(console, [title, content, text], is_blank=False)


def _style(trial: Trial) -> str:
    if trial.failed:
        return "red"
    return "" if trial.outcome in WELL else "dim"


def write_sweep(trials: Sequence[Trial], *, directory: Path, best: Sequence[str] = ()) -> None:
    """``sweep.csv`` (every number as it is) and ``sweep.md`` (the table)."""
    write_text(directory / CSV, to_csv(trials, directory=directory))
    write_text(directory / MARKDOWN, to_markdown(trials, best=best))


def headline(trials: Sequence[Trial]) -> str:
    """``10 of 16 trials succeeded; 2 oom, 4 pruned``."""
    planned = any(trial.outcome == "planned" for trial in trials)
    done = sum(trial.outcome in WELL for trial in trials)
    counts: dict[str, int] = {}
    for trial in trials:
        if trial.outcome not in WELL:
            word = trial.outcome or trial.state
            counts[word] = counts.get(word, 0) + 1
    verb = "planned" if planned else "succeeded"
    listed = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"{done} of {plural(len(trials), 'trial')} {verb}" + (f"; {listed}" if listed else "")


def best_and_command(sweep: Sweep) -> tuple[str, str]:
    """The best trial, and what to type to train with it; both empty where no trial has a value."""
    best = sweep.best
    if best is None:
        return "", ""
    settings = settings_of(best, axes(sweep.trials))
    text = (
        f"best by {title_of(sweep.objective, sweep.trials)}: {best.label} {settings}  "
        f"({known_of(best, sweep.objective)})"
    )
    if sweep.has_own_objective and (sweep.directory / BEST_CONFIG).is_file():
        return text, experiment_command(sweep)
    return text, shlex.join(["python", "-m", "llmx", "reproduce", shorter_path(best.run_dir)])


def best_lines(sweep: Sweep) -> list[str]:
    """The best trial, and what to type to train with it, in lines of their own."""
    text, command = best_and_command(sweep)
    return [text, f"to train with it: {command}"] if text else []


def known_of(trial: Trial, objective: str) -> str:
    """The trial's value of the objective, and its memory: ``1,941 tokens/s, 4.60 GiB``."""
    value, numbers = trial.value(objective), []
    if value is not None:
        text = shown_value(objective, value, trial)
        unit = {"tokens_per_s": "tokens/s", "memory_gib": "GiB", "seconds": ""}.get(objective)
        title = title_of(objective, [trial]) if unit is None else ""
        numbers.append(f"{title} {text} {unit or ''}".strip())
    if trial.memory_gib is not None and objective != "memory_gib":
        numbers.append(f"{human.gib(trial.memory_gib)} GiB")
    return ", ".join(numbers)


def experiment_command(sweep: Sweep) -> str:
    """The command that trains with the ``best.yaml`` of a sweep."""
    config_dir = ["--config-dir", sweep.config_dir] if sweep.config_dir else []
    best = shorter_path(sweep.directory / BEST_CONFIG)
    return shlex.join(["python", "-m", "llmx", *config_dir, best])


def title_of(objective: str, trials: Sequence[Trial]) -> str:
    """An objective for a reader."""
    if objective in TITLES:
        return TITLES[objective]
    name = objective.partition("/")[2]
    return metrics_of(trials)[name].title if name in metrics_of(trials) else objective


def shown_value(objective: str, value: float, trial: Trial) -> str:
    """A value of an objective for a reader."""
    if not math.isfinite(value):
        return str(value)
    if objective == "tokens_per_s":
        return human.count(value)
    if objective == "memory_gib":
        return human.gib(value)
    if objective == "seconds":
        return human.duration(value)
    name = objective.partition("/")[2]
    return human.number(value) if name == "loss" else metric_of(name, trial.declared).shown(value)


def settings_of(trial: Trial, names: Sequence[str]) -> str:
    """The values of a trial on the axes: ``zero=stage1 batch.micro_batch=8``."""
    pairs = [(name, value_of(trial, name)) for name in names]
    text = " ".join(f"{name}={value}" for name, value in pairs if value is not None)
    return human.one_line(text, limit=1000)


def to_csv(trials: Sequence[Trial], *, directory: Path) -> str:
    """A line a trial, a column for each key of the sweep; numbers without rounding."""
    names, metrics = axes(trials), metrics_of(trials)
    same_as = ["same_as"] if any(trial.same_as is not None for trial in trials) else []
    before = ["outcome", *same_as, "steps", "loss", "eval_loss"]
    after = ["tokens_per_s", "memory_gib", "seconds"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["trial", *names, *before, *metrics, *after, "run_dir", "cause", "fix"])
    for trial in trials:
        writer.writerow(
            [
                trial.index,
                *(value_of(trial, name) for name in names),
                trial.outcome or trial.state,
                *(getattr(trial, name) for name in before[1:]),
                *(trial.metrics.get(name) for name in metrics),
                *(getattr(trial, name) for name in after),
                _run_dir(trial, directory),
                trial.cause,
                trial.fix,
            ]
        )
    return stream.getvalue()


def to_markdown(trials: Sequence[Trial], *, best: Sequence[str] = ()) -> str:
    """The table for a note or an issue; ``best``: lines on the best trial."""
    head, rows = cells(trials)
    lines = [markdown_row(head), markdown_row(["---"] * len(head)), *map(markdown_row, rows)]
    if any(BEST in cell for row in rows for cell in row):
        lines += ["", f"{BEST} best of its column"]
    lines += [line for text in (*failures(trials), *best) for line in ("", text)]
    return "\n".join(lines) + "\n"


def failures(trials: Sequence[Trial]) -> list[str]:
    """Say why trials failed or were left out, and what helps; one line for all trials of
    which the same is to be said."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        apart = trial.failed or trial.outcome in (*NOT_RUN, STOPPED)
        text = "; ".join(part for part in (trial.cause, trial.fix) if part)
        if apart and text and not (trial.outcome == "same" and trial.same_as is not None):
            groups.setdefault((trial.word, text), []).append(trial)
    return [
        f"{_labels(group)} {word}: {human.one_line(text, limit=400)}"
        for (word, text), group in groups.items()
    ]


def _labels(trials: Sequence[Trial]) -> str:
    """The numbers of trials in brackets: ``[3]``, ``[3, 5, 6]``."""
    return f"[{', '.join(str(trial.index) for trial in trials)}]"


@dataclass(frozen=True)
class Column:
    """A column of numbers of the table."""

    title: str
    better: Callable[[Any], Any] | None
    """``min``, ``max``, or None where neither is better."""
    values: list[Any]
    shown: Callable[[Any], str]


def columns_of(trials: Sequence[Trial]) -> list[Column]:
    """The columns of numbers; those that nobody has a number for are left out."""
    columns = [
        Column("steps", None, [t.steps for t in trials], lambda v: f"{v:,}"),
        Column("loss", min, [t.loss for t in trials], human.number),
        Column("eval loss", min, [t.eval_loss for t in trials], human.number),
    ]
    for name, metric in metrics_of(trials).items():
        better = {True: max, False: min, None: None}[metric.higher_is_better]
        values = [trial.metrics.get(name) for trial in trials]
        columns.append(Column(metric.title, better, values, metric.shown))
    columns += [
        Column("tokens/s", max, [t.tokens_per_s for t in trials], human.count),
        Column("GiB", min, [t.memory_gib for t in trials], human.gib),
        Column("time", None, [t.seconds for t in trials], human.duration),
    ]
    return [column for column in columns if any(value is not None for value in column.values)]


def cells(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: index, settings, outcome, then the numbers, the best of each marked."""
    names = axes(trials)
    rows = [[str(t.index), settings_of(t, names), t.word] for t in trials]
    columns = columns_of(trials)
    for column in columns:
        text_of, values = column.shown, column.values
        good = [v for v, trial in zip(values, trials, strict=True) if trial.outcome == "ok"]
        numbers = [value for value in good if value is not None]
        finite = [value for value in numbers if value == value]
        # By what is shown: of two that read alike, neither is the better one.
        is_ranked = column.better is not None and len({*map(text_of, finite)}) > 1
        best = text_of(column.better(finite)) if is_ranked and column.better else None
        for trial, row, value in zip(trials, rows, values, strict=True):
            cell = "" if value is None else text_of(value)
            row.append(f"{cell}{BEST}" if trial.outcome == "ok" and cell == best else cell)
    return ["#", "trial", "outcome", *(column.title for column in columns)], rows


def metrics_of(trials: Sequence[Trial]) -> dict[str, Metric]:
    """Every metric of any trial, in the order in which they are met."""
    return {name: metric_of(name, trial.declared) for trial in trials for name in trial.metrics}


def _run_dir(trial: Trial, directory: Path) -> str:
    """The run directory below ``directory``; empty where there is none."""
    path = trial.run_dir
    if not path.is_dir():
        return ""
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)


def markdown_row(row: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
