"""Ranks that time their micro batches at the same time: real processes over gloo."""

from __future__ import annotations

import contextlib
import json
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from llmx.train.balance import AtOnce, mean_time
from tests import forks

SLOW_S = 1.0
"""Far above what a busy machine adds to a fast micro batch."""


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def on_rank(rank: int, place: Path, goes_on: Event) -> None:
    """Rank 0 is fast and times three micro batches; rank 1 is slow and fails at its second one.

    Rank 1 does not begin before rank 0 knows its time and goes on (``goes_on``).
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place / 'meet'}", rank=rank, world_size=2
    )
    found: dict[str, list[float]] = {"ready": [], "ended": [], "took": [], "failed": []}
    with AtOnce(None) as at_once:

        def ready():  # type: ignore[no-untyped-def]
            found["ready"].append(time.time())
            return at_once.ready()

        def run() -> None:
            if rank == 1:
                assert goes_on.wait(timeout=60)
            elif found["ready"]:
                goes_on.set()
            spin((0.02, SLOW_S)[rank])

        try:
            for number in range(3):
                if (rank, number) == (1, 1):
                    raise MemoryError
                seconds, _ = mean_time(run, ready=ready)
                found["ended"].append(time.time())
                found["took"].append(seconds)
        except MemoryError:
            found["failed"] = [time.time()]
    if rank == 1:  # alone: interrupted, it does not wait for rank 0
        with contextlib.suppress(KeyboardInterrupt), AtOnce(None):
            raise KeyboardInterrupt
    (place / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_a_fast_rank_goes_on_and_none_waits_for_one_that_failed(tmp_path: Path) -> None:
    goes_on = forks.context.Event()
    ranks = [forks.process(on_rank, rank, tmp_path, goes_on) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(timeout=120)
        assert each.exitcode == 0
    fast, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert fast["ready"][0] < slow["ready"][0] <= fast["ended"][0]
    assert len(fast["ended"]) == 3
    assert slow["failed"]
    assert fast["took"][0] < SLOW_S <= slow["took"][0]
