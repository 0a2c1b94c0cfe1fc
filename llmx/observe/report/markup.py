"""The HTML of the pages: escaped text, headings, tables, and the style that all pages share.

A page is one file that needs no script and no network. On a phone, tables scroll.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmx.observe.report import chart
from llmx.text import printable

STYLE = (
    """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: .95rem; margin: .4rem 0; }
.scroll { overflow-x: auto; margin-bottom: .8rem; }
table { border-collapse: collapse; min-width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; min-width: 9rem;
  border-bottom: 1px solid #8884; white-space: pre-line; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
th, .number, .short { white-space: nowrap; } th, .number, .short, .words { min-width: 0; }
.words { overflow-wrap: normal; }
.name { white-space: nowrap; font-weight: 600; width: 1%; min-width: 0; }
.best td { font-weight: 600; }
pre { background: #8881; padding: .8rem; overflow-x: auto; } pre, code { font-size: 13px; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.ok { color: #1a7f37; } .failed { color: #c9302c; } .open { color: #b08800; }
"""
    + chart.STYLE
)


class Html(str):
    """Text that is HTML already."""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page of the ``parts`` that are not empty."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def escaped(value: Any) -> str:
    """Escaped; a control character or a stray surrogate (broken UTF-8) is shown as its code."""
    return value if isinstance(value, Html) else escape(printable(str(value)))


def heading(title: str, content: str) -> str:
    return f"<h2>{escaped(title)}</h2>\n{content}" if content else ""


def pre(text: str) -> str:
    return f"<pre>{escaped(text)}</pre>" if text else ""


def details(title: str, text: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{pre(text)}</details>" if text else ""


def bullets(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escaped(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def table(
    rows: Sequence[Sequence[str]],
    *,
    kinds: Sequence[str] = ("name", ""),
    heads: Sequence[str] = (),
    best: int | None = None,
) -> str:
    """A table; empty without rows.

    Args:
        rows: text, or ``Html``.
        kinds: the class of each column: ``name``, ``number``, ``short`` (never wrapped), ``words``
            (wrapped between words) or none.
        heads: titles of the columns; without any, each row is a name and its value.
        best: the index of the row in bold.
    """
    if not rows:
        return ""
    lines = [
        f"<tr{' class=best' * (at == best)}>"
        + "".join(
            f'<td class="{kind}">{escaped(cell)}</td>'
            for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for at, row in enumerate(rows)
    ]
    titles = (
        f'<th class="{kind}">{escaped(name)}</th>'
        for name, kind in zip(heads, kinds if heads else (), strict=True)
    )
    head = f"<thead><tr>{''.join(titles)}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'
