"""A sweep as one table: what each trial was, how it ended, its loss, speed and memory.

The launcher plugin prints it when the last trial is over, failed ones included, and writes it to
``sweep.csv`` and ``sweep.md`` in the sweep's directory after every trial.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from llmx import text as human
from llmx.observe.page import block, table
from llmx.observe.report.screen import open_console, print_blocks
from llmx.observe.report.sweep_data import CSV, axes, value_of
from llmx.run.metrics import metric_of
from llmx.run.rundir import write_text
from llmx.run.sweepdir import NOT_RUN, STOPPED, WELL, Sweep, Trial
from llmx.text import plural, shorter_path

MARKDOWN = "sweep.md"
BEST_CONFIG = "best.yaml"
BEST = "*"
CSV_NAMES = {"train/loss": "loss", "eval/loss": "eval_loss"}
"""Heads of columns that are named otherwise than the objective."""


def print_sweep(
    sweep: Sweep, *, directory: Path, stream: TextIO, width: int | None, files: Sequence[str]
) -> None:
    """The table, why trials failed or were left out, the best, and where all of it lies."""
    trials = sweep.trials
    heads, rows = cells(trials)
    kinds = ["number", "words", "short", *["number"] * (len(heads) - 3)]
    content = table(rows, heads=heads, kinds=kinds)
    if content is not None:
        content["table"]["styles"] = [
            "red" if trial.failed else "" if trial.outcome in WELL else "dim" for trial in trials
        ]
    has_best = any(BEST in cell for row in rows for cell in row)
    lines = [f"{BEST} best of its column"] if has_best else []
    listed = ", ".join([*files, "one directory per trial"])
    lines += [*failures(trials), *best_lines(sweep), f"{directory}: {listed}"]
    console = open_console(stream, width=width)
    title = block("heading", f"Sweep: {headline(trials)}")
    text = block("text", "\n".join(f" {line}" for line in lines))
    print_blocks(console, [title, content, text], is_blank=False)


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
        f"best by {measure_of(sweep.objective, sweep.trials).title}: {best.label} {settings}  "
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
    texts = []
    for name in dict.fromkeys((objective, "memory_gib")):
        value, measure = trial.value(name), measure_of(name, [trial])
        if value is not None:
            texts.append(measure.sentence.replace("{}", measure.shown(value)))
    return ", ".join(texts)


def experiment_command(sweep: Sweep) -> str:
    """The command that trains with the ``best.yaml`` of a sweep."""
    config_dir = ["--config-dir", sweep.config_dir] if sweep.config_dir else []
    best = shorter_path(sweep.directory / BEST_CONFIG)
    return shlex.join(["python", "-m", "llmx", *config_dir, best])


def settings_of(trial: Trial, names: Sequence[str]) -> str:
    """The values of a trial on the axes: ``zero=stage1 batch.micro_batch=8``."""
    pairs = [(name, value_of(trial, name)) for name in names]
    text = " ".join(f"{name}={value}" for name, value in pairs if value is not None)
    return human.one_line(text, limit=1000)


def to_csv(trials: Sequence[Trial], *, directory: Path) -> str:
    """A line a trial, a column for each key of the sweep; numbers without rounding."""
    names, numbers = axes(trials), measures(trials)
    same_as = ["same_as"] if any(trial.same_as is not None for trial in trials) else []
    heads = [CSV_NAMES.get(name, name.removeprefix("eval/")) for name in numbers]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["trial", *names, "outcome", *same_as, *heads, "run_dir", "cause", "fix"])
    for trial in trials:
        settings = [value_of(trial, name) for name in names]
        ending = [trial.outcome or trial.state, *(getattr(trial, name) for name in same_as)]
        values = [trial.value(name) for name in numbers]
        place = [_run_dir(trial, directory), trial.cause, trial.fix]
        writer.writerow([trial.index, *settings, *ending, *values, *place])
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
        is_said = text or trial.failed
        if apart and is_said and not (trial.outcome == "same" and trial.same_as is not None):
            groups.setdefault((trial.word, text), []).append(trial)
    return [
        f"{sorted(trial.index for trial in group)} {word}"
        + (f": {human.one_line(text, limit=400)}" if text else "")
        for (word, text), group in groups.items()
    ]


@dataclass(frozen=True)
class Measure:
    """A number by which trials are compared, for a reader."""

    title: str
    better: Callable[[Any], Any] | None
    """``min``, ``max``, or None where neither is better."""
    shown: Callable[[float], str]
    sentence: str = "{}"
    """The value with its unit or its name."""
    head: str = ""
    """The head of its column, where that is shorter than the title."""
    unit: str = ""
    """The unit of a bare number, where the title has none: ``%`` or ``s``."""


def measures(trials: Sequence[Trial]) -> dict[str, Measure]:
    """Objective -> what readers are shown of it, in the order of the columns."""
    numbers = {
        "steps": Measure("steps", None, "{:,}".format),
        "train/loss": Measure("train loss", min, human.number, "train loss {}", "loss"),
        "eval/loss": Measure("eval loss", min, human.number, "eval loss {}"),
    }
    # Every metric of any trial, in the order in which they are met.
    met = {name: metric_of(name, trial.declared) for trial in trials for name in trial.metrics}
    for name, metric in met.items():
        better = {True: max, False: min, None: None}[metric.higher_is_better]
        sentence = f"{metric.title} {{}}"
        unit = "%" if metric.format == "percent" else ""
        numbers[f"eval/{name}"] = Measure(metric.title, better, metric.shown, sentence, unit=unit)
    return numbers | {
        "tokens_per_s": Measure("tokens/s", max, human.count, "{} tokens/s"),
        "memory_gib": Measure("peak memory (GiB)", min, human.gib, "{} GiB", "GiB"),
        "seconds": Measure("time", None, human.duration, unit="s"),
    }


def measure_of(objective: str, trials: Sequence[Trial]) -> Measure:
    """One of ``measures``, or a number of the ``train`` lines."""
    name = objective.partition("/")[2]
    declared = next((trial.declared for trial in trials if name in trial.declared), {})
    of_train_lines = Measure(objective, None, metric_of(name, declared).shown, f"{objective} {{}}")
    return measures(trials).get(objective, of_train_lines)


def cells(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: index, settings, outcome, then the numbers that any trial has, the best of
    each marked."""
    heads, names = ["#", "trial", "outcome"], axes(trials)
    rows = [[str(t.index), settings_of(t, names), t.word] for t in trials]
    for name, measure in measures(trials).items():
        values = [trial.value(name) for trial in trials]
        if all(value is None for value in values):
            continue
        heads.append(measure.head or measure.title)
        texts = ["" if value is None else measure.shown(value) for value in values]
        good = [v for v, trial in zip(values, trials, strict=True) if trial.outcome == "ok"]
        finite = [value for value in good if value is not None and value == value]
        # By what is shown: of two that read alike, neither is the better one.
        is_ranked = measure.better is not None and len({*map(measure.shown, finite)}) > 1
        best = measure.shown(measure.better(finite)) if is_ranked and measure.better else None
        for trial, row, text in zip(trials, rows, texts, strict=True):
            row.append(f"{text}{BEST}" if trial.outcome == "ok" and text == best else text)
    return heads, rows


def _run_dir(trial: Trial, directory: Path) -> str:
    """The run directory below ``directory``; empty where there is none."""
    path = trial.run_dir
    if not path.is_dir():
        return ""
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)


def markdown_row(row: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
