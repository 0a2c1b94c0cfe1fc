"""Reads ``metrics.jsonl``, and gives its values the names that trackers show.

The lines are described in ``llmx/run/metrics/__init__.py``.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from llmx.run.metrics.declared import is_number, measured
from llmx.run.tail import LineTail, read_records, record_of

Record = dict[str, Any]

GROUPS = dict.fromkeys(
    (
        *("tokens_per_s", "mfu", "step_time_s", "data_wait_s", "memory_gib", "forward_s"),
        *("backward_s", "update_s", "idle_share", "probe_s"),
    ),
    "perf",
)
"""The trackers' group of a key of a ``train`` line; every other one is ``train``."""

NOT_METRICS = {"kind", "step", "time", "nonfinite"}


def step_of(record: Record) -> int:
    """The optimizer step a line belongs to; a ``start`` line to the step it resumed from."""
    return int(record.get("step", record.get("resumed_from", 0)) or 0)


def scalars(record: Record) -> dict[str, float]:
    """Flat tracker names and values of one line: ``train/loss``, ``perf/memory_gib_max``, ...

    A list of numbers, one a rank, becomes its maximum and one value a rank. A ``null`` that
    stands for NaN (``"nonfinite": true``) becomes NaN, any other is left out. Lines other
    than ``train`` and ``eval`` have no scalars.
    """
    kind = record.get("kind")
    if kind not in ("train", "eval"):
        return {}
    values: dict[str, float] = {}
    for key, value in record.items():
        if key in NOT_METRICS:
            continue
        group = GROUPS.get(key, "train") if kind == "train" else kind
        name = f"{group}/{key}"
        if value is None and record.get("nonfinite") and key in ("loss", "grad_norm"):
            values[name] = math.nan
        elif isinstance(value, bool | int | float):
            values[name] = float(value)
        elif isinstance(value, list) and value and all(is_number(item) for item in value):
            values[f"{name}_max"] = float(max(value))
            if len(value) > 1:
                for rank, item in enumerate(value):
                    values[f"{name}/rank_{rank}"] = float(item)
    return values


def event_scalars(record: Record) -> dict[str, float]:
    """Names and values of an ``event`` line: ``saved/step``, ``saved/bytes``, ``resumed/step``."""
    if record.get("kind") != "event":
        return {}
    name = record.get("event", "event")
    numbers = {k: v for k, v in record.items() if k not in ("kind", "time") and is_number(v)}
    return {f"{name}/{key}": float(value) for key, value in numbers.items()}


def read_metrics(path: Path) -> list[Record]:
    """Every line of ``metrics.jsonl`` but torn ones; an empty list where there is no file yet."""
    return read_records(path)


class MetricsTail:
    """Reads what was appended to ``metrics.jsonl`` since the last call.

    A line that is not finished yet stays for the next call; a line that is not JSON is
    counted in ``bad_lines`` and left out. A resume rewrites the file without the steps that it
    repeats: then ``cut_to`` is the last step that is left, and only the lines are given that
    were not given before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad_lines = 0
        self.cut_to: int | None = None
        """The step to which lines already given were taken back, at the last call; else None."""
        self._lines = LineTail(path)
        self._given: list[tuple[int, int]] = []
        """Every line that was given: a hash of its bytes, and its step (that of the line before
        where it has none)."""

    def read(self) -> list[Record]:
        """The new records, in order."""
        lines = [line for line in self._lines.read() if line.strip()]
        self.cut_to = None
        if self._lines.began_anew:
            lines = lines[self._take_back(lines) :]
        records = []
        for line in lines:
            record = record_of(line)
            if record is None:
                self.bad_lines += 1
            else:
                records.append(record)
            step = self._given[-1][1] if self._given else 0
            if record is not None and "step" in record and record.get("kind") != "event":
                step = step_of(record)
            self._given.append((hash(line), step))
        return records

    def _take_back(self, lines: list[bytes]) -> int:
        """Forget what is no longer in the file; returns how many lines were given and still are."""
        num_same = 0
        for line, (former_hash, _) in zip(lines, self._given, strict=False):
            if hash(line) != former_hash:
                break
            num_same += 1
        if num_same < len(self._given):
            self.cut_to = self._given[num_same - 1][1] if num_same else 0
            del self._given[num_same:]
        return num_same


class Summary:
    """Numbers of a whole run: first and last loss, best evaluation, speed.

    ``add`` takes the records in order; ``values`` gives the numbers that are known, for the
    summary of a tracker and the table of the report.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._tokens_per_s: list[float] = []
        self._mfu: list[float] = []
        self._memory_gib = 0.0
        self._first_time = self._last_time = 0.0

    def add(self, record: Record) -> None:
        kind = record.get("kind")
        if kind in ("start", "train", "eval", "end"):
            now = record.get("time") or 0.0
            self._first_time = self._first_time or now
            self._last_time = max(self._last_time, now)
        if kind == "start":
            for key in ("total_steps", "num_parameters", "num_trained", "world_size"):
                if record.get(key) is not None:
                    self._values[key] = record[key]
        elif kind == "train":
            self._train(record)
        elif kind == "eval":
            self._eval(record)
        elif kind == "event":
            self._event(record)

    def _event(self, record: Record) -> None:
        event = record.get("event")
        if event == "resumed":
            self._values["restarts"] = self._values.get("restarts", 0) + 1
            self._values["resumed_from"] = step_of(record)
            if record.get("total_steps") is not None:
                self._values["total_steps"] = record["total_steps"]
        elif event == "saved":
            self._values["checkpoints"] = self._values.get("checkpoints", 0) + 1
            self._values["last_checkpoint"] = step_of(record)

    def _train(self, record: Record) -> None:
        loss = record.get("loss")
        if loss is not None:
            self._values.setdefault("first_loss", loss)
            self._values["final_loss"] = loss
        elif record.get("nonfinite"):
            self._values["final_loss"] = math.nan
        self._values["steps"] = step_of(record)
        for key in ("samples", "tokens", "epoch"):
            if record.get(key) is not None:
                self._values[key] = record[key]
        if record.get("tokens_per_s") is not None:
            self._tokens_per_s.append(record["tokens_per_s"])
        if record.get("mfu") is not None:
            self._mfu.append(record["mfu"])
        self._memory_gib = max([self._memory_gib, *(record.get("memory_gib") or [])])

    def _eval(self, record: Record) -> None:
        loss = record.get("loss")
        if loss is not None:
            self._values.setdefault("first_eval_loss", loss)
            self._values["final_eval_loss"] = loss
            best = self._values.get("best_eval_loss")
            if best is None or loss < best:
                self._values["best_eval_loss"] = loss
                self._values["best_eval_step"] = step_of(record)
        for name, value in measured(record, {}).items():
            if step_of(record) == 0:
                self._values.setdefault(f"{name}_before", value)
            else:
                self._values[name] = value

    def values(self, result: Record | None = None) -> dict[str, Any]:
        """The known numbers, with outcome, cause and fix of ``result.json`` when given."""
        values = dict(self._values)
        if self._tokens_per_s:
            values["tokens_per_s"] = _typical(self._tokens_per_s)
        if self._mfu:
            values["mfu"] = _typical(self._mfu)
        if self._memory_gib:
            values["memory_gib_max"] = self._memory_gib
        if self._last_time > self._first_time:
            values["train_time_s"] = self._last_time - self._first_time
        for key in ("outcome", "cause", "fix", "failed_rank", "host"):
            if result and result.get(key) not in (None, ""):
                values[key] = result[key]
        return values


def _typical(values: list[float]) -> float:
    """The median without the first value, which holds the warming up."""
    return statistics.median(values[1:] or values)
