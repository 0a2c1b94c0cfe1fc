"""``metrics.csv``: the train and eval lines as a table that opens in any spreadsheet.

Columns are the trackers' names (``train/loss``); a line fills those that it has.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO

from llmx.run.metrics.lines import Record, scalars, step_of
from llmx.tracking.base import Notify, RunMeta, Tracker

FIRST_COLUMNS = ("step", "kind", "time")


class CsvTracker(Tracker):
    """Writes ``RUN_DIR/metrics.csv``, a line at a time."""

    name = "csv"

    def __init__(self, notify: Notify) -> None:
        super().__init__(notify)
        self._columns: list[str] = list(FIRST_COLUMNS)
        self._stream: TextIO | None = None
        self._path = Path()

    def start(self, meta: RunMeta) -> None:
        self._path = meta.run_dir / "metrics.csv"
        self._stream = self._path.open("w", encoding="utf-8", newline="")
        csv.writer(self._stream).writerow(self._columns)
        self._stream.flush()
        self.report("writing", str(self._path))

    def log(self, record: Record) -> None:
        values = scalars(record)
        if not values or self._stream is None:
            return
        new = [name for name in values if name not in self._columns]
        if new:
            # The rows so far are few when a new name comes, so they are written again.
            rows = self._rows()
            self._columns += new
            self._write_anew(rows)
        row = {"step": step_of(record), "kind": record["kind"], "time": record.get("time")}
        writer = csv.DictWriter(self._stream, self._columns, restval="")
        writer.writerow({**row, **values})
        self._stream.flush()

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps: they come again."""
        if self._stream is not None:
            self._write_anew([row for row in self._rows() if int(row["step"]) <= step])

    def _rows(self) -> list[dict[str, str]]:
        with self._path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))

    def _write_anew(self, rows: list[dict[str, str]]) -> None:
        assert self._stream is not None
        self._stream.close()
        self._stream = self._path.open("w", encoding="utf-8", newline="")
        writer = csv.DictWriter(self._stream, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        self._stream.flush()

    def finish(self, result: Record | None) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self.report("finished", str(self._path))
