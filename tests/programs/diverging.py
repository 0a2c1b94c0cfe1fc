"""A rank like any other, whose loss is not finite at one step: what a broken sample would do.

The module of a rank in ``tests/integration/test_restart.py``; started by DeepSpeed's launcher.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from llmx import worker
from llmx.train import loop

DIVERGES_AT = 7
"""Counted from 1, as in ``metrics.jsonl``."""

_train_step = loop.train_step


def train_step(engine: Any, step: Any, task: Any, **options: Any) -> torch.Tensor:
    """The real step; its loss is lost afterwards at ``DIVERGES_AT``."""
    loss_sum = _train_step(engine, step, task, **options)
    return loss_sum * float("nan") if step.step + 1 == DIVERGES_AT else loss_sum


loop.train_step = train_step

if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:]))
