"""The progress of an attempt: its first, last and saved steps, its hangs, its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from llmx.launch.supervision.hang import HangDetector
from llmx.launch.supervision.result import Result
from llmx.run.metrics.declared import Metric, declared_in, is_declaration, measured

Record = Mapping[str, Any]


class AttemptProgress:
    """From ``metrics.jsonl`` and the statuses. ``earlier``: records of earlier attempts."""

    def __init__(self, *, hang_timeout_s: float | None, earlier: Iterable[Record]) -> None:
        self.first_step: int | None = None
        """The step that this attempt began at; None before training."""
        self.saved_step: int | None = None
        """The newest checkpoint that this attempt committed."""
        self.hang = HangDetector(hang_timeout_s)
        self._step = 0
        self._rates: list[float] = []
        self._last: dict[str, Record] = {}
        self._declared: dict[str, Metric] = {}
        for record in earlier:
            self._remember(record)

    @property
    def last_step(self) -> int | None:
        """The last step that is known to be trained in this attempt; None before the first."""
        last, first = max(self._step, self.saved_step or 0), self.first_step
        return last if first is not None and last > first else None

    def take_record(self, record: Record) -> None:
        """A new record of this attempt."""
        self._remember(record)
        kind, event = record.get("kind"), record.get("event")
        if kind == "start":
            self.first_step = int(record.get("resumed_from") or 0)
        elif event == "resumed":
            self.first_step = int(record["step"])
        elif event == "saved":
            self.saved_step = max(int(record["step"]), self.saved_step or 0)
        elif kind == "train":
            self._step = max(int(record["step"]), self._step)
            if record.get("step_time_s"):
                self.hang.add_step_time(float(record["step_time_s"]), time.monotonic())

    def update(self, statuses: Mapping[int, Record]) -> None:
        """The current statuses of the ranks."""
        self.hang.update(statuses, time.monotonic())
        for status in statuses.values():
            self._step = max(int(status.get("step") or 0), self._step)
            saved = status.get("saved_step")
            if self.first_step is not None and isinstance(saved, int) and saved > self.first_step:
                self.saved_step = max(saved, self.saved_step or 0)

    def fill(self, result: Result) -> None:
        """Set the metrics of a result that are known."""
        train, evaluation = self._last.get("train", {}), self._last.get("eval", {})
        result.steps = int(train.get("step") or 0)
        result.final_loss = train.get("loss")
        names = [name for name, metric in self._declared.items() if "eval" in metric.kinds]
        result.metrics = {**dict.fromkeys(names), **measured(evaluation, self._declared)}
        # The first half includes warm-up.
        late = sorted(self._rates[len(self._rates) // 2 :])
        result.tokens_per_s = late[len(late) // 2] if late else None

    def _remember(self, record: Record) -> None:
        self._last[str(record.get("kind"))] = record
        if is_declaration(record):
            self._declared = declared_in(record)
        if record.get("kind") == "train" and record.get("tokens_per_s"):
            self._rates.append(float(record["tokens_per_s"]))
