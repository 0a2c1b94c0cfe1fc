"""Numbers and text in the form a person reads: ``6.74 B``, ``1 min 12 s``, ``96.9 %``."""

from __future__ import annotations

import math
import re

from llmx.text import printable

TIMES = " \N{MULTIPLICATION SIGN} "


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
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def loss(value: float) -> str:
    """Four significant digits; ``nan`` where there is none."""
    return "nan" if math.isnan(value) else f"{value:#.4g}".rstrip(".")


def percent(part: float) -> str:
    """``0.96875`` as ``96.9 %``."""
    return f"{100 * part:.3g} %"


def gib(value: float) -> str:
    """GiB with two decimals below 10."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def one_line(text: str, *, limit: int) -> str:
    """``text`` on one line, cut at ``limit`` characters with an ellipsis; what a model answered
    cannot steer the terminal."""
    flat = printable(re.sub(r"\s+", " ", text).strip(), keep="")
    return flat if len(flat) <= limit else flat[: limit - 1].rstrip() + "…"
