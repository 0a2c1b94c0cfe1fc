"""``report.html``: the whole run in one file that opens anywhere, also years later.

No script, nothing loaded from a network; every text of the run is escaped. Made for a phone, too:
tables scroll instead of breaking words or numbers (``tests/unit/test_report_page.py``).
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmx import text as human
from llmx.observe.report import chart, wording
from llmx.observe.report.chart import Line, Mark
from llmx.observe.report.figure import SMOOTHED_FROM, points, smoothed
from llmx.observe.report.run_data import RunData
from llmx.observe.report.settings import as_yaml, chosen, shown
from llmx.observe.report.tables import Numbers, shares, tables
from llmx.run.metrics import metric_of
from llmx.run.metrics.lines import Record, scalars
from llmx.text import plural, printable

MOST_METRIC_ROWS = 200
MOST_COMPLETIONS = 200
LONGEST_COMPLETION = 1_500
"""Characters; ``samples.json`` has the whole."""
LONGEST_FILE = 60_000
"""Characters of a file that is shown (provenance.json may hold a diff of megabytes)."""
LONGEST_WORD = 60
"""Characters without a space; a longer word may be broken, or one would be wider than the rest."""
LONGEST_WORD_OF_A_COMPLETION = 30
"""An untrained model writes such words; a language hardly ever."""
LONGEST_NAME = 30
"""Characters of a path on one line; a longer one is broken after its slashes."""
OPEN_COMPLETIONS = 12
"""The others are folded away."""

STYLE = (
    """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h1, p { overflow-wrap: break-word; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0;
  border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; }
th { font-weight: 600; white-space: nowrap; } tbody th { width: 1%; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number, td code, td.short, .word { white-space: nowrap; }
td.long { min-width: 9rem; white-space: pre-wrap; } td.cause { min-width: 15rem; }
.pairs td { white-space: pre-line; }
h3 { font-size: 1rem; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: 13px; }
code { font-size: 13px; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.ok { color: #1a7f37; } .failed { color: #c9302c; } .open { color: #b08800; }
@media (prefers-color-scheme: dark) {
  .ok { color: #4cc065; } .failed { color: #ff7b72; } .open { color: #e3b341; } }
"""
    + chart.STYLE
)


def page(data: RunData) -> str:
    """The page as text."""
    found = wording.headline(data)
    parts = [
        f'<h1 class="{found.state}">{_words(found.line)}</h1>',
        _cause(found),
        _pre(wording.traceback_excerpt(data)),
        _heading("Summary", _pairs(wording.summary_rows(data))),
        _heading("Loss", _loss(data)),
        _other_curves(data),
        _heading("Evaluation", _tables(data)),
        _heading("Completions", _completions(data)),
        _heading("Warnings", _list(wording.warnings(data))),
        _heading("Attempts", _attempts(data)),
        _heading("Data", _data(data)),
        _heading("Config", _config(data)),
        _heading("Plan", _plan(data.plan)),
        _heading("Files and commands", _pairs(wording.locations(data), code=True)),
        _heading("Metrics", _metrics(data)),
        _details("config.yaml", _file(data, "config.yaml")),
        _details("ds_config.json", _file(data, "ds_config.json")),
        _details("provenance.json", _file(data, "provenance.json")),
        _details("plan.json", _json(data.plan)),
        _details("result.json", _json(data.result)),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(data.name)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _text(value: Any) -> str:
    """Escaped; a control character or a stray surrogate (broken UTF-8) is shown as its code."""
    return escape(printable(str(value)))


_BREAKABLE = re.compile(r"[!-~]*[A-Za-z0-9][/\\?|%+&:;,.=_\-\u2013][!-~]+")
"""A word that a browser may break: a path, ``tokens/s``, ``2026-11-22``, ``key=value``."""
_UNIT = re.compile(r"(\d) (?=(?:s|min|h|d|k|M|B|T|GiB|MiB|KiB|tokens/s)(?![!-~]*[A-Za-z])|%)")
"""The space between a number and its unit, where no line ends."""
_ASCII = frozenset(map(chr, range(33, 127)))


def _words(value: Any, *, longest: int = LONGEST_WORD) -> str:
    """Escaped text that breaks between words only, and after the slashes of a long path.

    Only a word of more than ``longest`` characters is broken.
    """
    parts = []
    for word in re.split(r"([^!-~]+)", _UNIT.sub("\\1\u00a0", printable(str(value)))):
        if len(word) > LONGEST_NAME and word.count("/") > 1 and word[0] in _ASCII:
            names = re.findall(r"[^/]*/+|[^/]+", word)
            parts.append(
                "<wbr>".join(f'<span class="word">{escape(name)}</span>' for name in names)
            )
        elif len(word) > longest and word[0] in _ASCII:
            pieces = (word[start : start + longest] for start in range(0, len(word), longest))
            parts.append("<wbr>".join(map(escape, pieces)))
        elif _BREAKABLE.fullmatch(word):
            parts.append(f'<span class="word">{escape(word)}</span>')
        else:
            parts.append(escape(word))
    return "".join(parts)


def _heading(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{content}" if content else ""


def _pre(text: str) -> str:
    return f"<pre>{_text(text)}</pre>" if text else ""


def _details(title: str, text: str) -> str:
    if not text:
        return ""
    return f"<details><summary>{_text(title)}</summary>{_pre(text)}</details>"


def _cause(found: wording.Headline) -> str:
    rows = [(name, text) for name, text in (("cause", found.cause), ("fix", found.fix)) if text]
    return _pairs(rows)


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_words(text)}</li>" for text in texts)
    return f'<ul class="scroll">{items}</ul>' if items else ""


def _pairs(rows: Sequence[tuple[str, str]], *, code: bool = False) -> str:
    if not rows:
        return ""
    lines = [
        f"<tr><th>{_text(name)}</th><td>{f'<code>{_text(value)}</code>' if code else _words(value)}"
        "</td></tr>"
        for name, value in rows
    ]
    return (
        '<div class="scroll"><table class="pairs"><tbody>'
        + "\n".join(lines)
        + "</tbody></table></div>"
    )


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    kinds: Sequence[str],
    longest: int = LONGEST_WORD,
) -> str:
    """``kinds``: the class of each column: ``number``, ``short`` (never wrapped), ``long``
    or ``cause``."""
    if not rows:
        return ""
    head = "".join(
        f'<th class="{kind}">{_text(name)}</th>' for name, kind in zip(heads, kinds, strict=True)
    )
    lines = [
        "<tr>"
        + "".join(
            f'<td class="{kind}">{_words(cell, longest=longest)}</td>'
            for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _loss(data: RunData) -> str:
    """Train loss (smoothed where there is much of it), evaluations, resumes; both axes."""
    train, evals = points(data.train, "loss"), points(data.evals, "loss")
    means = points(data.train, "loss_mean")
    lines = []
    if means:
        lines.append(Line("train, each logged step", train, "blue", "faint"))
        lines.append(Line("mean since the one before", means, "blue"))
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
    curves = [
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
    cells = [f"<div><h3>{_text(title)}</h3>{drawn}</div>" for title, drawn in charts if drawn]
    return f'<div class="small">{"".join(cells)}</div>' if cells else ""


def _metric_curves(data: RunData, kind: str) -> list[tuple[str, list[chart.Point], str]]:
    """Title, points and colour of each metric of the ``train`` or the ``eval`` lines."""
    declared, curves = data.declared, []
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
    head = "".join(f'<th class="number">{_text(name)}</th>' for name in table.columns)
    lines = []
    for name, row in zip(table.rows, table.values, strict=True):
        parts = zip(row, shares(row), strict=True)
        cells = "".join(
            f'<td class="number" style="background: rgb(31 119 180 / {part:.2f})">{value:,g}</td>'
            for value, part in parts
        )
        lines.append(f"<tr><th>{_text(name)}</th>{cells}</tr>")
    return (
        f"<p>{_words(table.title)}, step {step:,}</p>"
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

    def table(some: list[list[str]]) -> str:
        return _table(heads, some, kinds=["long"] * 4, longest=LONGEST_WORD_OF_A_COMPLETION)

    left = len(completed) - len(rows)
    note = f"<p>and {left:,} more in <code>samples.json</code></p>" if left else ""
    folded = rows[OPEN_COMPLETIONS:]
    more = plural(len(folded), "more completion")
    return table(rows[:OPEN_COMPLETIONS]) + (
        f"<details><summary>{more}</summary>{table(folded)}{note}</details>" if folded else ""
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
    return _table(heads, rows, kinds=kinds) + _list(wording.events(data))


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
        f"<h3>{_text(names.get(split, split))}</h3>" * (len(data.data) > 1) + _pairs(rows)
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
        (f"<p>Overrides of the command line:</p>{_pre(typed)}" if typed else "")
        + "<p>What every run has, and all that is not a default (<code>config.yaml</code> below "
        f"has every key):</p>{_pre(values.rstrip())}"
        + (f"<h3>Changed by resume</h3>{_table(heads, changed, kinds=kinds)}" if changed else "")
    )


def _metrics(data: RunData) -> str:
    """Every evaluation, and at most MOST_METRIC_ROWS train lines, evenly chosen."""
    train = data.train
    every = -(-len(train) // MOST_METRIC_ROWS) or 1
    kept = train[::every]
    if train and kept[-1] is not train[-1]:
        kept.append(train[-1])
    lines = plural(len(train), "train line")
    note = (
        f"<p>One of every {every} of {lines}; all are in <code>metrics.jsonl</code>.</p>"
        if every > 1
        else ""
    )
    return note + _scalar_table(data.evals) + _scalar_table(kept)


def _scalar_table(records: list[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name in scalars(record)))
    names = [name for name in names if "/rank_" not in name]
    rows = []
    for record in records:
        values = scalars(record)
        cells = [f"{values[name]:.5g}" if name in values else "" for name in names]
        rows.append([f"{record['step']:,}", *cells])
    return _table(["step", *names], rows, kinds=["number"] * (len(names) + 1))


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
    return _pairs(facts) + _table(["rank", "host", "device", "micro batch"], rows, kinds=kinds)


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
