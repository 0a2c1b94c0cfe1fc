"""The HTML of the pages: escaped text, headings, tables, and the style that all pages share.

A page is one file: no network, and no script but what a page says of itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmx.observe.report import chart
from llmx.text import printable

LONGEST_WORD = 60
"""Characters without a space; a longer word may be broken, or one would be wider than the rest."""
LONGEST_NAME = 30
"""Characters of a path on one line; a longer one is broken after its slashes."""

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
.steps th { font-weight: 400; } .step { display: flex; height: 1.1rem; min-width: 15rem; }
.step i { display: block; height: 100%; } .legend b { border-radius: 2px; }
.steps .scale { display: flex; justify-content: space-between; font-size: .8rem; opacity: .7; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.ok { color: #1a7f37; } .failed { color: #c9302c; } .open { color: #b08800; }
@media (prefers-color-scheme: dark) {
  .ok { color: #4cc065; } .failed { color: #ff7b72; } .open { color: #e3b341; } }
"""
    + chart.STYLE
)


def document(title: str, parts: Iterable[str], *, style: str = "", script: str = "") -> str:
    """A whole page of the ``parts`` that are not empty."""
    body = "\n".join(part for part in parts if part)
    code = f"<script>{script}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}{style}</style></head>\n"
        f"<body>\n{body}\n{code}</body></html>\n"
    )


def escaped(value: Any) -> str:
    """Escaped; a control character or a stray surrogate (broken UTF-8) is shown as its code."""
    return escape(printable(str(value)))


_BREAKABLE = re.compile(r"[!-~]*[A-Za-z0-9][/\\?|%+&:;,.=_\-\u2013][!-~]+")
"""A word that a browser may break: a path, ``tokens/s``, ``2026-11-22``, ``key=value``."""
_UNIT = re.compile(r"(\d) (?=(?:s|min|h|d|k|M|B|T|GiB|MiB|KiB|tokens/s)(?![!-~]*[A-Za-z])|%)")
"""The space between a number and its unit, where no line ends."""
_ASCII = frozenset(map(chr, range(33, 127)))


def prose(value: Any, *, longest: int = LONGEST_WORD) -> str:
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


def heading(title: str, content: str) -> str:
    return f"<h2>{escaped(title)}</h2>\n{content}" if content else ""


def pre(text: str) -> str:
    return f"<pre>{escaped(text)}</pre>" if text else ""


def details(title: str, text: str) -> str:
    if not text:
        return ""
    return f"<details><summary>{escaped(title)}</summary>{pre(text)}</details>"


def bullets(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{prose(text)}</li>" for text in texts)
    return f'<ul class="scroll">{items}</ul>' if items else ""


def pairs(rows: Sequence[tuple[str, str]], *, code: bool = False) -> str:
    if not rows:
        return ""
    shown = [f"<code>{escaped(value)}</code>" if code else prose(value) for _, value in rows]
    lines = [
        f"<tr><th>{escaped(name)}</th><td>{value}</td></tr>"
        for (name, _), value in zip(rows, shown, strict=True)
    ]
    return (
        '<div class="scroll"><table class="pairs"><tbody>'
        + "\n".join(lines)
        + "</tbody></table></div>"
    )


def grid(
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
        f'<th class="{kind}">{escaped(name)}</th>' for name, kind in zip(heads, kinds, strict=True)
    )
    lines = [
        "<tr>"
        + "".join(
            f'<td class="{kind}">{prose(cell, longest=longest)}</td>'
            for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
