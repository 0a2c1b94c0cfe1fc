"""``metrics.csv``: the train and eval lines as a table that opens in any spreadsheet.

Columns are the trackers' names (``train/loss``); a line fills those that it has.
"""

from __future__ import annotations

import csv

from llmx.run.metrics.lines import Record, scalars, step_of
from llmx.tracking.base import RunMeta, Tracker


class CsvTracker(Tracker):
    """Writes ``RUN_DIR/metrics.csv``, a line at a time."""

    name = "csv"

    def start(self, meta: RunMeta) -> None:
        self._columns, self._path = ["step", "kind", "time"], meta.run_dir / "metrics.csv"
        self._write([])
        self.report("writing", str(self._path))

    def log(self, record: Record) -> None:
        values = scalars(record)
        if not values:
            return
        new = [name for name in values if name not in self._columns]
        if new:
            # The rows so far are few when a new name comes, so they are written again.
            rows = self._close()
            self._columns += new
            self._write(rows)
        row = {"step": step_of(record), "kind": record["kind"], "time": record.get("time")}
        self._writer.writerow({**row, **values})
        self._stream.flush()

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps: they come again."""
        self._write([row for row in self._close() if int(row["step"]) <= step])

    def _close(self) -> list[dict[str, str]]:
        """The rows of the file, which is closed."""
        self._stream.close()
        with self._path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))

    def _write(self, rows: list[dict[str, str]]) -> None:
        self._stream = self._path.open("w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._stream, self._columns, restval="")
        self._writer.writeheader()
        self._writer.writerows(rows)
        self._stream.flush()

    def finish(self, result: Record | None) -> None:
        self._stream.close()
        self.report("finished", str(self._path))
