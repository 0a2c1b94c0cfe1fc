"""The ends of the files that ranks write, and what agents send of those on private disks."""

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
