"""Progress in a log: a line now and then, with rates and what is left."""

from __future__ import annotations

import io
import re

from llmx.data import progress
from llmx.data.progress import MIB, PreparationProgress


def test_lines_for_a_log(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    stream = io.StringIO()
    with PreparationProgress("Preparing x", total_bytes=4 * MIB, stream=stream) as shown:
        shown.add(size=MIB, tokens=1000)
        shown.add(size=3 * MIB, tokens=1000)
    first, last = stream.getvalue().splitlines()
    number = r"[\d,]+\.\d+"
    pattern = rf"Preparing x: 25%, 1\.0 MiB, {number} MiB/s, {number} M tokens/s, \d+:\d\d left"
    assert re.fullmatch(pattern, first)
    assert last.startswith("Preparing x: 100%, 4.0 MiB, ")
    assert last.endswith(" 0:00 left")


def test_nothing_is_said_of_short_work_or_of_an_unknown_end(monkeypatch):
    stream = io.StringIO()
    with PreparationProgress("x", total_bytes=0, stream=stream) as shown:
        shown.add(size=MIB, tokens=1000)
    assert stream.getvalue() == ""
    assert "left" not in shown.rates()
