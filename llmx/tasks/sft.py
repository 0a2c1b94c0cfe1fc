"""``task=sft``: completions of instructions. Reports the loss, and exact match on eval prompts.

An eval prompt is a held-out conversation up to its last completion, rendered as it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmx.config import Experiment
from llmx.data import EvalPrompt, held_out_prompts
from llmx.metrics import Metric
from llmx.tasks.base import Loss, Task, exact_match, next_token_loss

if TYPE_CHECKING:
    from llmx.models.model import Batch, Models


class Sft(Task):
    """Targets are the assistant's turns (``data.loss_on``), marked by ``llmx.data``."""

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        super().__init__(exp, tokenizer)
        self._eval_prompts: list[EvalPrompt] | None = None

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
