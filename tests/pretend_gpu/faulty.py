"""A task with a fault that a pretended GPU shows: ``task.kind=tests.pretend_gpu.faulty:Faulty``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from llmx.collectives import all_gather
from llmx.models.model import Models
from llmx.tasks import Loss
from llmx.tasks.sft import Sft

FAULTS = {
    "other-gpu": lambda rank, like: torch.zeros(1, device="cuda:0"),
    "two-devices": lambda rank, like: like + torch.ones(2),
    "cpu-in-nccl": lambda rank, like: torch.distributed.all_reduce(torch.zeros(1)),
    "two-threads": lambda rank, like: (
        ThreadPoolExecutor(1).submit(torch.distributed.all_reduce, like.new_zeros(1)).result()
    ),
    "objects-in-nccl": lambda rank, like: all_gather(rank, group=torch.distributed.group.WORLD),
    "other-collective": lambda rank, like: torch.distributed.all_reduce(like.new_zeros(1 + rank)),
}


class Faulty(Sft):
    """Learns as ``sft`` does, with the fault that ``PRETENDED_FAULT`` names."""

    def loss(self, models: Models, batch: Mapping[str, Any]) -> Loss:
        loss = super().loss(models, batch)
        FAULTS[os.environ["PRETENDED_FAULT"]](torch.distributed.get_rank(), loss.sum.detach())
        return loss
