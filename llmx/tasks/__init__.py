"""Tasks by ``kind``: one file each, saying what is learned and what is reported."""

from __future__ import annotations

from llmx.tasks.base import Loss, Mean, Task, exact_match, next_token_loss
from llmx.tasks.pretrain import Pretrain
from llmx.tasks.sft import Sft

KINDS: dict[str, type[Task]] = {"sft": Sft, "pretrain": Pretrain}
"""Every value of ``task.kind``."""

__all__ = ["KINDS", "Loss", "Mean", "Pretrain", "Sft", "Task", "exact_match", "next_token_loss"]
