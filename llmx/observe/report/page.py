"""``report.html``: the whole run in one file that opens anywhere, also years later.

No script, nothing loaded from a network; every text of the run is escaped. Made for a phone, too:
tables scroll instead of breaking words or numbers (``tests/unit/test_report_page.py``).
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from llmx import text as human
from llmx.config import Experiment, to_dict
from llmx.observe.report import chart, step_time, wording
from llmx.observe.report.chart import Line, Mark
from llmx.observe.report.figure import SMOOTHED_FROM, Numbers, points, shares, smoothed, tables
from llmx.observe.report.markup import (
    bullets,
    details,
    document,
    escaped,
    grid,
    heading,
    pairs,
    pre,
    prose,
)
from llmx.observe.report.run_data import RunData
from llmx.run.metrics import metric_of
from llmx.run.metrics.lines import Record, scalars
from llmx.run.provenance.differences import flattened
from llmx.text import plural

MOST_METRIC_ROWS = 200
MOST_COMPLETIONS = 200
LONGEST_COMPLETION = 1_500
"""Characters; ``samples.json`` has the whole."""
LONGEST_FILE = 60_000
"""Characters of a file that is shown (provenance.json may hold a diff of megabytes)."""
LONGEST_WORD_OF_A_COMPLETION = 30
"""An untrained model writes such words; a language hardly ever."""
OPEN_COMPLETIONS = 12
"""The others are folded away."""


def page(data: RunData) -> str:
    """The page as text."""
    headline = wording.headline(data)
    parts = [
        f'<h1 class="{headline.state}">{prose(headline.line)}</h1>',
        pairs([row for row in (("cause", headline.cause), ("fix", headline.fix)) if row[1]]),
        pre(wording.traceback_excerpt(data)),
        heading("Summary", pairs(wording.summary_rows(data))),
        heading("Loss", _loss(data)),
        _other_curves(data),
        heading("One step by rank", step_time.drawn(data)),
        heading("Evaluation", _tables(data)),
        heading("Completions", _completions(data)),
        heading("Warnings", bullets(wording.warnings(data))),
        heading("Attempts", _attempts(data)),
        heading("Data", _data(data)),
        heading("Config", _config(data)),
        heading("Plan", _plan(data.plan)),
        heading("Files and commands", pairs(wording.locations(data), code=True)),
        heading("Metrics", _metrics(data)),
        details("config.yaml", _file(data, "config.yaml")),
        details("ds_config.json", _file(data, "ds_config.json")),
        details("provenance.json", _file(data, "provenance.json")),
        details("plan.json", _json(data.plan)),
        details("result.json", _json(data.result)),
    ]
    return document(data.name, parts)


def _loss(data: RunData) -> str:
    """Train loss (smoothed where there is much of it), evaluations, resumes; both axes."""
    train, evals = points(data.train, "loss"), points(data.evals, "loss")
    means = points(data.train, "loss_mean")
    lines = []
    if means:
        lines.append(Line("train, each logged step", train, "blue", "faint"))
        lines.append(Line("mean since the previous line", means, "blue"))
    elif len(train) >= SMOOTHED_FROM:
        smooth = smoothed([value for _, value in train])
        steps = [step for step, _ in train]
        lines.append(Line("", train, "blue", "faint"))
        lines.append(Line("train, smoothed", list(zip(steps, smooth, strict=True)), "blue"))
    elif train:
        lines.append(Line("train", train, "blue"))
    if evals:
        # A line through two points (before and after) would look like a measured curve.
        if len(evals) > 2:
            lines.append(Line("", evals, "orange"))
        lines.append(Line("evaluation", evals, "orange", "dots"))
    marks = [
        Mark(step, "resumed", "gray")
        for step in sorted({r["step"] for r in data.records if r.get("event") == "resumed"})
    ]
    marks += [Mark(step, "loss is NaN", "red") for step, value in train if value != value]
    drawn = chart.chart([line for line in lines if line.points], marks=marks, log=True)
    return f"<p>nats per target token, over optimizer steps</p>{drawn}" if drawn else ""


def _other_curves(data: RunData) -> str:
    """Learning rate, gradient norm, speed, and every metric of the task, one small chart each."""
    curves: list[tuple[str, Sequence[chart.Point], str]] = [
        ("Learning rate", points(data.train, "lr"), "gray"),
        ("Gradient norm", points(data.train, "grad_norm"), "blue"),
        ("Tokens/s", points(data.train, "tokens_per_s"), "blue"),
        *_metric_curves(data, "train"),
        *_metric_curves(data, "eval"),
    ]
    charts = [
        (title, chart.chart([Line("", found, colour)], steps=3))
        for title, found, colour in curves
        if len(found) > 1
    ]
    cells = [f"<div><h3>{escaped(title)}</h3>{drawn}</div>" for title, drawn in charts if drawn]
    return f'<div class="small">{"".join(cells)}</div>' if cells else ""


def _metric_curves(data: RunData, kind: str) -> list[tuple[str, Sequence[chart.Point], str]]:
    """Title, points and colour of each metric of the ``train`` or the ``eval`` lines."""
    declared = data.declared
    curves: list[tuple[str, Sequence[chart.Point], str]] = []
    for name, found in data.metric_points(kind).items():
        metric = metric_of(name, declared)
        # A line through two evaluations (before and after) would look like a measured curve.
        if kind == "eval" and len(found) < 3:
            continue
        title = metric.title[:1].upper() + metric.title[1:]
        title += ", evaluation" if kind == "eval" and "train" in metric.kinds else ""
        if metric.format == "percent":
            title, found = f"{title} (%)", [(step, 100 * value) for step, value in found]
        curves.append((title, found, "orange" if kind == "eval" else "blue"))
    return curves


def _tables(data: RunData) -> str:
    """What the newest evaluation measures and is no number, such as a confusion matrix: each cell
    the darker, the larger its part of the row."""
    return "".join(_shaded(table, step=data.tables.get("step", 0)) for table in tables(data))


def _shaded(table: Numbers, *, step: int) -> str:
    head = "".join(f'<th class="number">{escaped(name)}</th>' for name in table.columns)
    lines = []
    for name, row in zip(table.rows, table.values, strict=True):
        parts = zip(row, shares(row), strict=True)
        cells = "".join(
            f'<td class="number" style="background: rgb(31 119 180 / {part:.2f})">{value:,g}</td>'
            for value, part in parts
        )
        lines.append(f"<tr><th>{escaped(name)}</th>{cells}</tr>")
    return (
        f"<p>{prose(table.title)}, step {step:,}</p>"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


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
        for row in completed[:MOST_COMPLETIONS]
    ]
    heads = ["prompt", "expected", "before training", "after training"]

    def folding(some: list[list[str]]) -> str:
        return grid(heads, some, kinds=["long"] * 4, longest=LONGEST_WORD_OF_A_COMPLETION)

    left = len(completed) - len(rows)
    note = f"<p>and {left:,} more in <code>samples.json</code></p>" if left else ""
    folded = rows[OPEN_COMPLETIONS:]
    more = plural(len(folded), "more completion")
    return folding(rows[:OPEN_COMPLETIONS]) + (
        f"<details><summary>{more}</summary>{folding(folded)}{note}</details>" if folded else ""
    )


def _cut(text: str) -> str:
    if len(text) <= LONGEST_COMPLETION:
        return text
    return f"{text[:LONGEST_COMPLETION]}… ({len(text):,} characters)"


def _attempts(data: RunData) -> str:
    """How each attempt ended and what followed, if there was more than one; then other events."""
    rows = []
    if len(data.attempts) > 1 or any(line.get("decision") == "restart" for line in data.attempts):
        rows = [_attempt(line) for line in data.attempts]
    heads = ["attempt", "steps", "outcome", "cause", "then", "checkpoint", "began", "took"]
    kinds = ["number", "short", "short", "cause", "short", "number", "short", "short"]
    return grid(heads, rows, kinds=kinds) + bullets(wording.events(data))


def _attempt(line: dict[str, Any]) -> list[str]:
    started, ended = line.get("started") or 0.0, line.get("ended") or 0.0
    saved, first, last = line.get("saved_step"), line.get("first_step"), line.get("last_step")
    trained = first is not None and last is not None and last > first
    where = [f"rank {line['rank']}"] * (line.get("rank") is not None)
    where += [f"on {line['host']}"] * bool(line.get("host"))
    cause = line.get("cause") or ""
    return [
        str(line.get("attempt", "")),
        f"{first + 1:,} to {last:,}" if trained and first is not None else "none",
        str(line.get("outcome", "")),
        f"{' '.join(where)}: {cause}" if where and cause else cause,
        _decision(line),
        "" if saved is None else f"step {saved:,}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if started else "",
        human.duration(ended - started) if ended > started > 0 else "",
    ]


def _decision(line: dict[str, Any]) -> str:
    decision = line.get("decision")
    if decision == "restart":
        wait_s = line.get("wait_s") or 0.0
        return f"restart after {human.duration(wait_s)}" if wait_s else "restart"
    return {"stop": "stop", "finished": "finished"}.get(str(decision), str(decision or ""))


def _data(data: RunData) -> str:
    names = {"train": "training split", "eval": "evaluation split"}
    return "".join(
        f"<h3>{escaped(names.get(split, split))}</h3>" * (len(data.data) > 1) + pairs(rows)
        for split, rows in data.data.items()
    )


def _config(data: RunData) -> str:
    """What was typed, what is not the default, what resume changed; the whole stands below."""
    if not data.config:
        return ""
    typed = shlex.join(data.typed)
    values = as_yaml(chosen(data.config))
    changed = [
        [f"{change.get('step', 0):,}", key, shown(old), shown(new)]
        for change in data.changes
        for key, (old, new) in (change.get("changes") or {}).items()
    ]
    heads, kinds = ["from step", "key", "before", "after"], ["number", "short", "short", "short"]
    return (
        (f"<p>Overrides of the command line:</p>{pre(typed)}" if typed else "")
        + "<p>What every run has, and all that is not a default (<code>config.yaml</code> below "
        f"has every key):</p>{pre(values.rstrip())}"
        + (f"<h3>Changed by resume</h3>{grid(heads, changed, kinds=kinds)}" if changed else "")
    )


def _metrics(data: RunData) -> str:
    """Every evaluation, and at most MOST_METRIC_ROWS train lines, evenly chosen."""
    train = data.train
    every = -(-len(train) // MOST_METRIC_ROWS) or 1
    shown_records = train[::every]
    if train and shown_records[-1] is not train[-1]:
        shown_records.append(train[-1])
    lines = plural(len(train), "train line")
    note = (
        f"<p>One of every {every} of {lines}; all are in <code>metrics.jsonl</code>.</p>"
        if every > 1
        else ""
    )
    return note + _scalar_table(data.evals) + _scalar_table(shown_records)


def _scalar_table(records: list[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name in scalars(record)))
    names = [name for name in names if "/rank_" not in name]
    rows = []
    for record in records:
        values = scalars(record)
        cells = [f"{values[name]:.5g}" if name in values else "" for name in names]
        rows.append([f"{record['step']:,}", *cells])
    return grid(["step", *names], rows, kinds=["number"] * (len(names) + 1))


def _plan(plan: dict[str, Any]) -> str:
    hosts = plan.get("hosts") or []
    rows = []
    for rank in plan.get("ranks") or []:
        host = hosts[rank["host"]] if rank.get("host", -1) < len(hosts) else {}
        rows.append(
            [str(rank["rank"]), str(host.get("name")), rank["device"], str(rank["micro_batch"])]
        )
    batch = plan.get("batch") or {}
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
    if not rows:
        return ""
    kinds = ["number", "short", "short", "number"]
    return pairs(facts) + grid(["rank", "host", "device", "micro batch"], rows, kinds=kinds)


def _file(data: RunData, name: str) -> str:
    try:
        text = (data.run.root / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(text) <= LONGEST_FILE:
        return text
    return f"{text[:LONGEST_FILE]}\n... {len(text):,} characters, whole in {name}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) if value else ""


ALWAYS = (
    "seed", "precision", "model.kind", "model.path", "model.init", "data.path", "data.seq_len",
    "data.packing", "task.kind", "task.steps", "task.epochs", "zero.stage", "optim.kind",
    "optim.lr", "optim.schedule", "optim.weight_decay", "batch.global_batch", "batch.micro_batch",
)  # fmt: skip
"""Shown also where they are the defaults; not where they are not set."""
NEVER = ("schema_version", "name", "run_dir", "dry_run", "hardware.hosts", "hardware.devices")
"""The run's own, and what the plan shows better."""
NOT_OF_A_RUN = ("tokenizer.",)
"""Groups of other commands."""


def chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested part of ``config``, in its order."""
    defaults = flattened(to_dict(Experiment()))
    settings: dict[str, Any] = {}
    for key, value in flattened(config).items():
        if key.startswith((*NEVER, *NOT_OF_A_RUN)) or value in ({}, []):
            continue
        if value != defaults.get(key) or (key in ALWAYS and value is not None):
            place = settings
            *parents, last = key.split(".")
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
    return settings


class _Dumper(yaml.SafeDumper):
    """Lists on one line, as they are typed."""


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True)
)


def as_yaml(values: Mapping[str, Any]) -> str:
    """``chosen`` for a reader."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=60)


def shown(value: Any) -> str:
    """A value on one line, as YAML writes it."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.strip().removesuffix("...").strip()
