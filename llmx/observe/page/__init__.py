"""The one page of runs and sweeps, live (``python -m llmx ui``) and saved (``report.html``,
``sweep.html``).

Python says what is shown, as JSON (``run.py``, ``sweep.py``); ``app.js`` (with ``trials.js``, the
pictures of a sweep) draws it. A page is::

    {"title": "demo: trained 40 steps", "state": "ok|failed|open", "order": ["Summary", "Curves"],
     "sections": {"Summary": [block, ...]}, "folded": ["Config"],
     "curves": {name of a run: columns}}

A block is an object of one key: ``table``, ``tiles``, ``text``, ``code``, ``list``, ``fold``,
``heading``, ``charts``, ``bars`` or ``trials``. The page inserts every value as text, and its
policy lets no script run but the two of this package, whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from llmx.text import printable

Json = dict[str, Any]
Block = dict[str, Any]
T = TypeVar("T")
FILES = Path(__file__).parent


def document(title: str, data: Mapping[str, Any]) -> str:
    """The whole page in one file that opens without a network; ``data`` is drawn at once, or
    ``{"live": true}``, with which the page asks the server that it came from."""
    files = {path.name: path.read_text(encoding="utf-8") for path in FILES.iterdir() if path.suffix}
    style = files["uPlot.min.css"] + files["style.css"]
    # The licence of uPlot goes with every copy.
    scripts = [
        f"/*{files['uPlot.LICENSE']}*/\n{files['uPlot.iife.min.js']}",
        files["trials.js"] + files["app.js"],
    ]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {_hash(style)}; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    # "<" ends no script early, and begins no comment.
    content = json.dumps(plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    content = content.replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(printable(title))}</title><style>{style}</style></head>\n"
        "<body><main><noscript>This page is drawn by a script of its own: allow scripts, or use "
        "<code>python -m llmx report</code> in a terminal.</noscript></main>\n"
        f'<script type="application/json" id="data">{content}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class Plain(dict[str, Any]):
    """What ``plain`` has made, and need not look through again."""


def plain(value: Any) -> Any:
    """``value`` as JSON has it: no NaN, and texts without control characters or stray surrogates
    (broken UTF-8), which are shown as their codes."""
    if isinstance(value, Plain):
        return value
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return Plain({printable(str(key)): plain(inner) for key, inner in value.items()})
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if value is None or isinstance(value, int) else printable(str(value))


def changes(old: Any, new: Any) -> Any:
    """What turns ``old`` into ``new``, as the page merges it: of an object the changed keys (null
    removes one), of a list what follows its unchanged beginning; None where nothing differs."""
    if old is new or old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        patch = {key: None for key in old if key not in new}
        for key, value in new.items():
            if key not in old:
                patch[key] = value
            elif (change := changes(old[key], value)) is not None or value != old[key]:
                patch[key] = change
        return patch
    if isinstance(old, list) and isinstance(new, list) and old:
        pairs = enumerate(zip(old, new, strict=False))
        first = next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))
        if first:
            return {"from": first, "rest": new[first:]}
    return new


def page(
    title: str,
    state: str,
    sections: Mapping[str, Sequence[Block | None]],
    *,
    folded: Mapping[str, Sequence[Block | None]] | None = None,
    curves: Mapping[str, Any] | None = None,
) -> Json:
    """A page of the sections that are not empty, in their order; ``Curves`` stands where the
    ``curves`` of runs are drawn. The ``folded`` sections follow, and a click opens one."""
    contents = {**sections, **(folded or {})}
    blocks = {name: [block for block in content if block] for name, content in contents.items()}
    order = [name for name, content in blocks.items() if content or (name == "Curves" and curves)]
    return {
        "title": title,
        "state": state,
        "order": order,
        "sections": {name: blocks[name] for name in order if name != "Curves"},
        "folded": [name for name in order if folded and name in folded],
        "curves": curves or {},
    }


def table(
    rows: Sequence[Sequence[Any]],
    *,
    kinds: Sequence[str] = ("name", ""),
    heads: Sequence[str] = (),
    best: int | None = None,
) -> Block | None:
    """A table; None without rows.

    Args:
        rows: texts, or ``{"text": ..., "href": ...}`` for a link.
        kinds: of each column: ``name``, ``number``, ``short`` (never wrapped), ``words`` (wrapped
            between words), ``code`` or none.
        heads: titles of the columns; without any, each row is a name and its value.
        best: the index of the row in bold.
    """
    if not rows:
        return None
    return {"table": {"rows": rows, "kinds": kinds, "heads": heads, "best": best}}


def tiles(rows: Sequence[tuple[str, str]]) -> Block | None:
    """Small figures beside each other: names, values, and the brackets that a value ends with."""
    parts = [[name, *re.split(r" +(?=\(.*\)$)", text, maxsplit=1)] for name, text in rows]
    return block("tiles", parts)


def block(kind: str, value: Any) -> Block | None:
    """A block of another kind; None where it is empty."""
    return {kind: value} if value else None


def thinned(points: Sequence[T], value: Callable[[T], float | None], limit: int) -> list[T]:
    """At most ``limit`` of the points: the least and the largest of each stretch, and gaps.

    A stretch is a power of two of points: as a run goes on, the former ones stay as they are, and
    only new points go to a page that is open.
    """
    length = 1
    while 2 * len(points) > limit * length:
        length *= 2
    if length <= 2:
        return [*points]
    chosen: list[T] = []
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        values = {at: value(points[at]) for at in stretch}
        finite = {at: v for at, v in values.items() if v is not None and math.isfinite(v)}
        indices = {*[at for at in stretch if at not in finite][:1]}
        if finite:
            indices |= {min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)}
        chosen += [points[at] for at in sorted(indices)]
    return chosen
