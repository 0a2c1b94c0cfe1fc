"""A hang is looked at: every rank writes its stacks, and the one the others wait for is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmx.launch.fleet import Channel
from llmx.launch.follow import tail_text
from llmx.launch.hang import main_stack, rank_to_blame
from llmx.launch.outcome import Hang
from llmx.rundir import RunDir

STACKS_S = 3.0
"""For the ranks to write their stacks."""
REST_S = 0.5
"""For the rest of a dump whose beginning is there."""


def look_into(
    run_dir: RunDir,
    statuses: Mapping[int, Mapping[str, Any]],
    *,
    stuck_s: float,
    offsets_s: Mapping[int, float],
    channels: Sequence[Channel],
    tick: Callable[[], None],
) -> Hang:
    """Ask every rank for its stacks (SIGUSR2) and find the one that is waited for.

    ``offsets_s``: rank -> its host's clock minus this one's; ``tick`` takes in what the agents
    send, and waits a moment.
    """
    wall = time.time()  # before the ranks are disturbed
    ages_s = {
        rank: wall - (float(status.get("time") or 0.0) - offsets_s.get(rank, 0.0))
        for rank, status in statuses.items()
    }
    sizes = {rank: _size(run_dir, rank) for rank in statuses}
    for channel in channels:
        if channel.lost_at is None:
            channel.post("signal", name="USR2")
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline and any(
        _size(run_dir, rank) == size for rank, size in sizes.items()
    ):
        tick()
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        tick()
    logs = {
        rank: tail_text(run_dir.rank_log(rank))
        for rank, size in sizes.items()
        if _size(run_dir, rank) > size
    }
    rank, why = rank_to_blame(statuses, logs, ages_s)
    stack = "" if rank is None else main_stack(logs.get(rank, ""))
    step = min(int(status.get("step") or 0) for status in statuses.values())
    return Hang(wall, stuck_s, step, rank, why, stack)


def _size(run_dir: RunDir, rank: int) -> int:
    path = run_dir.rank_log(rank)
    return path.stat().st_size if path.exists() else 0
