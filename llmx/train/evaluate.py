"""The loss on held-out samples: the mean over all their target tokens.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_export.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from llmx.data import collate
from llmx.models.attention import model_inputs
from llmx.models.loss import IGNORE, micro_batch_loss
from llmx.plan.types import BatchPlan
from llmx.train.batches import Layout
from llmx.train.engine import Engine


def slices(num_samples: int, *, micro_batches: tuple[int, ...], rank: int) -> list[range]:
    """The samples of each forward of ``rank``: as many forwards on every rank, some empty."""
    together = sum(micro_batches)
    offset = sum(micro_batches[:rank])
    return [
        range(
            min(start + offset, num_samples),
            min(start + offset + micro_batches[rank], num_samples),
        )
        for start in range(0, math.ceil(num_samples / together) * together, together)
    ]


@torch.no_grad()
def evaluate_loss(
    engine: Engine,
    store: Any,
    *,
    batch: BatchPlan,
    layout: Layout,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[float, int] | None:
    """Mean loss over the target tokens of ``store``, and their number. Collective.

    ``interrupted`` is asked before each forward, and answers alike on every rank; None when it
    said yes.
    """
    engine.engine.eval()
    total = torch.zeros(2, dtype=torch.float64)
    rank = torch.distributed.get_rank()
    for indices in slices(len(store), micro_batches=batch.micro_batches, rank=rank):
        if interrupted():
            engine.engine.train()
            return None
        # A rank without samples left runs a line of padding: the collectives of ZeRO-3 need
        # as many forwards of everyone.
        micro = collate(
            [store[index] for index in indices],
            seq_len=layout.seq_len,
            pad_id=layout.pad_id,
            layout=layout.layout,
            pad_to=layout.pad_to,
        )
        inputs, labels = model_inputs(
            micro,
            method=engine.attention,
            dtype=engine.dtype,
            device=engine.device,
        )
        total[0] += float(
            micro_batch_loss(
                engine.engine,
                inputs,
                labels,
                vocab_size=engine.vocab_size,
                fused=engine.fused_loss,
            )
        )
        total[1] += int((labels != IGNORE).sum())
    engine.engine.train()
    total = total.to(engine.device)
    torch.distributed.all_reduce(total)
    loss_sum, targets = total.tolist()
    return loss_sum / max(targets, 1.0), int(targets)
