"""Whether a run hangs, and which rank the others wait for. Pure: statuses, logs and clocks in.

A rank that is dead is no hang, and neither is a step that takes as long as steps do.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from typing import Any

MIN_TIMEOUT_S = 600.0
STEPS = 20
"""The default time-out, in usual steps."""
LONGER = 6
"""While a rank saves or evaluates, and in the first step of an attempt, the time-out is so many
times longer: kernels and connections come to be in it, and nobody knows how long a step takes."""
FROZEN_S = 20.0
"""A rank's status is refreshed every 5 s by a thread of its own; an older one means that the whole
process stands still."""
_WATCHED = frozenset({"training", "evaluating", "saving"})
_IN_COLLECTIVE = re.compile(
    r"distributed_c10d|torch/distributed|deepspeed/comm/|in (synchronize|all_reduce|all_gather\w*"
    r"|reduce_scatter\w*|broadcast|barrier)\b|partition_parameters\.py\", line \d+ in wait"
)
_DUMP = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)
Statuses = Mapping[int, Mapping[str, Any]]


class HangDetector:
    """Notes progress: any rank's step or state that changes. Times are of one monotonic clock."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[int, tuple[str, int]] = {}
        self._progress_at = 0.0
        self._step_times_s: list[float] = []
        self._step: tuple[int, float] | None = None
        """The last step that was seen to be done in this attempt, and when."""

    def see(self, statuses: Statuses, now: float) -> None:
        """Take in the statuses as they are now."""
        seen = {
            rank: (str(status.get("state")), int(status.get("step") or 0))
            for rank, status in statuses.items()
        }
        if seen != self._seen:
            if any(
                step > self._seen[rank][1] and self._seen[rank][0] in _WATCHED
                for rank, (_, step) in seen.items()
                if rank in self._seen
            ):
                self._step_done(max(step for _, step in seen.values()), now)
            self._seen, self._progress_at = seen, now

    def _step_done(self, step: int, now: float) -> None:
        """Not every step is logged; this is what is known of the others."""
        if self._step is not None and step > self._step[0]:
            self.step_took((now - self._step[1]) / (step - self._step[0]), now)
        self._step = (step, now)

    def step_took(self, step_time_s: float, now: float) -> None:
        """A logged step: progress that the statuses, refreshed every 5 s, may not show yet."""
        self._progress_at = now
        self._step_times_s = [*self._step_times_s[-200:], step_time_s]

    def timeout_s(self) -> float | None:
        """Without progress for so long it is a hang; None where it cannot be one now."""
        states = {state for state, _ in self._seen.values()}
        active = states & _WATCHED
        if not active or states - _WATCHED - {"finished"} or self._timeout_s == 0:
            return None
        usual_s = statistics.median(self._step_times_s) if self._step_times_s else 0.0
        limit_s = self._timeout_s or max(MIN_TIMEOUT_S, STEPS * usual_s)
        usual = active == {"training"} and bool(self._step or self._step_times_s)
        return limit_s if usual else LONGER * limit_s

    def stuck_s(self, now: float) -> float | None:
        """How long nothing moved, once that is a hang."""
        limit_s = self.timeout_s()
        waited_s = now - self._progress_at
        return waited_s if limit_s is not None and waited_s > limit_s else None


def rank_to_blame(
    statuses: Statuses, logs: Mapping[int, str], ages_s: Mapping[int, float]
) -> tuple[int | None, str]:
    """The rank that the others wait for, and why it is that one.

    ``logs``: the end of each rank's log, with the stacks that were asked for; ``ages_s``: how old
    each rank's status is, by its own host's clock.
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
        top = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main_stack(logs[outside[0]]))
        where = f"{top[3]} ({top[1]}:{top[2]})" if top else "outside of the communication"
        return outside[0], f"the others wait in a collective, it is in {where}"
    return None, ""


def main_stack(log: str) -> str:
    """The main thread's part of the last stacks in a log (it is the last one of each dump)."""
    starts = [match.start() for match in _DUMP.finditer(log)]
    if not starts:
        return ""
    lines = log[starts[-1] :].splitlines()
    kept = [lines[0]]
    for line in lines[1:]:
        if not line.startswith("  "):
            break
        kept.append(line)
    return "\n".join(kept)
