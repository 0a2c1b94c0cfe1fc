"""The progress of an attempt: what its ranks have reached, and since when nothing of it changes.

Before training, progress is a change of any rank's state, or a new line in any rank's log; later it
is a change of any rank's state or step, or a logged step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from llmx.launch.supervision.outcome import Result
from llmx.run.metrics.declared import Metric, declared_in, is_declaration, measured

MIN_TIMEOUT_S = 600.0
STEPS = 20
"""The default time-out, in times of a usual step."""
SLOW_PHASE_FACTOR = 6
"""The time-out is so many times longer while a rank saves or evaluates, and in the first step of an
attempt, which compiles kernels and opens connections."""
NOTICE_S = 60.0
"""Without progress the console says where ranks wait: after this time, then after twice as long,
and so on."""
OVERDUE_S = 20.0
OVERDUE_STEPS = 10
"""After so long, and so many usual steps, without a step the console and ``status`` say so."""
_WATCHED = frozenset({"training", "evaluating", "saving"})
BEFORE_TRAINING = frozenset({"starting", "loading"})
"""States of a rank."""
Record = Mapping[str, Any]


class Progress:
    """Progress by ``metrics.jsonl``, the statuses and the logs. Times: one monotonic clock."""

    def __init__(
        self,
        *,
        hang_timeout_s: float | None = None,
        loading_timeout_s: float = 0.0,
        earlier: Iterable[Record] = (),
    ) -> None:
        """``earlier``: records of earlier attempts."""
        self.first_step: int | None = None
        """The step that this attempt began at; None before training."""
        self.saved_step: int | None = None
        """The newest checkpoint that this attempt committed."""
        self.is_dumping = False
        """Stacks are being written to the logs, which are no progress."""
        self._hang_timeout_s, self._loading_timeout_s = hang_timeout_s, loading_timeout_s
        self._seen: dict[int, tuple[str, int]] = {}
        self._log_bytes = 0
        self._progress_at = self._noticed_s = 0.0
        self._step_times_s: list[float] = []
        self._timed_step: tuple[int, float] | None = None
        """The last step that finished in this attempt, and when."""
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

    @property
    def is_loading(self) -> bool:
        """Whether a rank has not begun to train."""
        return not BEFORE_TRAINING.isdisjoint(self._states())

    @property
    def usual_s(self) -> float:
        """The median time of a step; 0 where none has ended."""
        return statistics.median(self._step_times_s) if self._step_times_s else 0.0

    def update(self, statuses: Mapping[int, Record], now: float) -> None:
        """Take the current statuses of the ranks."""
        for status in statuses.values():
            self._step = max(int(status.get("step") or 0), self._step)
            saved = status.get("saved_step")
            if self.first_step is not None and isinstance(saved, int) and saved > self.first_step:
                self.saved_step = max(saved, self.saved_step or 0)
        before, self._seen = (
            self._seen,
            {
                rank: (str(status.get("state")), int(status.get("step") or 0))
                for rank, status in statuses.items()
            },
        )
        if self._seen == before:
            return
        self._mark_progress(now)
        if any(
            step > before[rank][1] and before[rank][0] in _WATCHED
            for rank, (_, step) in self._seen.items()
            if rank in before
        ):
            # Measures steps that are not logged.
            newest = max(step for _, step in self._seen.values())
            if self._timed_step is not None and newest > self._timed_step[0]:
                step, ended_at = self._timed_step
                self.add_step_time((now - ended_at) / (newest - step), now)
            self._timed_step = (newest, now)

    def take_log_bytes(self, log_bytes: int, now: float) -> None:
        """Take the size of the logs of all ranks, before training."""
        if log_bytes != self._log_bytes and not self.is_dumping:
            self._log_bytes = log_bytes
            self._mark_progress(now)

    def end_dump(self, log_bytes: int) -> None:
        """Stacks were written. ``log_bytes``: with them."""
        self._log_bytes, self.is_dumping = log_bytes, False

    def add_step_time(self, step_time_s: float, now: float) -> None:
        """Take a logged step: progress that the statuses (every 5 s) may not show yet."""
        self._mark_progress(now)
        self._step_times_s = [*self._step_times_s[-200:], step_time_s]

    def pause(self, seconds: float) -> None:
        """Do not count the last seconds: a host was out of sight."""
        self._progress_at += seconds

    def take_record(self, record: Record) -> None:
        """Take a new record of this attempt."""
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
                self.add_step_time(float(record["step_time_s"]), time.monotonic())

    def timeout_s(self) -> float | None:
        """Seconds without progress that count as a hang; None where there cannot be one now."""
        states = self._states()
        if self.is_loading:
            return self._loading_timeout_s or None
        active = states & _WATCHED
        if not active or states - _WATCHED - {"finished"} or self._hang_timeout_s == 0:
            return None
        limit_s = self._hang_timeout_s or max(MIN_TIMEOUT_S, STEPS * self.usual_s)
        has_stepped = bool(self._timed_step or self._step_times_s)
        return limit_s if active == {"training"} and has_stepped else SLOW_PHASE_FACTOR * limit_s

    def stuck_s(self, now: float) -> float | None:
        """Seconds without progress, where that is a hang; else None."""
        return self._longer_than(self.timeout_s(), now)

    def overdue_s(self, now: float) -> float | None:
        """Seconds without progress, where the next step, or the next sign of loading, is overdue;
        else None."""
        if self.is_loading:
            return self._longer_than(NOTICE_S, now)
        if self._states() - {"finished"} != {"training"}:
            return None
        limit_s = max(OVERDUE_S, OVERDUE_STEPS * self.usual_s) if self.usual_s else NOTICE_S
        return self._longer_than(limit_s, now)

    def notice_due(self, overdue_s: float) -> bool:
        """Whether the console is to say it now: at first, after ``NOTICE_S``, after twice as long,
        and so on."""
        if overdue_s <= self._noticed_s:
            return False
        self._noticed_s = NOTICE_S if overdue_s < NOTICE_S else 2 * overdue_s
        return True

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

    def _states(self) -> set[str]:
        return {state for state, _ in self._seen.values()}

    def _mark_progress(self, now: float) -> None:
        self._progress_at, self._noticed_s = now, 0.0

    def _longer_than(self, limit_s: float | None, now: float) -> float | None:
        waited_s = now - self._progress_at
        return waited_s if limit_s is not None and waited_s > limit_s else None
