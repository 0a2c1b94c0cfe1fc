"""Reads the files that the ranks write, while they write them.

Only complete lines are read; a file that does not exist yet is empty.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

from llmx.run.rundir import RunDir, replacing

_STREAMED = re.compile(
    r"logs/(rank|rollout)-\d+\.log|(metrics|rollouts)\.jsonl"
    r"|(samples|tables|inputs|data|balance)\.json",
    re.ASCII,
)
FINAL_STATES = frozenset({"finished", "failed", "interrupted"})
SHOWN_BYTES = 1 << 20
"""The most of a log that the console shows in one poll: its end. The file has all."""
LINE_BYTES = 1 << 20
"""A longer line is split: a program may write without line breaks."""


class LineReader:
    """New complete lines of a growing file. ``from_end``: without those that are there already;
    ``max_bytes``: of more than that at once, the end."""

    def __init__(self, path: Path, *, from_end: bool = False, max_bytes: int | None = None) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.offset = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def read(self, *, final: bool = False) -> list[str]:
        """Lines completed since the last call; ``final``: an incomplete one, too."""
        try:
            with self.path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size < self.offset:
                    self.offset, self._rest = 0, b""  # truncated
                if self.max_bytes is not None and size - self.offset > self.max_bytes:
                    self.offset, self._rest = size - self.max_bytes, b""
                stream.seek(self.offset)
                data = stream.read()
        except OSError:
            data = b""
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (final or len(self._rest) > LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]


def tail_text(path: Path, *, start: int = 0, max_bytes: int = 16384) -> str:
    """The end of a file, of what follows byte ``start``; empty where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            end = stream.tell()
            stream.seek(max(start if start <= end else 0, end - max_bytes))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def apply_update(run_dir: RunDir, message: dict[str, Any]) -> None:
    """Write what an agent read from a private disk into the run directory of this machine."""
    data = base64.b64decode(message["data"])
    name = str(message["path"])
    if not _STREAMED.fullmatch(name):
        raise ValueError(f"{name!r} is not a file that ranks write")
    path = run_dir.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if message["event"] == "replace":
        with replacing(path) as stream:
            stream.write(data)
        return
    with path.open("ab") as stream:
        stream.write(data)
