"""How much work something is, whatever the machine: lines of Python that run, not seconds.

with at_most(lines=20_000):
    solve_batch(...)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def at_most(*, lines: int) -> Iterator[None]:
    """AssertionError as soon as this thread runs more lines than that. What NumPy and other C
    code do within a line counts as that line."""
    ran = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal ran
        if event == "line":
            ran += 1
            if ran > lines:
                sys.settrace(None)
                raise AssertionError(f"more than {lines:,} lines of Python: work grew")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
