"""What all ranks agree on at every step: that it is time to save, that they were asked to end.

A signal or a clock is seen by one rank, and all must act at the same step. Each step one small
sum goes round in a gloo group of its own while the optimizer works: posted after the last
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
    """True where at least one rank says so."""

    save: bool = False
    """The clock says that a checkpoint is due."""
    stop: bool = False
    """Save, then leave."""
    busy: bool = False
    """The last checkpoint is still being written."""


class Agreement:
    """The group, and the reduction in flight. All methods are collective but ``post``'s values."""

    def __init__(self, *, timeout_s: float) -> None:
        """``timeout_s``: how long a rank waits for the others (``launch.comm_timeout_s``)."""
        timeout = timedelta(seconds=timeout_s)
        self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._values = torch.zeros(3, dtype=torch.int32)
        self._work: Any = None

    def post(self, flags: Flags) -> None:
        """Begin to tell the others; does not wait."""
        self._values = torch.tensor([flags.save, flags.stop, flags.busy], dtype=torch.int32)
        self._work = torch.distributed.all_reduce(
            self._values, op=torch.distributed.ReduceOp.MAX, group=self.group, async_op=True
        )

    def read(self) -> Flags:
        """What was agreed on; no flag where nothing was posted."""
        if self._work is None:
            return Flags()
        self._work.wait()
        self._work = None
        save, stop, busy = (bool(value) for value in self._values.tolist())
        return Flags(save=save, stop=stop, busy=busy)

    def settle(self, flags: Flags) -> Flags:
        """Post and read at once, where no step is there to hide the wait."""
        self.read()
        self.post(flags)
        return self.read()

    def barrier(self) -> None:
        """Wait for all ranks, in gloo: a GPU that waits in NCCL is polled, and timed out, by it."""
        torch.distributed.barrier(group=self.group)
