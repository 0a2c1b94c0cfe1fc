"""Rows that were not used: counted by reason, kept with the reason, written beside the store."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections import Counter
from pathlib import Path

from llmx.data.rows import RowError
from llmx.errors import DataError

MEMORY_BYTES = 1 << 20
CONTENT_CHARS = 100_000
"""Of a rejected row so much is kept."""


class Rejects:
    """Takes note of bad rows (``data.on_bad_row=skip``). Memory stays flat: beyond a MiB they
    wait in a temporary file."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """How many rows for each reason."""
        self._spool = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._spool.close)

    def add(self, error: RowError) -> None:
        """Note one row."""
        self.counts[error.reason] += 1
        line = {
            "file": str(error.where.file),
            error.where.unit: error.where.number,
            "reason": error.reason,
            "message": str(error),
            "content": error.content[:CONTENT_CHARS],
        }
        text = json.dumps(line, ensure_ascii=False) + "\n"
        self._spool.write(text.encode("utf-8", "surrogatepass"))

    def clear(self) -> None:
        """Begin anew, for another reading of the same rows."""
        self.counts.clear()
        self._spool.seek(0)
        self._spool.truncate()

    def write(self, path: Path) -> Path | None:
        """Write one JSON line a rejected row, whole or not at all; None where there is none."""
        if not self.counts:
            return None
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self._spool.seek(0)
            with temporary.open("wb") as stream:
                shutil.copyfileobj(self._spool, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise DataError(
                f"Cannot write the rejected rows to {path}: {error}. Free some space, or set "
                "data.cache_dir to another disk."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
            self._spool.seek(0, os.SEEK_END)
        return path
