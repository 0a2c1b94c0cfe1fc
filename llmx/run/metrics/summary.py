"""The numbers that are left of a run when it is over: of the report and of a tracker's summary.

python -m llmx.observe.report RUN_DIR          shows them
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from llmx.run.metrics.declared import measured
from llmx.run.metrics.lines import Record, step_of


class Summary:
    """What is left of a run when it is over: first and last loss, best evaluation, speed.

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
            for key in ("total_steps", "num_parameters", "world_size"):
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
