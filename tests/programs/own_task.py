"""A task that uses all of the seam at once: ``task.kind=tests.programs.own_task:Everything``.

Pairs that are stored and pairs that are generated, a policy, a scorer with a classification head, a
frozen reference, weights by token, a normaliser that is no count, and metrics of its own. It
imports nothing of the tests, so that a test can put the file where a user would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from llmx.data import Column, Example, Preference, Tokens
from llmx.models.generate import Completion
from llmx.models.model import CLASSIFICATION, Batch, Models, ModelSpec
from llmx.models.sampling import Sampling
from llmx.tasks import Loss, Mean, Metric, OnlineTask, Prompt, RolloutKey, Task, next_token_loss


@dataclass
class Options:
    """Of ``task.options``."""

    beta: float = 0.5
    max_new_tokens: int = 4
    reference: str | None = None
    """Weights of the frozen model; None: those that the policy begins with."""
    reference_precision: str | None = None
    updates: int = 1
    """Of the weights, with the samples of a step."""


class Twice(Task):
    """Next tokens, by two forward passes of the same network and one backward pass."""

    loss_on = "all"

    def loss(self, models: Models, batch: Batch) -> Loss:
        one, other = (next_token_loss(models.main, batch) for _ in range(2))
        return Loss((one.sum + other.sum) / 2, one.weight)


class Everything(OnlineTask):
    """Of two completions that the policy draws the one with more even tokens is preferred (DPO,
    each pair times its strength) and imitated; a second network learns to tell the two apart."""

    Options = Options
    takes = (Preference,)
    columns = (Column("strength", per="example"),)
    loss_on = "last"
    rollout_columns = (
        Column("weight", per="token"),
        Column("strength", per="example"),
        Column("rank", per="sequence", dtype="int64"),
    )
    normaliser = "batch"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric("accuracy", "percent", higher_is_better=True, kinds=("train", "eval")),
        "margin": Metric("margin", "number", higher_is_better=True, kinds=("train",)),
        "drift": Metric("drift", "number", higher_is_better=False, kinds=("train", "eval")),
    }

    @property
    def updates(self) -> int:
        return int(self.options.updates)

    def models(self) -> dict[str, ModelSpec]:
        return {
            "reference": ModelSpec(
                trained=False,
                source=self.options.reference,
                precision=self.options.reference_precision,
            ),
            "policy": ModelSpec(),
            "scorer": ModelSpec(head=CLASSIFICATION, num_labels=2),
        }

    def encode(self, pair: Preference) -> Example:
        length = len(pair.chosen.messages[-1].content)
        return Example.of(pair.chosen, pair.rejected, strength=1 + length % 3 / 2)

    def rollout(
        self, models: Models, prompts: Sequence[Prompt], key: RolloutKey
    ) -> list[list[Example]]:
        draw = Sampling(max_new_tokens=self.options.max_new_tokens, temperature=1)
        starts = [prompt.tokens for prompt in prompts]
        drawn = models.policy.sample(starts, draw, n=2, seeds=key.of)
        return [[self.pair(prompt, *two)] for prompt, two in zip(prompts, drawn, strict=True)]

    def pair(self, prompt: Prompt, one: Completion, other: Completion) -> Example:
        """The better of the two first, by the part of its tokens that are even."""

        def reward(completion: Completion) -> float:
            return sum(t % 2 == 0 for t in completion.tokens) / max(1, len(completion.tokens))

        two = (one, other) if reward(one) >= reward(other) else (other, one)
        before = [0.0] * len(prompt.tokens)
        return Example.of(
            *(
                Tokens(
                    [*prompt.tokens, *each.tokens],
                    weight=[*before, *(1 / (1 + place) for place in range(len(each.tokens)))],
                )
                for each in two
            ),
            strength=prompt.columns["strength"],
            rank=[0, 1],
        )

    def weight(self, batch: Batch) -> float:
        """The strength of its pairs."""
        return float(batch["strength"].double().sum())

    def loss(self, models: Models, batch: Batch) -> Loss:
        policy, reference = self.sums(models, batch)
        device = policy.device
        strength = batch["strength"].to(device)
        ratio = policy - reference
        margin = self.options.beta * (ratio[:, 0] - ratio[:, 1])
        preferred = -(torch.nn.functional.logsigmoid(margin) * strength).sum()
        # The better ones are imitated, the first tokens most.
        better = {**batch, "weights": batch["weights"] * self.first_of_pairs(batch)}
        imitated = next_token_loss(models.policy, better).sum
        logits, label = models.scorer.logits(batch), batch["rank"].to(device)
        told_apart = torch.nn.functional.cross_entropy(logits, label, reduction="sum")
        right = (logits.detach().argmax(dim=-1) == label).sum()
        return Loss(
            preferred + 0.1 * imitated + told_apart,
            weight=self.weight(batch),
            metrics={
                "accuracy": (right, float(len(label))),
                "margin": (margin.detach() * strength).sum(),
                "drift": (ratio.detach().abs().sum(), float(len(label))),
            },
        )

    def sums(self, models: Models, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities under policy and reference, [pairs, 2] each."""
        policy = models.policy.log_probabilities(batch).sums().view(-1, 2)
        return policy, models.reference.log_probabilities(batch).sums().view(-1, 2)

    def first_of_pairs(self, batch: Batch) -> torch.Tensor:
        """1 at the tokens of the better sequences, by line."""
        return (batch["sequence_ids"] % 2).float()

    def evaluate(self, models: Models, batches: Iterable[Batch]) -> dict[str, Mean]:
        """Of the stored pairs: how often the policy finds the better one more probable."""
        found = {"accuracy": Mean(), "drift": Mean()}
        for batch in batches:
            policy, reference = self.sums(models, batch)
            ratio = policy - reference
            found["accuracy"].add(float((ratio[:, 0] > ratio[:, 1]).sum()), len(ratio))
            found["drift"].add(float(ratio.abs().sum()), 2.0 * len(ratio))
        return found
