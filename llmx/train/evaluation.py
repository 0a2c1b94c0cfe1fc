"""The loss and the task's metrics on held-out samples: means over all ranks.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_export.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from llmx.data import collate
from llmx.plan.types import BatchPlan
from llmx.tasks import Mean, Task
from llmx.train.batches import Layout
from llmx.train.engine.build import Engine


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
def evaluate(
    engine: Engine,
    task: Task,
    store: Any,
    *,
    batch: BatchPlan,
    layout: Layout,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Mean] | None:
    """What the task measures on ``store``, over all ranks: ``loss`` and its metrics. Collective.

    ``interrupted`` is asked before each micro batch, and answers alike on every rank; None when it
    said yes.
    """
    rank = torch.distributed.get_rank()
    stopped = False

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal stopped
        for indices in slices(len(store), micro_batches=batch.micro_batches, rank=rank):
            if interrupted():
                stopped = True
                return
            # A rank without samples left runs a line of padding: the collectives of ZeRO-3 need
            # as many forwards of everyone.
            yield collate(
                [store[index] for index in indices],
                seq_len=layout.seq_len,
                pad_id=layout.pad_id,
                layout=layout.layout,
                pad_to=layout.pad_to,
                columns=store.batch_columns,
            )

    engine.engine.eval()
    found = task.evaluate(engine.models, batches())
    engine.engine.train()
    return None if stopped else summed(found, device=engine.device)


def summed(found: dict[str, Mean], *, device: torch.device) -> dict[str, Mean]:
    """Sums and weights added up over the ranks, in fp64. Collective."""
    names = sorted(found)
    table = torch.tensor(
        [value for name in names for value in (found[name].sum, found[name].weight)],
        dtype=torch.float64,
    ).to(device)
    torch.distributed.all_reduce(table)
    values = table.tolist()
    return {name: Mean(*values[2 * at : 2 * at + 2]) for at, name in enumerate(names)}
