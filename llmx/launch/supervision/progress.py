"""The progress of an attempt: what its ranks have reached, since when nothing of it changes, and
which rank the others wait for then, by the stacks that all of them write.

Before training, progress is a change of any rank's state, or a new line in any rank's log; later it
is a change of any rank's state or step, or a logged step.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llmx.failures.diagnose import Failure
from llmx.launch.agents.connection import Connection
from llmx.launch.supervision.outcome import Result
from llmx.launch.supervision.tail import tail_text
from llmx.plan.types import Plan
from llmx.run.metrics.declared import Metric, declared_in, is_declaration, measured
from llmx.run.rundir import RunDir

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


FROZEN_S = 20.0
"""A thread of each rank refreshes its status every 5 s; an older one means that the whole process
is stopped."""
STACKS_S = 10.0
"""Time for the ranks to write their stacks."""
UNSAFE_STACKS_S = 3.0
"""Time for ranks that did not answer SIGUSR2, where the attempt ends anyway: SIGQUIT may kill them
(``llmx.train.status``)."""
REST_S = 0.5
"""Time for the rest of a dump that has begun."""
NOTICE_STACKS_S = 5.0
"""Time for the ranks to write their stacks for a notice, while they go on."""
_IN_COLLECTIVE = re.compile(
    r"distributed_c10d|torch/distributed|deepspeed/comm/|in (synchronize|all_reduce|all_gather\w*"
    r"|reduce_scatter\w*|broadcast|barrier)\b|partition_parameters\.py\", line \d+ in wait"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_DUMP = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)


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
    statuses: Mapping[int, Record], logs: Mapping[int, str], ages_s: Mapping[int, float]
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


def hang_failure(
    plan: Plan, rank: int | None, why: str, stack: str, *, silent: str, is_loading: bool
) -> Failure:
    """The failure of an attempt without progress. ``silent``: since when."""
    host = None if rank is None else plan.hosts[plan.ranks[rank].host].name
    who = f"rank {rank} on {host}: {why}" if host else "every rank waits for the others"
    fix = "the stacks of all threads are at the end of RUN_DIR/logs/rank-*.log; "
    if is_loading:
        fix += (
            "python -m llmx doctor with the same hardware tests the network between the hosts; if "
            "loading may take this long without a line in a log, raise launch.loading_timeout_s"
        )
    else:
        fix += "if a step may take this long, raise launch.hang_timeout_s"
    return Failure("hang", f"{silent}; {who}", fix, rank=rank, host=host, traceback=stack)


class Stacks:
    """The stacks of all threads of ranks, which they write to the ends of their logs."""

    def __init__(
        self, run_dir: RunDir, connections: Sequence[Connection], poll: Callable[[], None]
    ) -> None:
        """``poll``: receives what the agents send, and waits a moment."""
        self.run_dir, self.connections, self.poll = run_dir, connections, poll

    def log_bytes(self, ranks: Iterable[int]) -> dict[int, int]:
        """Rank -> the size of its log."""
        logs = {rank: self.run_dir.rank_log(rank) for rank in ranks}
        return {rank: log.stat().st_size if log.exists() else 0 for rank, log in logs.items()}

    def request(self, ranks: Iterable[int], patience_s: Mapping[str, float]) -> dict[int, str]:
        """Have ranks write their stacks; rank -> the end of its log, of those that did.

        ``patience_s``: signal -> seconds to wait for those that have not answered before.
        """
        before = self.log_bytes(ranks)

        def silent() -> list[int]:
            after = self.log_bytes(before)
            return [rank for rank, size in before.items() if after[rank] == size]

        for name, limit_s in patience_s.items():
            ranks_to_ask, deadline = silent(), time.monotonic() + limit_s
            for connection in self.connections:
                if ranks_to_ask and connection.lost_at is None:
                    connection.send("signal", name=name, ranks=ranks_to_ask)
            while time.monotonic() < deadline and silent():
                self.poll()
        deadline = time.monotonic() + REST_S
        while time.monotonic() < deadline:
            self.poll()
        return {
            rank: tail_text(self.run_dir.rank_log(rank)) for rank in before.keys() - {*silent()}
        }
