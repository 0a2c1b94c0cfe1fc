"""Follows the progress of an attempt, detects a hang, dumps the stacks of all ranks, and finds the
rank that the others wait for.

A rank that exited is not a hang, and neither is a step that takes as long as usual.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llmx.launch.agents.connection import Connection
from llmx.launch.supervision.outcome import Hang, Result
from llmx.launch.supervision.tail import tail_text
from llmx.run.metrics.declared import Metric, declared_in, is_declaration, measured
from llmx.run.rundir import RunDir

MIN_TIMEOUT_S = 600.0
STEPS = 20
"""The default time-out, in times of a usual step."""
SLOW_PHASE_FACTOR = 6
"""The time-out is so many times longer while a rank saves or evaluates, and in the first step of an
attempt, which compiles kernels and opens connections."""
FROZEN_S = 20.0
"""A thread of each rank refreshes its status every 5 s; an older one means that the whole process
is stopped."""
STACKS_S = 10.0
"""For the ranks to write their stacks."""
UNSAFE_STACKS_S = 3.0
"""For those that did not answer SIGUSR2, where the attempt ends anyway: SIGQUIT may kill them
(``llmx.train.status``)."""
REST_S = 0.5
"""For the rest of a dump that has begun."""
NOTICE_S = 60.0
"""Without progress before the first step, the console says where ranks wait: after this time, then
after twice as long, and so on."""
OVERDUE_S = 20.0
OVERDUE_STEPS = 10
"""After so long, and so many usual steps, without a step the console and ``status`` say so."""
NOTICE_STACKS_S = 5.0
"""For the ranks to write their stacks for it."""
_WATCHED = frozenset({"training", "evaluating", "saving"})
BEFORE_TRAINING = frozenset({"starting", "loading"})
"""States of a rank."""
_IN_COLLECTIVE = re.compile(
    r"distributed_c10d|torch/distributed|deepspeed/comm/|in (synchronize|all_reduce|all_gather\w*"
    r"|reduce_scatter\w*|broadcast|barrier)\b|partition_parameters\.py\", line \d+ in wait"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_DUMP = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)
Statuses = Mapping[int, Mapping[str, Any]]


class HangDetector:
    """Detects progress: a change of the step or state of any rank. Times: one monotonic clock."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[int, tuple[str, int]] = {}
        self._progress_at = 0.0
        self._step_times_s: list[float] = []
        self._step: tuple[int, float] | None = None
        """The last step that finished in this attempt, and when."""

    def update(self, statuses: Statuses, now: float) -> None:
        """Compare the current statuses with the last ones."""
        states = {
            rank: (str(status.get("state")), int(status.get("step") or 0))
            for rank, status in statuses.items()
        }
        if states != self._seen:
            if any(
                step > self._seen[rank][1] and self._seen[rank][0] in _WATCHED
                for rank, (_, step) in states.items()
                if rank in self._seen
            ):
                # Measures steps that are not logged.
                newest = max(step for _, step in states.values())
                if self._step is not None and newest > self._step[0]:
                    self.add_step_time((now - self._step[1]) / (newest - self._step[0]), now)
                self._step = (newest, now)
            self._seen, self._progress_at = states, now

    def add_step_time(self, step_time_s: float, now: float) -> None:
        """Take a logged step: progress that the statuses (every 5 s) may not show yet."""
        self._progress_at = now
        self._step_times_s = [*self._step_times_s[-200:], step_time_s]

    @property
    def usual_s(self) -> float:
        """What a step takes; 0 where none has ended."""
        return statistics.median(self._step_times_s) if self._step_times_s else 0.0

    def overdue_s(self, now: float) -> float | None:
        """Seconds since the last step, where a step is overdue; else None."""
        if {state for state, _ in self._seen.values()} - {"finished"} != {"training"}:
            return None
        limit_s = max(OVERDUE_S, OVERDUE_STEPS * self.usual_s) if self.usual_s else NOTICE_S
        waited_s = now - self._progress_at
        return waited_s if waited_s > limit_s else None

    def timeout_s(self) -> float | None:
        """Seconds without progress that count as a hang; None where there cannot be one now."""
        states = {state for state, _ in self._seen.values()}
        active = states & _WATCHED
        if not active or states - _WATCHED - {"finished"} or self._timeout_s == 0:
            return None
        limit_s = self._timeout_s or max(MIN_TIMEOUT_S, STEPS * self.usual_s)
        usual = active == {"training"} and bool(self._step or self._step_times_s)
        return limit_s if usual else SLOW_PHASE_FACTOR * limit_s

    def stuck_s(self, now: float) -> float | None:
        """Seconds without progress, where that is a hang; else None."""
        limit_s = self.timeout_s()
        waited_s = now - self._progress_at
        return waited_s if limit_s is not None and waited_s > limit_s else None


class LoadingWatch:
    """Follows ranks before their first step. Progress is a change of any rank's state, or a new
    line in any rank's log. Times: one monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """``launch.loading_timeout_s``; 0: never."""
        self._states: dict[int, str] = {}
        self._log_bytes = 0
        self._progress_at = 0.0
        self._notice_s = NOTICE_S
        self.is_paused = False
        """While stacks are written to the logs, which are no progress."""

    def update(self, statuses: Statuses, log_bytes: int, now: float) -> None:
        """``log_bytes``: of the logs of all ranks."""
        if self.is_paused:
            return
        states = {rank: str(status.get("state")) for rank, status in statuses.items()}
        if (states, log_bytes) != (self._states, self._log_bytes):
            self._states, self._log_bytes = states, log_bytes
            self._progress_at, self._notice_s = now, NOTICE_S

    def pause(self, seconds: float) -> None:
        """A host was out of sight for so long: what its ranks did meanwhile is not known yet."""
        self._progress_at += seconds

    def silent_s(self, now: float) -> float | None:
        """Seconds without progress; None where no rank loads."""
        loading = BEFORE_TRAINING.intersection(self._states.values())
        return now - self._progress_at if loading else None

    def is_stuck(self, now: float) -> bool:
        """Whether the attempt is to be ended."""
        silent_s = self.silent_s(now)
        return silent_s is not None and 0 < self.timeout_s < silent_s

    def notice_due(self, now: float) -> bool:
        """Whether to say where the ranks wait."""
        silent_s = self.silent_s(now)
        return silent_s is not None and silent_s > self._notice_s

    def noticed(self, log_bytes: int) -> None:
        """A notice was shown. ``log_bytes``: with the stacks that were written for it."""
        self._log_bytes = log_bytes
        self._notice_s *= 2
        self.is_paused = False


def waiting_places(logs: Mapping[int, str], hosts: Mapping[int, str]) -> list[str]:
    """A line for each place in the code where ranks are, by the stacks at the end of their logs.
    ``hosts``: the name of each rank's host; a rank without a log did not answer."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        frames = _FRAME.findall(main_stack(logs.get(rank, "")))
        place = "no answer: its process is stopped, or blocked in the kernel"
        if frames:
            place = _place(frames[0])
            llmx_frame = next((frame for frame in frames if "llmx/" in frame[0]), frames[0])
            if llmx_frame != frames[0]:
                place += f", called from {_place(llmx_frame)}"
        ranks.setdefault(place, []).append(rank)
    return [
        f"{'rank' if len(listed) == 1 else 'ranks'} "
        + ", ".join(f"{rank} ({hosts[rank]})" for rank in listed[:4])
        + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
        + f": {place}"
        for place, listed in ranks.items()
    ]


def _place(frame: tuple[str, str, str]) -> str:
    path, line, function = frame
    return f"{function} ({re.sub(r'.*/(site-packages/|(?=llmx/))', '', path)}:{line})"


def find_stuck_rank(
    statuses: Statuses, logs: Mapping[int, str], ages_s: Mapping[int, float]
) -> tuple[int | None, str]:
    """The rank that the others wait for, and how it was found.

    ``logs``: rank -> the end of its log, with its stacks; ``ages_s``: rank -> age of its status, by
    the clock of its host.
    """
    silent = sorted(set(statuses) - set(logs))
    if logs and len(silent) == 1:
        return silent[0], "it does not respond: its process is stopped, or blocked in the kernel"
    frozen = {rank: age for rank, age in ages_s.items() if age > FROZEN_S}
    if frozen and len(frozen) < len(ages_s):
        rank = max(frozen, key=lambda r: frozen[r])
        return rank, f"its process has been stopped for {frozen[rank]:.0f} s"
    steps = {rank: int(status.get("step") or 0) for rank, status in statuses.items()}
    if len(set(steps.values())) > 1:
        rank = min(steps, key=lambda r: steps[r])
        return rank, f"it is at step {steps[rank]}, others are at step {max(steps.values())}"
    outside = [rank for rank, log in logs.items() if not _IN_COLLECTIVE.search(main_stack(log))]
    if len(outside) == 1 and len(logs) > 1:
        top = _FRAME.search(main_stack(logs[outside[0]]))
        where = f"{top[3]} ({top[1]}:{top[2]})" if top else "outside of the communication"
        return outside[0], f"the others wait in a collective, it is in {where}"
    return None, ""


def main_stack(log: str) -> str:
    """The stack of the main thread, which is the last one of a dump, in the last dump of a log."""
    starts = [match.start() for match in _DUMP.finditer(log)]
    if not starts:
        return ""
    lines = log[starts[-1] :].splitlines()
    stack = [lines[0]]
    for line in lines[1:]:
        if not line.startswith("  "):
            break
        stack.append(line)
    return "\n".join(stack)


def dump_stacks(
    run_dir: RunDir,
    statuses: Mapping[int, Mapping[str, Any]],
    *,
    stuck_s: float,
    patience_s: Mapping[str, float],
    clock_offsets_s: Mapping[int, float],
    connections: Sequence[Connection],
    poll: Callable[[], None],
) -> Hang:
    """Have every rank dump its stacks (``request_stacks``), and find the one that the others wait
    for.

    ``clock_offsets_s``: rank -> clock of its host minus that of this machine; ``poll``:
    receives what the agents send, and waits a moment.
    """
    now = time.time()  # before the dump, which changes the logs
    ages_s = {
        rank: now - (float(status.get("time") or 0.0) - clock_offsets_s.get(rank, 0.0))
        for rank, status in statuses.items()
    }
    logs = request_stacks(
        run_dir, list(statuses), patience_s=patience_s, connections=connections, poll=poll
    )
    rank, why = find_stuck_rank(statuses, logs, ages_s)
    stack = "" if rank is None else main_stack(logs.get(rank, ""))
    step = min(int(status.get("step") or 0) for status in statuses.values())
    return Hang(now, stuck_s, step, rank, why, stack)


def request_stacks(
    run_dir: RunDir,
    ranks: Sequence[int],
    *,
    patience_s: Mapping[str, float],
    connections: Sequence[Connection],
    poll: Callable[[], None],
) -> dict[int, str]:
    """Have ranks dump their stacks; rank -> the end of its log, of those that did.

    ``patience_s``: signal -> seconds to wait for those that have not answered before.
    """
    sizes = {rank: _size(run_dir, rank) for rank in ranks}
    for name, limit_s in patience_s.items():
        silent = [rank for rank, size in sizes.items() if _size(run_dir, rank) == size]
        for connection in connections:
            if silent and connection.lost_at is None:
                connection.send("signal", name=name, ranks=silent)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            _size(run_dir, rank) == sizes[rank] for rank in silent
        ):
            poll()
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        poll()
    return {
        rank: tail_text(run_dir.rank_log(rank))
        for rank, size in sizes.items()
        if _size(run_dir, rank) > size
    }


def log_bytes(run_dir: RunDir, ranks: Iterable[int]) -> int:
    """The size of the logs of these ranks."""
    return sum(_size(run_dir, rank) for rank in ranks)


def _size(run_dir: RunDir, rank: int) -> int:
    path = run_dir.rank_log(rank)
    return path.stat().st_size if path.exists() else 0


Record = Mapping[str, Any]


class AttemptProgress:
    """Progress by ``metrics.jsonl`` and the statuses. ``earlier``: records of earlier attempts."""

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
                self.hang.add_step_time(float(record["step_time_s"]), time.monotonic())

    def update(self, statuses: Mapping[int, Record]) -> None:
        """Take the current statuses of the ranks."""
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
