"""A task that uses all of the seam: a policy, a scorer of its own, a frozen reference, weights by
token, a normaliser of its own and metrics. ``task.kind=tests.programs.own_task:Everything``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmx.data.examples import Column, Example, Tokens
from llmx.models.generate import Completion
from llmx.models.model import CLASSIFICATION, Batch, Models, ModelSpec, sequence_numbers
from llmx.models.sampling import Sampling
from llmx.run.metrics import Metric
from llmx.tasks import Loss, Prompt, RolloutKey, Task, next_token_loss


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


class Drawn(Task):
    """Policy gradient on what the model draws: even tokens are rewarded."""

    generates = True
    normaliser = "examples"
    rollout_columns = (
        Column("advantage", per="example"),
        Column("old_logp", per="token"),
    )

    def models(self) -> dict[str, ModelSpec]:
        return {"policy": ModelSpec(), "reference": ModelSpec(trained=False)}

    @property
    def metrics(self) -> dict[str, Metric]:
        return {"ratio": Metric("ratio", "number", kinds=("train",))}

    def rollout(
        self, models: Models, prompts: Sequence[Prompt], key: RolloutKey
    ) -> list[list[Example]]:
        draw = Sampling(max_new_tokens=4, temperature=1)
        starts = [prompt.tokens[:3] or prompt.reference[:3] for prompt in prompts]
        found = models.policy.sample(starts, draw, n=2, seeds=key.of)
        return [
            [self.example(start, one, group) for one in group]
            for start, group in zip(starts, found, strict=True)
        ]

    def example(
        self, start: tuple[int, ...], one: Completion, group: Sequence[Completion]
    ) -> Example:
        rewards = [sum(token % 2 == 0 for token in each.tokens) for each in group]
        reward = sum(token % 2 == 0 for token in one.tokens)
        before = [0.0] * len(start)
        return Example.of(
            Tokens(
                [*start, *one.tokens],
                weight=[*before, *(1.0 for _ in one.tokens)],
                columns={"old_logp": [*before, *one.logps]},
            ),
            advantage=reward - sum(rewards) / len(rewards),
        )

    def loss(self, models: Models, batch: Batch) -> Loss:
        policy = models.policy.log_probabilities(batch)
        models.reference.log_probabilities(batch)
        targets = batch["labels"] != -100
        old = batch["old_logp"][targets].to(policy.values.device)
        advantage = batch["advantage"].to(policy.values.device)[policy.sequences]
        ratio = (policy.values - old).exp()
        count = float(len(batch["example_ids"]))
        return Loss(-(ratio * advantage).sum(), count, {"ratio": ratio.detach().sum()})
