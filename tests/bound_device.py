"""The default process group as DeepSpeed makes it on GPUs: bound to a device, over a backend that
splits communicators, as NCCL does. Counts the splits that torch asks of ranks outside a new group.

On a GPU such a rank waits in ``ncclCommSplit`` for ranks that never come: members of a gloo group
do not split. ``as_under_nccl()`` after ``init_process_group``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d


class Splits:
    """Stands for the backend that ``distributed_c10d._get_split_source`` finds."""

    supports_splitting = True

    def __init__(self) -> None:
        self.calls = 0

    def perform_nocolor_split(self, device: Any) -> None:
        assert device == torch.device("cuda:0")
        self.calls += 1


def as_under_nccl() -> Splits:
    """Bind the default group; returns the counter."""
    splits = Splits()
    torch.distributed.group.WORLD.bound_device_id = torch.device("cuda:0")
    distributed_c10d._get_split_source = lambda group: splits  # type: ignore[attr-defined]
    return splits
