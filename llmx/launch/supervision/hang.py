"""Dumps the stacks of all ranks where an attempt makes no progress, and finds the rank that the
others wait for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llmx.failures.diagnose import Failure
from llmx.launch.agents.connection import Connection
from llmx.launch.supervision.tail import tail_text
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir

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
Statuses = Mapping[int, Mapping[str, Any]]


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
