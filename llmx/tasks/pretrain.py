"""``task=pretrain``: next tokens of running text. Reports the loss; has no eval prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmx.tasks.base import Loss, Task, next_token_loss

if TYPE_CHECKING:
    from llmx.models.model import Batch, Models


class Pretrain(Task):
    """Every token but a row's first is a target (``llmx.data`` marks them so)."""

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Cross entropy of every token."""
        return next_token_loss(models.main, batch)
