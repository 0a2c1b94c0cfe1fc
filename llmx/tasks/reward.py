"""``task=reward``: a score for answers, from pairs of a better and a worse one (Bradley-Terry).

    python -m llmx task=reward data=file data.path=pairs.jsonl model=hf model.path=Qwen/Qwen3-0.6B

The exported model loads with ``AutoModelForSequenceClassification``; its one logit is the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmx.config.fields import number
from llmx.config.tasks import TaskDefaults
from llmx.data import Column, Example, Preference, Rejected
from llmx.models.spec import CLASSIFICATION, ModelSpec
from llmx.run.metrics import Metric
from llmx.tasks.base import BOTH, Loss, Task, finite

if TYPE_CHECKING:
    from llmx.models.model import Batch, Models


@dataclass
class Options:
    """``task.options`` of ``task=reward``."""

    margin: float = number(0.0, minimum=0, maximum=1000)
    """Required difference of the two scores (Llama 2); the ``margin`` of a row, where
    the data has that column, is added."""
    center: float = number(0.0, minimum=0, maximum=1000)
    """Weight of the squared sum of both scores, which keeps scores around 0 (TRL's
    ``center_rewards_coefficient``, e.g. 0.01)."""


class Reward(Task):
    """``-log sigmoid(score of the better - score of the worse - margin)``, mean over pairs."""

    defaults = TaskDefaults(full=1e-5, adapter=1e-4)
    takes: ClassVar[tuple[type, ...]] = (Preference,)
    loss_on = "last"
    verbatim = True
    normaliser = "examples"
    columns = (Column("margin", per="example"),)
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric("accuracy", "percent", higher_is_better=True, kinds=BOTH),
        "score_margin": Metric("score margin", "number", higher_is_better=True, kinds=BOTH),
        "score_chosen": Metric("score/chosen", "number", kinds=BOTH),
        "score_rejected": Metric("score/rejected", "number", kinds=BOTH),
    }
    Options = Options

    def encoding_identity(self) -> dict[str, Any]:
        """A version: no option decides the examples."""
        return {"kind": "reward", "version": 2}

    def encode(self, row: Preference) -> Example:
        """Both conversations: never separated, and their prompts cut together."""
        return Example.of(row.chosen, row.rejected, margin=self._margin(row))

    def _margin(self, row: Preference) -> float:
        if row.margin is None or row.margin == "":
            return 0.0
        problem = f'"margin" is {str(row.margin)[:60]!r}, not a finite number.'
        return finite(row.margin, Rejected("a margin that is not a number", problem))

    def models(self) -> dict[str, ModelSpec]:
        """One network with a scalar head."""
        return {"policy": ModelSpec(head=CLASSIFICATION, num_labels=1, problem="regression")}

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Summed over pairs. The two sequences of a pair follow each other."""
        import torch

        scores = models.main.logits(batch).view(-1, 2)
        margin = scores[:, 0] - scores[:, 1]
        least_margin = batch["margin"].to(scores.device, non_blocking=True) + self.options.margin
        losses = -torch.nn.functional.logsigmoid(margin - least_margin)
        if self.options.center:
            losses = losses + self.options.center * scores.sum(dim=1) ** 2
        detached = scores.detach()
        return Loss(
            losses.sum(),
            float(len(losses)),
            {
                "accuracy": torch.heaviside(margin.detach(), margin.new_tensor(0.5)).sum(),
                "score_margin": margin.detach().sum(),
                "score_chosen": detached[:, 0].sum(),
                "score_rejected": detached[:, 1].sum(),
            },
        )
