"""``report.html``: the whole run in one file that opens anywhere, also years later.

No script, nothing loaded from a network; every text of the run is escaped.
"""

from __future__ import annotations

import shlex
import time
from typing import Any

from llmx import text as human
from llmx.config import Experiment, to_dict
from llmx.observe.report import step_time, wording
from llmx.observe.report.chart import BLUE, GRAY, ORANGE, RED, Line, Point, chart
from llmx.observe.report.figure import SMOOTHED_FROM, points, smoothed
from llmx.observe.report.markup import (
    Html,
    bullets,
    details,
    document,
    escaped,
    heading,
    pre,
    table,
)
from llmx.observe.report.run_data import RunData
from llmx.redact import redact
from llmx.run.metrics import metric_of
from llmx.run.metrics.lines import scalars, step_of
from llmx.run.provenance.differences import flattened, short_value
from llmx.text import plural

MAX_COMPLETIONS = 50
LONGEST_COMPLETION = 1_500
"""Characters; ``samples.json`` has the whole."""
LONGEST_FILE = 60_000
"""Characters of a file that is shown (provenance.json may hold a diff of megabytes)."""
NOT_SHOWN = ("schema_version", "name", "run_dir", "dry_run", "hardware.hosts", "hardware.devices",
             "tokenizer.")  # fmt: skip
"""Beginnings of keys: those of the run alone, of other commands, and what the plan shows better."""


def page(data: RunData) -> str:
    """The whole page as text, from the headline to the files of the run."""
    headline = wording.headline(data)
    reasons = [row for row in (("cause", headline.cause), ("fix", headline.fix)) if row[1]]
    places = [(name, Html(f"<code>{escaped(at)}</code>")) for name, at in wording.locations(data)]
    files = ("config.yaml", "plan.json", "ds_config.json", "provenance.json", "result.json")
    parts = [
        f'<h1 class="{headline.state}">{escaped(f"{data.name}: {headline.line}")}</h1>',
        table(reasons),
        pre(wording.traceback_excerpt(data)),
        heading("Summary", table(wording.summary_rows(data))),
        heading("Loss", _loss(data)),
        _other_curves(data),
        heading("One step by rank", step_time.steps_table(data)),
        heading("Evaluation", _tables(data)),
        heading("Completions", _completions(data)),
        _generated(data),
        heading("Warnings", bullets(wording.warnings(data))),
        heading("Attempts", _attempts(data) + bullets(wording.events(data))),
        heading("Data", _data(data)),
        heading("Config", _config(data)),
        heading("Plan", _plan(data.plan)),
        heading("Files and commands", table(places)),
        heading("Evaluations", _evaluations(data)),
        *(details(name, _text_of(data, name)) for name in files),
    ]
    return document(data.name, parts)


def _loss(data: RunData) -> str:
    """Train loss (smoothed where there is much of it), evaluations, resumes."""
    train, evals = points(data.train, "loss"), points(data.evals, "loss")
    means = points(data.train, "loss_mean")
    lines = []
    if means:
        lines.append(Line(train, "train, each logged step", BLUE, "faint"))
        lines.append(Line(means, "mean since the previous line"))
    elif len(train) >= SMOOTHED_FROM:
        smooth = smoothed([value for _, value in train])
        steps = [step for step, _ in train]
        lines.append(Line(train, "", BLUE, "faint"))
        lines.append(Line(list(zip(steps, smooth, strict=True)), "train, smoothed"))
    elif train:
        lines.append(Line(train, "train"))
    if evals:
        # A line through two points (before and after) would look like a measured curve.
        lines += [Line(evals, "", ORANGE)] * (len(evals) > 2)
        lines.append(Line(evals, "evaluation", ORANGE, "dots"))
    resumed = {step_of(record) for record in data.records if record.get("event") == "resumed"}
    for name, steps, colour in (
        ("resumed", sorted(resumed), GRAY),
        ("loss is NaN", [step for step, value in train if value != value], RED),
    ):
        if steps:
            lines.append(Line([(step, 0.0) for step in steps], name, colour, "mark"))
    picture = chart(lines)
    return f"<p>nats per target token, over optimizer steps</p>{picture}" if picture else ""


def _other_curves(data: RunData) -> str:
    """Learning rate, gradient norm, speed, and every metric of the task, one small chart each."""
    curves: list[tuple[str, list[Point], str]] = [
        ("Learning rate", [*points(data.train, "lr")], GRAY),
        ("Gradient norm", [*points(data.train, "grad_norm")], BLUE),
        ("Tokens/s", [*points(data.train, "tokens_per_s")], BLUE),
    ]
    for kind, colour, least in (("train", BLUE, 2), ("eval", ORANGE, 3)):
        for name, measured in data.metric_points(kind).items():
            # A line through two evaluations (before and after) would look like a measured curve.
            if len(measured) >= least:
                metric = metric_of(name, data.declared)
                scale, unit = (100, " (%)") if metric.format == "percent" else (1, "")
                of = ", evaluation" if kind == "eval" and "train" in metric.kinds else ""
                title = f"{metric.title[:1].upper()}{metric.title[1:]}{of}{unit}"
                curves.append((title, [(step, scale * value) for step, value in measured], colour))
    cells = [
        f"<div><h3>{escaped(title)}</h3>{picture}</div>"
        for title, curve, colour in curves
        if len(curve) > 1 and (picture := chart([Line(curve, colour=colour)]))
    ]
    return f'<div class="small">{"".join(cells)}</div>' if cells else ""


def _tables(data: RunData) -> str:
    """The tables of the newest evaluation, such as a confusion matrix."""
    return "".join(
        f"<p>{escaped(entry.title)}, step {data.tables_step:,}</p>"
        + table(
            [[name, *(f"{value:,g}" for value in values)]
             for name, values in zip(entry.rows, entry.values, strict=True)],
            heads=["", *entry.columns], kinds=["name", *["number"] * len(entry.columns)],
        )
        for entry in data.tables
    )  # fmt: skip


def _completions(data: RunData) -> str:
    marks = {True: "✓ ", False: "✗ ", None: ""}
    completed = wording.completions(data)
    rows = [
        [
            _cut(row.prompt),
            _cut(row.expected),
            marks[row.right_before] + _cut(row.before),
            marks[row.right_after] + _cut(row.after),
        ]
        for row in completed[:MAX_COMPLETIONS]
    ]
    heads = ["prompt", "expected", "before training", "after training"]
    omitted = len(completed) - len(rows)
    note = f"<p>and {omitted:,} more in <code>samples.json</code></p>" if omitted else ""
    return table(rows, heads=heads, kinds=[""] * 4) + note


def _generated(data: RunData) -> str:
    """Samples that were trained on, with each part of their reward."""
    step, samples = wording.generated(data)
    names = list(dict.fromkeys(name for row in samples for name in row["rewards"]))
    rows = [
        [
            _cut(row["prompt"]),
            _cut(row["completion"]),
            *(wording.number(row["rewards"].get(name)) for name in names),
            wording.number(row["advantage"]),
        ]
        for row in samples
    ]
    heads = ["prompt", "completion", *names, "advantage"]
    kinds = ["", "", *["number"] * (len(names) + 1)]
    return heading(f"Samples of step {step:,}", table(rows, heads=heads, kinds=kinds))


def _cut(text: str) -> str:
    if len(text) <= LONGEST_COMPLETION:
        return text
    return f"{text[:LONGEST_COMPLETION]}… ({len(text):,} characters)"


def _attempts(data: RunData) -> str:
    """One row per attempt with its end and what followed, if there was more than one."""
    rows = []
    if len(data.attempts) > 1 or any(line.get("decision") == "restart" for line in data.attempts):
        rows = [_attempt(line) for line in data.attempts]
    heads = ["attempt", "steps", "outcome", "cause", "then", "checkpoint", "began", "took"]
    kinds = ["number", "short", "short", "", "short", "number", "short", "short"]
    return table(rows, heads=heads, kinds=kinds)


def _attempt(line: dict[str, Any]) -> list[str]:
    started, ended = line.get("started") or 0.0, line.get("ended") or 0.0
    saved, first, last = line.get("saved_step"), line.get("first_step"), line.get("last_step")
    trained = first is not None and last is not None and last > first
    where = [f"rank {line.get('rank')}"] * (line.get("rank") is not None)
    where += [f"on {line.get('host')}"] * bool(line.get("host"))
    cause, decision = line.get("cause") or "", line.get("decision") or ""
    wait = f" after {human.duration(line['wait_s'])}" if line.get("wait_s") else ""
    return [
        str(line.get("attempt", "")),
        f"{first + 1:,} to {last:,}" if trained and first is not None else "none",
        str(line.get("outcome", "")),
        f"{' '.join(where)}: {cause}" if where and cause else cause,
        f"{decision}{wait}" if decision == "restart" else decision,
        "" if saved is None else f"step {saved:,}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if started else "",
        human.duration(ended - started) if ended > started > 0 else "",
    ]


def _data(data: RunData) -> str:
    names = {"train": "training split", "eval": "evaluation split"}
    return "".join(
        f"<h3>{escaped(names.get(split, split))}</h3>" * (len(data.data) > 1) + table(rows)
        for split, rows in data.data.items()
    )


def _config(data: RunData) -> str:
    """Show the typed overrides, the values that are no defaults, and the changes by resume."""
    defaults = flattened(to_dict(Experiment()))
    settings = [
        (key, short_value(value, limit=200))
        for key, value in flattened(data.config).items()
        if not key.startswith(NOT_SHOWN)
        and value not in ({}, [])
        and (key not in defaults or value != defaults[key])
    ]
    changed = [
        [f"{change.get('step') or 0:,}", key, short_value(old), short_value(new)]
        for change in data.changes
        for key, (old, new) in (change.get("changes") or {}).items()
    ]
    heads, kinds = ["from step", "key", "before", "after"], ["number", "short", "short", "short"]
    return (
        (f"<p>Typed:</p>{pre(shlex.join(data.typed))}" if data.typed else "")
        + ("<p>All that is not a default:</p>" + table(settings) if settings else "")
        + (f"<h3>Changed by resume</h3>{table(changed, heads=heads, kinds=kinds)}" * bool(changed))
    )


def _evaluations(data: RunData) -> str:
    """Every number of every evaluation."""
    rows = [(step_of(record), scalars(record)) for record in data.evals]
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    cells = [
        [f"{step:,}", *(f"{values[name]:.5g}" if name in values else "" for name in names)]
        for step, values in rows
    ]
    return table(cells, heads=["step", *names], kinds=["number"] * (len(names) + 1))


def _plan(plan: dict[str, Any]) -> str:
    hosts, batch = plan.get("hosts") or [], plan.get("batch") or {}
    names = {index: host["name"] for index, host in enumerate(hosts)}
    rows = [
        [
            str(rank["rank"]),
            names.get(rank["host"], ""),
            rank["device"],
            str(rank["micro_batch"]),
        ]
        for rank in plan.get("ranks") or []
    ]
    if not rows:
        return ""
    size = plan.get("num_parameters") or 0
    facts = [
        ("precision", f"{plan.get('precision')}: {plan.get('precision_reason')}"),
        (
            "global batch",
            f"{plural(batch.get('global_batch') or 0, 'sample')} of "
            f"{plural(batch.get('seq_len') or 0, 'token')}",
        ),
        ("accumulation", plural(batch.get("accumulation") or 0, "micro step")),
        ("parameters", human.count(size) if size else "not known before the model is built"),
        ("transport", str(plan.get("transport"))),
    ]
    kinds = ["number", "short", "short", "number"]
    return table(facts) + table(rows, heads=["rank", "host", "device", "micro batch"], kinds=kinds)


def _text_of(data: RunData, name: str) -> str:
    try:
        text = (data.run.root / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(text) <= LONGEST_FILE:
        return redact(text)
    # A credential across the cut is not cut before it is masked.
    return f"{redact(text)[:LONGEST_FILE]}\n... {len(text):,} characters, whole in {name}"
