"""Rows that were not used: counted by reason, kept with the reason, written beside the store."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from llmx.data.source.records import RecordError
from llmx.errors import DataError
from llmx.run.rundir import replacing
from llmx.text import printable

MEMORY_BYTES = 1 << 20
CONTENT_CHARS = 100_000
"""Of a rejected record so much is kept."""


class RejectedUnwritten(DataError):
    """The reject file cannot be written; the records themselves are all prepared."""


class RejectedRecords:
    """Takes note of bad records (``data.on_bad_row=skip``). Memory stays flat: beyond a MiB they
    wait in a temporary file, or from the first on in ``file``, where another process can go on."""

    def __init__(self, file: Path | None = None, *, state: dict[str, Any] | None = None) -> None:
        """``state``: go on from there (see ``state``); what ``file`` has beyond it is cut off."""
        self.counts: Counter[str] = Counter((state or {}).get("counts", {}))
        """How many records for each reason."""
        self._lines: IO[bytes]
        if file is None:
            self._lines = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115
        else:
            self._lines = file.open("a+b")
            self._lines.truncate((state or {}).get("size", 0))
            self._lines.seek(0, os.SEEK_END)
        weakref.finalize(self, self._lines.close)

    @property
    def state(self) -> dict[str, Any]:
        """Enough to go on after a kill, once it is noted; the lines are in the file by then."""
        self._lines.flush()
        return {"counts": dict(self.counts), "size": self._lines.tell()}

    def add(self, error: RecordError) -> None:
        """Note one record."""
        self.counts[error.reason] += 1
        line = {
            "file": str(error.where.file),
            error.where.unit: error.where.number,
            "reason": error.reason,
            "message": str(error),
            "content": error.content[:CONTENT_CHARS],
        }
        try:
            text = json.dumps(line, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half of a surrogate pair: the file stays UTF-8
            text = json.dumps(line).encode()
        self._lines.write(text + b"\n")

    def clear(self) -> None:
        """Forget all, for another reading of the same records."""
        self.counts.clear()
        self._lines.seek(0)
        self._lines.truncate()

    @property
    def first(self) -> str:
        """What is wrong with the first one; empty where there is none."""
        self._lines.seek(0)
        line = self._lines.readline()
        self._lines.seek(0, os.SEEK_END)
        return str(json.loads(line)["message"]) if line else ""

    def copy_to(self, stream: IO[bytes]) -> None:
        """Write all lines."""
        self._lines.seek(0)
        shutil.copyfileobj(self._lines, stream)

    def close(self) -> None:
        self._lines.close()


def counted(reasons: Mapping[str, int]) -> str:
    """``no turns (2), not JSON (1,200)``: how many records by the reason."""
    return ", ".join(f"{reason} ({count:,})" for reason, count in reasons.items())


def write_rejected(path: Path, groups: Sequence[RejectedRecords]) -> Path | None:
    """Write one JSON line a rejected record, whole or not at all; None where there is none."""
    if not any(group.counts for group in groups):
        return None
    try:
        with replacing(path) as stream:
            for group in groups:
                group.copy_to(stream)
    except OSError as error:
        raise RejectedUnwritten(
            f"Cannot write the rejected rows to {printable(str(path))}: {error}. Free some space, "
            "or set data.cache_dir to another disk."
        ) from error
    return path
