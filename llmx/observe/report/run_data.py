"""Everything that a run directory has to tell, read once. A damaged file is left out, and named.

Reads ``config.yaml``, ``overrides.yaml``, ``plan.json``, ``data.json``, ``metrics.jsonl``,
``samples.json``, ``rollouts.jsonl``, ``tables.json``, ``attempts.jsonl``, ``result.json``,
``tracking.json`` and the changes in ``history/``; writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.errors import ConfigError
from llmx.redact import redact, redacted
from llmx.run.metrics import Metric, declared_of, measured
from llmx.run.metrics.lines import Record, Summary, step_of
from llmx.run.rundir import RunDir, no_run, read_mapping
from llmx.run.snapshot import read_overrides
from llmx.run.tail import newest_samples, read_records


@dataclass(frozen=True)
class Table:
    """A table that an evaluation has measured, such as a confusion matrix."""

    title: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]


@dataclass(frozen=True)
class RunData:
    """One run as it lies on disk."""

    run: RunDir
    config: dict[str, Any]
    plan: dict[str, Any]
    records: list[Record]
    samples: dict[str, Any]
    rollouts: list[Record]
    """Some of the samples that the task has generated for its newest step."""
    tables: list[Table]
    tables_step: int
    """The step of the evaluation that measured the tables."""
    result: dict[str, Any] | None
    """None while the run goes on, or where the supervisor was killed."""
    tracking: dict[str, dict[str, str]]
    data: dict[str, list[tuple[str, str]]]
    """Split -> what became of its records, as (name, value)."""
    attempts: list[dict[str, Any]]
    """The lines of ``attempts.jsonl``: the attempts that have ended."""
    changes: list[dict[str, Any]]
    """What ``resume`` changed, oldest first (``history/NNN/changes.json``)."""
    typed: list[str]
    """The overrides that the run was started with."""
    summary: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    now: float = 0.0

    @property
    def name(self) -> str:
        """The run's name, else that of its directory."""
        return self.config.get("name") or self.run.root.name

    @property
    def train(self) -> list[Record]:
        """The ``train`` lines; of a step that was repeated after a restart, the last."""
        return last_of_each_step(self.records, "train")

    @property
    def was_started(self) -> bool:
        """Whether anything of a launch is there; False after ``dry_run=true``."""
        run = self.run
        return any(path.exists() for path in (run.metrics, run.supervisor, run.ranks, run.result))

    @property
    def resumed_at(self) -> int | None:
        """The step at which the last supervisor resumed; None where it began at step 0.

        ``result.json`` and its times are of that one; the metrics are of the whole run.
        """
        begun = [r for r in self._of_last_supervisor() if r.get("kind") in ("start", "event")]
        first = next((r for r in begun if r.get("event", "resumed") == "resumed"), {})
        return step_of(first) if first.get("kind") == "event" else None

    @property
    def train_time_s(self) -> float:
        """Seconds from the first to the last metric of the last supervisor; 0 without two."""
        times = [
            record["time"]
            for record in self._of_last_supervisor()
            if record.get("time") and record.get("kind") in ("start", "train", "eval", "end")
        ]
        return max(times) - min(times) if times else 0.0

    def _of_last_supervisor(self) -> list[Record]:
        began = (self.result or {}).get("started") or 0.0
        return [record for record in self.records if (record.get("time") or 0.0) >= began]

    @property
    def declared(self) -> dict[str, Metric]:
        """The metrics that the task of the run declares."""
        return declared_of(self.records)

    def metric_points(self, kind: str) -> dict[str, list[tuple[int, float]]]:
        """Name -> step and value, over the ``train`` or the ``eval`` lines; of ``eval`` lines also
        a metric that is declared and was not measured."""
        declared = self.declared
        names = [name for name, metric in declared.items() if kind in metric.kinds]
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        for record in self.train if kind == "train" else self.evals:
            for name, value in measured(record, declared).items():
                points.setdefault(name, []).append((step_of(record), value))
        return points

    @property
    def predicted_gib(self) -> float | None:
        """The peak memory of the fullest rank, as planned; None where the plan has none."""
        of_host = ("host_gib", "capacity_gib", "saves_host_gib")
        return max(
            (
                sum(size for key, size in part.items() if key[-4:] == "_gib" and key not in of_host)
                for part in self.plan.get("memory") or []
            ),
            default=None,
        )

    @property
    def evals(self) -> list[Record]:
        """The ``eval`` lines; of a step that was repeated after a restart, the last."""
        return last_of_each_step(self.records, "eval")


def load_run(root: Path) -> RunData:
    """Read a run directory; ConfigError where it is none."""
    run = RunDir(root)
    if not run.config.is_file():
        raise ConfigError(no_run(run.root))
    damage: list[str] = []

    def read(path: Path) -> dict[str, Any]:
        return dict(redacted(read_mapping(path, damage)))

    plan, result, tables = read(run.plan), read(run.result) or None, read(run.tables)
    records = read_records(run.metrics, damage)
    summary = Summary()
    for record in records:
        summary.add(record)
    return RunData(
        run=run,
        config=read(run.config),
        plan=plan,
        records=records,
        samples=read(run.samples),
        rollouts=redacted(newest_samples(run.rollouts, damage)),
        tables=_tables(tables, damage),
        tables_step=tables.get("step") or 0,
        result=result,
        tracking=read(run.tracking),
        data=read(run.data),
        attempts=redacted(read_records(run.attempts, damage)),
        changes=[
            values for path in sorted(run.root.glob("history/*/changes.json"))
            if (values := read(path))
        ],
        typed=[redact(word) for word in read_overrides(run, damage)],
        summary=summary.values(result),
        warnings=[*(plan.get("warnings") or []), *damage],
        now=time.time(),
    )  # fmt: skip


def _tables(content: dict[str, Any], damage: list[str]) -> list[Table]:
    tables = [
        Table(entry["title"], entry["rows"], entry["columns"], entry["values"])
        for entry in content.get("tables") or []
    ]
    readable = [table for table in tables if _is_rectangular(table)]
    if len(readable) < len(tables):
        damage.append(
            "tables.json: a table with a missing value, or with rows of another length than its "
            "columns, is left out."
        )
    return readable


def _is_rectangular(table: Table) -> bool:
    if None in (table.rows, table.columns, table.values) or None in table.values:
        return False
    lengths = [len(row) for row in table.values]
    return lengths == [len(table.columns)] * len(table.rows) and not any(
        value is None for row in table.values for value in row
    )


def last_of_each_step(records: Sequence[Record], kind: str) -> list[Record]:
    """The lines of one kind; of a step that was repeated after a restart, the last."""
    by_step = {step_of(record): record for record in records if record.get("kind") == kind}
    return [by_step[step] for step in sorted(by_step)]
