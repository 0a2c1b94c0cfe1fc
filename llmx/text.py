"""Formats numbers, numbers with nouns, and text that is safe on a terminal: ``6.74 B``, ``1 min 12
s``, ``96.9 %``, ``1,200 rows``.

Standard library only; every package may import it (``from llmx import text as human``).
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Sequence
from hashlib import blake2b
from typing import TextIO

CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029"
"""Characters for a regular expression's class: C0, DEL and C1, which move the cursor, set titles or
clear screens, and Unicode's own line breaks. No text on one line has them."""
SURROGATES = "\ud800-\udfff"
"""Characters for a class: halves of surrogate pairs (broken UTF-8), which cannot be encoded."""
BIDIRECTIONAL = "\u202a-\u202e\u2066-\u2069"
"""Characters for a class: overrides of the direction, so that text reads otherwise than it is."""

MARK = "\ufeff"
"""The byte order mark: nothing that can be seen, and in no file's name on purpose."""

_UNSAFE = re.compile(f"[{CONTROL}{BIDIRECTIONAL}{SURROGATES}{MARK}]")
TIMES = " \N{MULTIPLICATION SIGN} "


def plural(count: float, noun: str, nouns: str | None = None) -> str:
    """``1 row``, ``1,200 rows``, ``0.5 epochs``; ``nouns`` where ``s`` is not enough."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:,g}"
    return f"{number} {noun if number == '1' else nouns or noun + 's'}"


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""``text`` with control characters but ``keep`` as escapes (``\x1b``, ``\u202e``).

    What a model answers, or data holds, must not steer the terminal that it is shown on.
    """

    def escaped(match: re.Match[str]) -> str:
        letter = match.group()
        if letter in keep:
            return letter
        return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"

    return _UNSAFE.sub(escaped, text)


def count(value: float) -> str:
    """``950``, ``1.4 M``, ``6.74 B``: three digits and the unit."""
    for size, unit, least in ((1e12, "T", 1e12), (1e9, "B", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        # 999,999 rounds up to the next unit: 1 M, not 1000 k.
        if abs(value) >= 0.9995 * least:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """``0.8 s``, ``42 s``, ``1 min 12 s``, ``3 h 5 min``, ``2 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    total = round(seconds)
    for size, unit, smaller, smaller_unit in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if total >= size:
            remainder = total % size // smaller
            return f"{total // size} {unit}" + (f" {remainder} {smaller_unit}" if remainder else "")
    return f"{total} s"


def clock(seconds: float) -> str:
    """``0:07``, ``2:32``, ``4:05:59``: a time that counts up or down; 0 where it is negative."""
    minutes, remainder = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def number(value: float) -> str:
    """A number with four significant digits, as of a loss; ``nan`` where there is none."""
    return "nan" if math.isnan(value) else f"{value:#.4g}".rstrip(".")


def percent(part: float, *, decimals: int | None = None) -> str:
    """``0.96875`` as ``96.9 %``: three digits in all, or so many ``decimals``."""
    return f"{100 * part:.3g} %" if decimals is None else f"{100 * part:.{decimals}f} %"


def gib(value: float) -> str:
    """A size in GiB, with two decimals below 10."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def size(num_bytes: float) -> str:
    """Bytes as ``812 B``, ``3.2 MiB``, ``41.0 GiB``."""
    for scale, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def one_line(text: str, *, limit: int) -> str:
    """``text`` on one line, cut at ``limit`` characters with an ellipsis; what a model answered
    cannot steer the terminal."""
    flat = printable(re.sub(r"\s+", " ", text).strip(), keep="")
    return flat if len(flat) <= limit else flat[: limit - 1].rstrip() + "…"


def shorter_path(path: str | os.PathLike[str], *, start: str | None = None) -> str:
    """A path relative to ``start``, else to where the command is typed, if that is shorter."""
    relative = os.path.relpath(path, start)
    return relative if len(relative) < len(str(path)) else str(path)


def wrapped(text: str, *, width: int) -> str:
    """``text`` with its lines broken between words, never inside one."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        ) or [line]
    return "\n".join(lines)


def for_terminal(text: str, stream: TextIO) -> str:
    """``text``, wrapped to the columns of ``stream`` where that is a terminal."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        columns = 0
    return wrapped(text, width=columns) if columns >= 20 else text


def file_name(text: str, *, limit_bytes: int = 200) -> str:
    """``text`` as a part of a file's name: without slashes, ``..`` and control characters, and of
    at most ``limit_bytes``, since a name has at most 255 and others put something before or behind
    it. Where that changes it, a hash of ``text`` at its end tells it from others."""
    safe = _UNSAFE.sub("-", re.sub(r"\.*/[./]*|\.{2,}", "-", text))
    raw = safe.encode("utf-8")
    if safe == text and len(raw) <= limit_bytes:
        return text
    beginning = raw[: limit_bytes - 9].decode("utf-8", "ignore")
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{beginning}-{digest}"


def columns(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Lines with the cells of each row below each other; the last column is as wide as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"{indent}{'  '.join(cells)}".rstrip())
    return lines
