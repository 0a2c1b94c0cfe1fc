"""``task=sft``: completions of instructions. Reports the loss, and exact match on eval prompts.

An eval prompt is a held-out conversation up to its last completion, rendered as it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmx.config import Experiment
from llmx.config.fields import number
from llmx.data.examples import TOKEN_WEIGHT, Example
from llmx.data.format.rows import Conversation
from llmx.data.split import DatasetSplit
from llmx.errors import ConfigError
from llmx.tasks.base import NATS, Loss, Task, next_token_loss

if TYPE_CHECKING:
    from llmx.models.model import Batch, Models


@dataclass
class Options:
    """``task.options`` of ``task=sft``. An evaluation is always plain cross entropy."""

    neftune_alpha: float = number(0.0, minimum=0, maximum=1000)
    """NEFTune: noise on the embeddings while training, uniform in +- alpha / sqrt(tokens x width)
    of each sequence; 5 is usual, 0 is off."""
    dft: bool = False
    """Dynamic fine-tuning: the loss of each target times its probability."""
    z_loss: float = number(0.0, minimum=0, maximum=1)
    """Times (log of the sum of exp(logits))^2 of each target, added to the loss: 1e-4 is usual."""
    turn_weights: bool = False
    """Learn each assistant's turn of ``messages`` with its "weight", a number from 0; 1 where it
    has none."""


LEAST_CHAT_TOKENS = 8
"""Tokens of the shortest question with its answer: two turns with their markers, and EOS."""


class Sft(Task):
    """Targets are the assistant's turns (``data.loss_on``), of a pair those of the better."""

    Options = Options
    loss_unit = NATS
    completes = True

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        super().__init__(exp, tokenizer)
        options = self.options
        self.draws = options.neftune_alpha > 0
        self.turn_weights = options.turn_weights
        if options.turn_weights:
            self.columns = (TOKEN_WEIGHT,)

    def problems(self) -> Iterator[str]:
        """Conversations are learned whole, and a short one has a question and an answer."""
        data = self.exp.data
        if data.packing == "concat":
            yield (
                "data.packing=concat: would cut completions at data.seq_len. For task=sft use "
                "data.packing=best_fit or none."
            )
        short = data.seq_len < LEAST_CHAT_TOKENS
        if short and data.form != "text" and data.loss_on != "all":
            yield (
                f"data.seq_len={data.seq_len}: too short for a question with its answer. The "
                f"chat template alone takes most of {LEAST_CHAT_TOKENS} tokens. Set e.g. "
                "data.seq_len=512."
            )

    def encoding_identity(self) -> dict[str, Any]:
        """Nothing of its own but the weights: ``loss_on`` says the rest."""
        return {"turn_weights": True} if self.turn_weights else {}

    def encode(self, row: Conversation) -> Example | None:
        """One sequence; nothing where no turn that is learned has a weight."""
        learned = [turn.weight for turn in row.messages if turn.role == "assistant"]
        if self.loss_on != "all" and not any(learned[-1:] if self.loss_on == "last" else learned):
            return None
        return Example.of(row)

    def check_source(self, split: DatasetSplit) -> None:
        if split.has_text:
            texts = ", ".join(source.path for source in split.sources if source.form == "text")
            beside = " beside conversations" if split.has_conversations else ""
            raise ConfigError(
                f"task=sft needs questions and answers, but {texts} contains text{beside}. Use "
                "task=pretrain, which trains on text and conversations, or map the columns with "
                "data.form and data.columns."
            )

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Cross entropy of the completions; in training with what the options add."""
        model, options = models.main, self.options
        if not model.is_training:
            return next_token_loss(model, batch)
        from llmx.models.loss import TokenLoss

        terms = TokenLoss(dft=options.dft, z_loss=options.z_loss)
        noise = options.neftune_alpha
        return next_token_loss(model, batch, token_loss=terms, embedding_noise=noise)
