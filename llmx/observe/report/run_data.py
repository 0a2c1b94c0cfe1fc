"""Everything that a run directory has to tell, read once; missing and torn files are fine.

Reads ``config.yaml``, ``overrides.yaml``, ``plan.json``, ``data.json``, ``metrics.jsonl``,
``samples.json``, ``tables.json``, ``attempts.jsonl``, ``result.json``, ``tracking.json`` and the
changes in ``history/``; writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.errors import ConfigError
from llmx.redact import redact, redacted
from llmx.run.metrics import Metric, declared_of, measured
from llmx.run.metrics.lines import MetricsTail, Record, Summary, step_of
from llmx.run.rundir import RunDir, load_yaml, no_run, read_json, read_mapping
from llmx.run.snapshot import read_overrides
from llmx.run.tail import read_records
from llmx.text import plural


@dataclass(frozen=True)
class RunData:
    """One run as it lies on disk."""

    run: RunDir
    config: dict[str, Any]
    plan: dict[str, Any]
    records: list[Record]
    samples: dict[str, Any]
    tables: dict[str, Any]
    """What the newest evaluation left for the report: ``step`` and ``tables``."""
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
        return _last_of_each_step(self.records, "train")

    @property
    def was_started(self) -> bool:
        """Whether anything of a launch is there; False after ``dry_run=true``."""
        run = self.run
        return any(path.exists() for path in (run.metrics, run.supervisor, run.ranks, run.result))

    @property
    def resumed_at(self) -> int | None:
        """Where the last supervisor took the run up; None where it began at the beginning.

        ``result.json`` and its times are of that one; the metrics are of the whole run.
        """
        begun = [r for r in self._of_last_supervisor() if r.get("kind") in ("start", "event")]
        first = next((r for r in begun if r.get("event", "resumed") == "resumed"), {})
        return step_of(first) if first.get("kind") == "event" else None

    @property
    def train_time_s(self) -> float:
        """From the first to the last metric of the last supervisor; 0 where there are not two."""
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
    def evals(self) -> list[Record]:
        """The ``eval`` lines."""
        return _last_of_each_step(self.records, "eval")


def load_run(root: Path) -> RunData:
    """Read a run directory; ConfigError where it is none."""
    run = RunDir(root)
    if not run.config.is_file():
        raise ConfigError(no_run(run.root))
    warnings: list[str] = []
    plan = _read(run.plan, read_json, warnings)
    warnings = [str(text) for text in plan.get("warnings") or []] + warnings
    tail = MetricsTail(run.metrics)
    records = tail.read()
    if tail.bad_lines:
        warnings.append(f"metrics.jsonl: {plural(tail.bad_lines, 'unreadable line')} left out.")
    result = _read(run.result, read_json, warnings) or None
    summary = Summary()
    for record in records:
        summary.add(record)
    return RunData(
        run=run,
        config=_read(run.config, _read_yaml, warnings),
        plan=plan,
        records=records,
        samples=_read(run.samples, read_json, warnings),
        tables=_read(run.tables, read_json, warnings),
        result=result,
        tracking=_read(run.root / "tracking.json", read_json, warnings),
        data=_data(run, warnings),
        attempts=redacted(read_records(run.attempts)),
        changes=_changes(run),
        typed=[redact(word) for word in read_overrides(run)],
        summary=summary.values(result),
        warnings=warnings,
        now=time.time(),
    )


def _read(path: Path, read: Callable[[Path], Any], warnings: list[str]) -> dict[str, Any]:
    """A mapping from ``path``; empty where there is no file, with a warning where it is torn."""
    try:
        value = read(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        warnings.append(f"{path.name} is not a JSON object or a YAML mapping, so it is left out.")
        return {}
    return dict(redacted(value))


def _data(run: RunDir, warnings: list[str]) -> dict[str, list[tuple[str, str]]]:
    """What became of the records of each split, from ``data.json``."""
    splits = _read(run.data, read_json, warnings)
    try:
        return {
            str(split): [(str(name), str(value)) for name, value in rows]
            for split, rows in splits.items()
        }
    except (TypeError, ValueError):
        return {}


def _changes(run: RunDir) -> list[dict[str, Any]]:
    files = sorted(run.root.glob("history/*/changes.json"))
    return [values for path in files if (values := read_mapping(path))]


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return load_yaml(path)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _last_of_each_step(records: list[Record], kind: str) -> list[Record]:
    by_step = {step_of(record): record for record in records if record.get("kind") == kind}
    return [by_step[step] for step in sorted(by_step)]
