"""A task that uses all of the seam: a policy, a scorer of its own, a frozen reference, weights by
token, a normaliser of its own and metrics. ``task.kind=tests.programs.own_task:Everything``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmx.models.model import CLASSIFICATION, Batch, Models, ModelSpec, sequence_numbers
from llmx.run.metrics import Metric
from llmx.tasks import Loss, Task, next_token_loss


@dataclass
class Options:
    """Of ``task.options``."""

    beta: float = 0.5


class Everything(Task):
    """Weighted cross entropy, a penalty for leaving the reference, and two classes of sequences."""

    Options = Options
    normaliser = "batch"

    @property
    def metrics(self) -> dict[str, Metric]:
        return {
            "accuracy": Metric(
                "accuracy", "percent", higher_is_better=True, kinds=("train", "eval")
            ),
            "drift": Metric("drift", "number", higher_is_better=False, kinds=("train", "eval")),
        }

    def models(self) -> dict[str, ModelSpec]:
        return {
            "reference": ModelSpec(trained=False),
            "policy": ModelSpec(),
            "scorer": ModelSpec(head=CLASSIFICATION, num_labels=2),
        }

    def weight(self, batch: Batch) -> float:
        """The sequences of the batch."""
        return float(sequence_numbers(batch["segment_ids"])[1])

    def loss(self, models: Models, batch: Batch) -> Loss:
        numbers, count = sequence_numbers(batch["segment_ids"])
        real = numbers >= 0
        weighted = {**batch, "weights": (batch["position_ids"] % 2 + 1) / 2}
        likelihood = next_token_loss(models.policy, weighted).sum
        policy = models.policy.log_probabilities(batch)
        drift = (policy.sums() - models.reference.log_probabilities(batch).sums()) ** 2
        # The class of a sequence is whether the sum of its tokens is odd.
        sums = torch.zeros(count, dtype=torch.long)
        sums.index_add_(0, numbers[real], batch["input_ids"][real])
        label = (sums % 2).to(policy.values.device)
        logits = models.scorer.logits(batch)
        classes = torch.nn.functional.cross_entropy(logits, label, reduction="sum")
        return Loss(
            likelihood + self.options.beta * drift.sum() + classes,
            weight=float(count),
            metrics={
                "accuracy": (logits.detach().argmax(dim=-1) == label).sum(),
                "drift": drift.detach().sum(),
            },
        )
