"""``task=pretrain``: next tokens of running text. Reports the loss; has no eval prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from llmx.config.tasks import TaskDefaults
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document
from llmx.tasks.base import NATS, Loss, Task, next_token_loss

if TYPE_CHECKING:
    from llmx.models.model import Batch, Models


class Pretrain(Task):
    """Every token but the first of a sequence is a target, of conversations too."""

    defaults = TaskDefaults(adapter=1e-4, batch=64, scratch_batch=256)
    takes: ClassVar[tuple[type, ...]] = (Conversation, Document)
    loss_on = "all"
    splits_documents = True
    loss_unit = NATS

    def encoding_identity(self) -> dict[str, Any]:
        """Nothing of its own: ``loss_on`` says it."""
        return {}

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Cross entropy of every token."""
        return next_token_loss(models.main, batch)
