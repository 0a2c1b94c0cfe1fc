"""A task whose second rank gets slower at some step: ``task.kind=tests.programs.drifting:Drifting``
(``tests/integration/test_train_balance.py``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from llmx.models.model import Models
from llmx.tasks import Loss
from llmx.tasks.sft import Sft
from llmx.train import rebalance

rebalance.LEAST_S = 0.0  # three lines in a row are enough
SLOW_FROM = 3
"""Steps that were trained before, in this process."""
TOKENS_PER_S = 800.0, 267.0
"""Of rank 0 always, of rank 1 when it is slow: slow enough that a busy machine does not matter."""


class Drifting(Sft):
    """Learns as ``sft`` does; computing takes as long as it says."""

    def loss(self, models: Models, batch: Mapping[str, Any]) -> Loss:
        """That of ``sft``, later."""
        found = super().loss(models, batch)
        if torch.is_grad_enabled():
            rank = torch.distributed.get_rank()
            self.calls = getattr(self, "calls", 0) + 1
            slow = rank == 1 and self.calls > SLOW_FROM
            time.sleep(batch["input_ids"].numel() / TOKENS_PER_S[slow])
        return found
