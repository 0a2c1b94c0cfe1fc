"""A run as JSON, from its directory: for ``report.html``, and for the live page.

``curves`` are its logged values in columns; what else is shown stands in words in sections, as on
the terminal.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmx import text as human
from llmx.config import Experiment, to_dict
from llmx.observe.page import Block, Json, block, page, table, thinned, tiles
from llmx.observe.report import plan_table, step_time, wording
from llmx.observe.run import Run, last_of_each_step
from llmx.plan.types import Plan
from llmx.redact import redact
from llmx.run.metrics import Metric, declared_of, measured, metric_of
from llmx.run.metrics.declared import is_number, loss_title
from llmx.run.metrics.lines import Record, scalars, step_of
from llmx.run.provenance.differences import flattened, short_value

MAX_POINTS = 2_000
"""Lines of the curves; beyond, those of the least and the largest loss of each stretch are kept."""
MAX_COMPLETIONS = 50
LONGEST_COMPLETION = 1_500
"""Characters; ``samples.json`` has the whole."""
LONGEST_FILE = 60_000
"""Characters of a file that is shown (provenance.json may hold a diff of megabytes)."""
NOT_SHOWN = ("schema_version", "name", "run_dir", "dry_run", "hardware.hosts", "hardware.devices",
             "model.resolved", "tokenizer.")  # fmt: skip
"""Beginnings of keys: those of the run alone, of other commands, and what the plan shows better."""
CURVES = {"loss": "", "loss_mean": "", "lr": "Learning rate", "grad_norm": "Gradient norm",
          "tokens_per_s": "Tokens/s"}  # fmt: skip
"""Keys of ``train`` lines -> title of their chart; the first two are in that of the loss."""


def run_page(run: Run) -> Json:
    """The whole page, from the headline to the files of the run."""
    state, line = wording.headline(run)
    columns = curves(run.records)
    files = ("config.yaml", "plan.json", "ds_config.json", "provenance.json", "result.json")
    # Many runs have the name of their experiment; the directory is the run's directory.
    directory = run.dir.root.name
    name = directory if run.name in directory else f"{directory} ({run.name})"
    content = page(
        f"{name}: {line}",
        state,
        {
            "Outcome": [table(wording.reasons(run))],
            "Summary": [tiles(wording.summary_rows(run))],
            "Curves": [],
            "Warnings": [block("list", wording.warnings(run))],
        },
        folded={
            "Traceback": [block("code", wording.traceback_excerpt(run))],
            "One step by rank": step_time.steps_blocks(run),
            "Evaluation": _tables(run),
            "Completions": completions(run, count=MAX_COMPLETIONS, limit=LONGEST_COMPLETION),
            step_of_samples(run): generated(run, limit=LONGEST_COMPLETION),
            "Attempts": [_attempts(run), block("list", wording.events(run))],
            "Data": _data(run),
            "Config": _config(run),
            "Plan": _plan(run.plan),
            "Files and commands": [table(wording.locations(run), kinds=("name", "code"))],
            "Evaluations": [_evaluations(run)],
            "Files": [
                block("fold", {"title": name, "code": text})
                for name in files
                if (text := _text_of(run, name))
            ],
        },
        curves={run.name: columns} if has_steps(columns) else {},
    )
    return {**content, "name": name}


def has_steps(columns: Json) -> bool:
    """Whether a step is logged in the curves of a run."""
    return bool(columns["train"]["step"] or columns["eval"]["step"])


def curves(records: Sequence[Record], *, limit: int = MAX_POINTS) -> Json:
    """The logged values of a run in columns of ``limit`` lines, and the charts to draw of them.

    ``time`` is in seconds since the first line. A value that is missing or not finite is null.
    """
    declared = declared_of(records)
    begun = next((record["time"] for record in records if record.get("time")), 0.0)
    charts: list[Json] = []
    columns: Json = {"charts": charts, "title": loss_title([records])}
    for kind, least in (("train", 2), ("eval", 3)):
        lines = thinned(last_of_each_step(records, kind), lambda line: line.get("loss"), limit)
        columns[kind] = {
            "step": [step_of(line) for line in lines],
            "time": [round((line.get("time") or begun) - begun, 1) for line in lines],
        }
        for name, (title, scale) in _titles(lines, kind, declared).items():
            column = [_rounded(line.get(name), scale) for line in lines]
            count = sum(value is not None for value in column)
            if count:
                columns[kind][name] = column
            # A line through two evaluations (before and after) would look like a measured curve.
            if title and count >= least:
                charts.append({"title": title, "kind": kind, "name": name})
    resumed = {step_of(record) for record in records if record.get("event") == "resumed"}
    lost = [line for line in last_of_each_step(records, "train") if line.get("nonfinite")]
    marks = {
        "resumed": sorted(resumed),
        "loss is NaN": [step_of(line) for line in lost if line.get("loss") is None],
    }
    columns["marks"] = {name: steps[-MAX_POINTS:] for name, steps in marks.items() if steps}
    return columns


def _titles(
    lines: Sequence[Record], kind: str, declared: Mapping[str, Metric]
) -> dict[str, tuple[str, int]]:
    """The keys that are drawn: title of the chart (none for that of the loss), and the scale."""
    titles = {name: (title, 1) for name, title in CURVES.items() if kind == "train" or not title}
    for name in dict.fromkeys(
        name for line in lines for name in measured(line, declared, shown=True)
    ):
        metric = metric_of(name, declared)
        is_percent = metric.format == "percent"
        title = f"{metric.title[:1].upper()}{metric.title[1:]}"
        title += ", evaluation" if kind == "eval" and "train" in metric.kinds else ""
        titles[name] = (f"{title} (%)", 100) if is_percent else (title, 1)
    return titles


def _rounded(value: Any, scale: int) -> float | None:
    """Six digits: more than a screen has, in half the bytes."""
    if not is_number(value) or not math.isfinite(value):
        return None
    return float(f"{scale * value:.6g}")


def _tables(run: Run) -> list[Block | None]:
    """The tables of the newest evaluation, such as a confusion matrix."""
    blocks: list[Block | None] = []
    for entry in run.tables.get("tables") or []:
        title = f"{entry['title']}, step {run.tables.get('step') or 0:,}"
        names, heads, values = entry["rows"], entry["columns"], entry["values"]
        if not _is_rectangular(names, heads, values):
            blocks.append(block("text", f"{title}: not shown, since values of it are missing"))
            continue
        rows = [
            [name, *(f"{value:,g}" for value in row)]
            for name, row in zip(names, values, strict=True)
        ]
        blocks.append(block("text", title))
        blocks.append(table(rows, heads=["", *heads], kinds=["name", *["number"] * len(heads)]))
    return blocks


def _is_rectangular(names: Any, heads: Any, rows: Any) -> bool:
    if None in (names, heads, rows) or len(names) != len(rows):
        return False
    return all(row and len(row) == len(heads) and None not in row for row in rows)


def completions(run: Run, *, count: int, limit: int) -> list[Block | None]:
    """Eval prompts: the expected completion, that before training, that after it.

    Args:
        count: so many of them, evenly chosen, because neighbours are often of one kind.
        limit: characters of a text.
    """
    prompts: list[Record] = run.samples.get("rows") or []
    chosen = prompts
    if len(prompts) > count:
        chosen = [prompts[index * len(prompts) // count] for index in range(count)]
    rows = [
        [
            _cut(row.get("prompt") or "", 2 * limit),
            _cut(row.get("expected") or "", limit),
            _completion(row, "before", limit),
            _completion(row, "after", limit),
        ]
        for row in chosen
    ]
    omitted = len(prompts) - len(rows)
    note = f" and {omitted:,} more in {run.dir.samples}" if omitted else ""
    heads = ["prompt", "expected", "before", "after"]
    return [table(rows, heads=heads, kinds=[""] * 4), block("text", note)]


def _completion(row: Record, when: str, limit: int) -> str:
    """A completion, with a mark where there is one right answer."""
    text, expected = row.get(when), row.get("expected")
    if text is None:
        return "not yet"
    short = _cut(text, limit) or "(nothing)"
    if expected is None:
        return short
    return f"{'✓' if text.strip() == expected.strip() else '✗'} {short}"


def generated(run: Run, *, count: int | None = None, limit: int) -> list[Block | None]:
    """Samples of the newest step that were trained on, with each part of their reward."""
    samples = run.rollouts[:count]
    names = list(dict.fromkeys(name for row in samples for name in row["rewards"]))
    rows = [
        [
            _cut(row["prompt"], limit),
            _cut(row["completion"], limit) or "(nothing)",
            *(_reward(row["rewards"].get(name)) for name in names),
            _reward(row["advantage"]),
        ]
        for row in samples
    ]
    heads = ["prompt", "completion", *names, "advantage"]
    return [table(rows, heads=heads, kinds=["", "", *["number"] * (len(names) + 1)])]


def step_of_samples(run: Run) -> str:
    """Title of ``generated``."""
    return f"Samples of step {run.rollouts[0]['step'] if run.rollouts else 0:,}"


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}"


def _cut(text: str, limit: int) -> str:
    if limit < LONGEST_COMPLETION:
        return human.one_line(text, limit=limit)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def _attempts(run: Run) -> Block | None:
    """One row per attempt with its end and what followed, if there was more than one."""
    rows = []
    if len(run.attempts) > 1 or any(line.get("decision") == "restart" for line in run.attempts):
        rows = [_attempt(line) for line in run.attempts]
    heads = ["attempt", "steps", "outcome", "cause", "then", "checkpoint", "began", "took"]
    kinds = ["number", "short", "short", "", "short", "number", "short", "short"]
    return table(rows, heads=heads, kinds=kinds)


def _attempt(line: dict[str, Any]) -> list[str]:
    started, ended = line.get("started") or 0.0, line.get("ended") or 0.0
    saved, first, last = line.get("saved_step"), line.get("first_step"), line.get("last_step")
    trained = first is not None and last is not None and last > first
    where = [] if line.get("rank") is None else [f"rank {line['rank']}"]
    where += [f"on {line['host']}"] if line.get("host") else []
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


def _data(run: Run) -> list[Block | None]:
    names = {"train": "training split", "eval": "evaluation split"}
    blocks: list[Block | None] = []
    for split, rows in run.data.items():
        title = names.get(split, split) if len(run.data) > 1 else ""
        blocks += [block("heading", title), table(rows)]
    return blocks


def _config(run: Run) -> list[Block | None]:
    """Show the typed overrides, the values that are no defaults, and the changes by resume."""
    defaults = flattened(to_dict(Experiment()))
    settings = [
        (key, short_value(value, limit=200))
        for key, value in flattened(run.config).items()
        if not key.startswith(NOT_SHOWN)
        and value not in ({}, [])
        and (key not in defaults or value != defaults[key])
    ]
    changed = [
        [f"{change.get('step') or 0:,}", key, short_value(old), short_value(new)]
        for change in run.changes
        for key, (old, new) in (change.get("changes") or {}).items()
    ]
    heads, kinds = ["from step", "key", "before", "after"], ["number", "short", "short", "short"]
    return [
        block("text", "Typed:" if run.overrides else ""),
        block("code", shlex.join(run.overrides)),
        block("text", "All that is not a default:" if settings else ""),
        table(settings),
        block("heading", "Changed by resume" if changed else ""),
        table(changed, heads=heads, kinds=kinds),
    ]


def _evaluations(run: Run) -> Block | None:
    """Every number of every evaluation."""
    rows = [(step_of(record), scalars(record)) for record in run.evals]
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    cells = [
        [f"{step:,}", *(f"{values[name]:.5g}" if name in values else "" for name in names)]
        for step, values in rows
    ]
    return table(cells, heads=["step", *names], kinds=["number"] * (len(names) + 1))


def _plan(values: Mapping[str, Any]) -> list[Block | None]:
    """What ``dry_run=true`` prints of hosts, batch, memory and time; nothing without a plan that
    this version of llmx can read."""
    try:
        plan = Plan.from_dict(dict(values))
        facts = [
            ("precision", f"{plan.precision}: {plan.precision_reason}"),
            ("batch", plan_table.batch_line(plan)),
            ("launch", plan_table.launch_line(plan)),
        ]
        memory = plan_table.memory_blocks(plan) if plan.memory else []
        time_of_step = plan_table.time_blocks(plan)
        return [plan_table.hosts_table(plan), table(facts), *memory, *time_of_step]
    except (AttributeError, LookupError, TypeError, ValueError):
        return []


def _text_of(run: Run, name: str) -> str:
    try:
        text = (run.dir.root / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(text) <= LONGEST_FILE:
        return redact(text)
    # A credential across the cut is not cut before it is masked.
    return f"{redact(text)[:LONGEST_FILE]}\n... {len(text):,} characters, whole in {name}"
