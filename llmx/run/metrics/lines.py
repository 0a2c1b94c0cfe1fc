"""Reads ``metrics.jsonl``, and gives its values the names that trackers show.

The lines are described in ``llmx/run/metrics/__init__.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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


OF_START = ("total_steps", "num_parameters", "num_trained", "world_size")


def summary(records: Sequence[Record], result: Record | None = None) -> dict[str, Any]:
    """Numbers of a whole run, as far as they are known: first and last loss, best evaluation,
    speed; with outcome, cause and fix of ``result.json``."""
    kinds = ("start", "train", "eval", "event")
    starts, train, evals, events = ([r for r in records if r.get("kind") == k] for k in kinds)
    resumed = [event for event in events if event.get("event") == "resumed"]
    saved = [event for event in events if event.get("event") == "saved"]
    values: dict[str, Any] = {}
    for record in (*starts, *resumed):
        values |= {key: record[key] for key in OF_START if record.get(key) is not None}
    if resumed:
        values |= {"restarts": len(resumed), "resumed_from": step_of(resumed[-1])}
    if saved:
        values |= {"checkpoints": len(saved), "last_checkpoint": step_of(saved[-1])}
    for record in train:
        values["steps"] = step_of(record)
        if record.get("loss") is not None:
            values.setdefault("first_loss", record["loss"])
            values["final_loss"] = record["loss"]
        elif record.get("nonfinite"):
            values["final_loss"] = math.nan
        names = ("samples", "tokens", "epoch")
        values |= {name: record[name] for name in names if record.get(name) is not None}
    losses = [(line["loss"], step_of(line)) for line in evals if line.get("loss") is not None]
    if losses:
        best, best_step = min(losses, key=lambda pair: pair[0])
        values |= {"first_eval_loss": losses[0][0], "final_eval_loss": losses[-1][0]}
        values |= {"best_eval_loss": best, "best_eval_step": best_step}
    for record in evals:
        for name, value in measured(record, {}).items():
            if step_of(record):
                values[name] = value
            else:
                values.setdefault(f"{name}_before", value)
    for name in ("tokens_per_s", "mfu"):
        speeds = [line[name] for line in train if line.get(name) is not None]
        if speeds:
            values[name] = statistics.median(speeds[1:] or speeds)  # the first is of the warming up
    memory_gib = max((size for line in train for size in line.get("memory_gib") or ()), default=0)
    if memory_gib:
        values["memory_gib_max"] = memory_gib
    times = [line["time"] for line in records if line.get("time") and line.get("kind") != "event"]
    if times and max(times) > times[0]:
        values["train_time_s"] = max(times) - times[0]
    for key in ("outcome", "cause", "fix", "failed_rank", "host"):
        if result and result.get(key) not in (None, ""):
            values[key] = result[key]
    return values
