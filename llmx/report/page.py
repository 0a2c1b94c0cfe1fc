"""``report.html``: the whole run in one file that opens anywhere, also years later.

No script, nothing loaded from a network; every text of the run is escaped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmx.report import format as human
from llmx.report import wording
from llmx.report.run_data import RunData
from llmx.tracking.metrics import Record, scalars

MOST_METRIC_ROWS = 200
LONGEST_FILE = 60_000
"""Characters of a file that is shown (provenance.json may hold a diff of megabytes)."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
th { font-weight: 600; } tbody th { white-space: nowrap; width: 1%; padding-right: 1.5rem; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: 13px; }
code { font-size: 13px; }
img { max-width: 100%; height: auto; background: #fff; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.ok { color: #1a7f37; } .failed { color: #c9302c; } .open { color: #b08800; }
.scroll { overflow-x: auto; }
"""


def page(data: RunData, *, picture: bytes | None) -> str:
    """The page as text; ``picture`` is the PNG of the loss curve."""
    found = wording.verdict(data)
    parts = [
        f'<h1 class="{found.state}">{_text(found.line)}</h1>',
        _cause(found),
        _pre(wording.traceback_excerpt(data)),
        _heading("Summary", _pairs(wording.summary_rows(data))),
        _heading("Loss", _image(picture)),
        _heading("Answers", _answers(data)),
        _heading("Warnings", _list(wording.warnings(data))),
        _heading("Where everything lies", _pairs(wording.places(data), code=True)),
        _heading("Metrics", _metrics(data)),
        _heading("Plan", _plan(data.plan)),
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
    """Escaped; a stray surrogate (broken UTF-8 in a row) must not stop the writing."""
    return escape(str(value).encode("utf-8", "replace").decode("utf-8"))


def _heading(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{content}" if content else ""


def _pre(text: str) -> str:
    return f"<pre>{_text(text)}</pre>" if text else ""


def _details(title: str, text: str) -> str:
    if not text:
        return ""
    return f"<details><summary>{_text(title)}</summary>{_pre(text)}</details>"


def _cause(found: wording.Verdict) -> str:
    rows = [(name, text) for name, text in (("cause", found.cause), ("fix", found.fix)) if text]
    return _pairs(rows)


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _image(picture: bytes | None) -> str:
    if not picture:
        return ""
    data = base64.b64encode(picture).decode()
    return f'<img alt="loss over steps" src="data:image/png;base64,{data}">'


def _pairs(rows: list[tuple[str, str]], *, code: bool = False) -> str:
    if not rows:
        return ""
    around = ("<code>", "</code>") if code else ("", "")
    lines = [
        f"<tr><th>{_text(name)}</th><td>{around[0]}{_text(value)}{around[1]}</td></tr>"
        for name, value in rows
    ]
    return "<table><tbody>" + "\n".join(lines) + "</tbody></table>"


def _table(heads: Sequence[str], rows: list[list[str]], *, numbers: bool = False) -> str:
    if not rows:
        return ""
    kind = ' class="number"' if numbers else ""
    head = "".join(f"<th{kind}>{_text(name)}</th>" for name in heads)
    lines = [
        "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _answers(data: RunData) -> str:
    marks = {True: "✓ ", False: "✗ ", None: ""}
    rows = [
        [
            row.prompt,
            row.expected,
            marks[row.right_before] + row.before,
            marks[row.right_after] + row.after,
        ]
        for row in wording.answers(data)
    ]
    return _table(["question", "expected", "before", "after"], rows)


def _metrics(data: RunData) -> str:
    """Every evaluation, and at most MOST_METRIC_ROWS train lines, evenly chosen."""
    train = data.train
    every = -(-len(train) // MOST_METRIC_ROWS) or 1
    kept = train[::every]
    if train and kept[-1] is not train[-1]:
        kept.append(train[-1])
    note = f"<p>every {every}th line; all are in metrics.jsonl</p>" if every > 1 else ""
    return note + _scalar_table(data.evals) + _scalar_table(kept)


def _scalar_table(records: list[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name in scalars(record)))
    names = [name for name in names if "/rank_" not in name]
    rows = []
    for record in records:
        values = scalars(record)
        cells = [f"{values[name]:.5g}" if name in values else "" for name in names]
        rows.append([f"{record['step']:,}", *cells])
    return _table(["step", *names], rows, numbers=True)


def _plan(plan: dict[str, Any]) -> str:
    hosts = plan.get("hosts") or []
    rows = []
    for rank in plan.get("ranks") or []:
        host = hosts[rank["host"]] if rank.get("host", -1) < len(hosts) else {}
        rows.append(
            [str(rank["rank"]), str(host.get("name")), rank["device"], str(rank["micro_batch"])]
        )
    batch = plan.get("batch") or {}
    facts = [
        ("precision", f"{plan.get('precision')}: {plan.get('precision_reason')}"),
        ("global batch", f"{batch.get('global_batch')} samples of {batch.get('seq_len')} tokens"),
        ("accumulation", str(batch.get("accumulation"))),
        ("parameters", human.count(plan.get("num_parameters") or 0)),
        ("transport", str(plan.get("transport"))),
    ]
    if not rows:
        return ""
    return _pairs(facts) + _table(["rank", "host", "device", "micro batch"], rows)


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
