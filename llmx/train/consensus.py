"""Cross-rank consensus on flags at every step: a save is due, a shutdown was requested.

A signal or a clock is seen by one rank, and all must act at the same step. Each step one small
all-reduce runs in a gloo group of its own while the optimizer works: posted after the last
backward pass, read at the end of the step. Tried by ``python -m pytest -m deepspeed
tests/integration/test_resume_signals.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch


@dataclass(frozen=True)
class Flags:
    """Each is true where it is on at least one rank."""

    save: bool = False
    """A checkpoint is due by ``checkpoint.every_minutes``."""
    stop: bool = False
    """Save, then exit."""
    busy: bool = False
    """The last checkpoint is still being written."""


class Consensus:
    """The group, and the reduction in flight. All methods are collective."""

    def __init__(self, *, timeout_s: float) -> None:
        """``timeout_s``: how long a rank waits for the others (``launch.comm_timeout_s``)."""
        timeout = timedelta(seconds=timeout_s)
        self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._values = torch.zeros(3, dtype=torch.int32)
        self._work: Any = None

    def post(self, flags: Flags) -> None:
        """Start the reduction; does not wait."""
        self._values = torch.tensor([flags.save, flags.stop, flags.busy], dtype=torch.int32)
        self._work = torch.distributed.all_reduce(
            self._values, op=torch.distributed.ReduceOp.MAX, group=self.group, async_op=True
        )

    def read(self) -> Flags:
        """The flags of all ranks; none where nothing was posted."""
        if self._work is None:
            return Flags()
        self._work.wait()
        self._work = None
        save, stop, busy = (bool(value) for value in self._values.tolist())
        return Flags(save=save, stop=stop, busy=busy)

    def post_and_read(self, flags: Flags) -> Flags:
        """Post, and wait for the result."""
        self.read()
        self.post(flags)
        return self.read()

    def barrier(self) -> None:
        """Wait for all ranks, in gloo: a GPU that waits in NCCL is polled, and timed out, by it."""
        torch.distributed.barrier(group=self.group)
