"""``task=sft``: completions of instructions. Reports the loss, and exact match on eval prompts.

An eval prompt is a held-out conversation up to its last completion, rendered as it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmx.config import Experiment
from llmx.data import EvalPrompt, held_out_prompts
from llmx.data.source.split import DatasetSplit
from llmx.errors import ConfigError
from llmx.run.metrics import Metric
from llmx.tasks.base import Loss, Task, exact_match, next_token_loss

if TYPE_CHECKING:
    from llmx.models.model import Batch, Models


class Sft(Task):
    """Targets are the assistant's turns (``data.loss_on``), of a pair those of the better."""

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        super().__init__(exp, tokenizer)
        self._eval_prompts: list[EvalPrompt] | None = None

    def encoding_identity(self) -> dict[str, Any]:
        """Nothing of its own: ``loss_on`` says it."""
        return {}

    def check_source(self, source: DatasetSplit) -> None:
        if source.has_text:
            texts = ", ".join(one.path for one in source.sources if one.form == "text")
            beside = " beside conversations" if source.has_conversations else ""
            raise ConfigError(
                f"task=sft needs questions and answers, {texts} holds text{beside}. Use "
                "task=pretrain, which learns text and conversations alike, or map the columns with "
                "data.form and data.columns."
            )
        if source.data.packing == "concat":
            raise ConfigError(
                "data.packing=concat cuts rows at seq_len, task=sft needs them whole. Use "
                "data.packing=best_fit."
            )

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Exact match of greedy completions, before and after training."""
        if not self.exp.task.eval_generate:
            return {}
        return {"exact_match": Metric("exact match", "percent", higher_is_better=True)}

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Cross entropy of the completions."""
        return next_token_loss(models.main, batch)

    def eval_prompts(self) -> list[EvalPrompt]:
        """Of the first ``task.eval_generate`` held-out conversations; read once, then kept."""
        limit = self.exp.task.eval_generate
        if self._eval_prompts is None:
            found = held_out_prompts(self.exp, self.tokenizer, limit=limit) if limit else []
            self._eval_prompts = found
        return self._eval_prompts

    def score(self, prompts: Sequence[EvalPrompt], completions: Sequence[str]) -> dict[str, float]:
        """The part of the completions that is equal to the expected ones."""
        matched = exact_match([prompt.expected for prompt in prompts], completions)
        return {} if matched is None else {"exact_match": matched}
