"""``task=ppo``: a model learns from rewards of its own completions, with a value model (PPO).

    python -m llmx task=ppo data=file data.path=questions.jsonl model=hf model.path=SFT_RUN/model \\
        task.options.rewards=[] task.options.reward_model=REWARD_RUN/model \\
        task.options.value_model=REWARD_RUN/model

Completions are drawn and rewarded as for ``task=grpo``. A second network, trained beside the
policy, learns the return of every token, and an action is better or worse than it expected. Both
are in one engine: checkpoints have both, ``model/`` is the policy. Tried by
``python -m pytest tests/unit/test_tasks_ppo.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from llmx.config.fields import model_source, number
from llmx.config.tasks import TaskDefaults
from llmx.models.spec import CLASSIFICATION, ModelSpec
from llmx.run.metrics import Metric
from llmx.tasks.base import Loss, Normaliser
from llmx.tasks.grpo import Drawn, Group, Grpo, by_sequence
from llmx.tasks.online import RolloutKey
from llmx.tasks.policy_loss import (
    clipped_gains,
    estimated_advantages,
    kl_estimate,
    ratio_of,
    value_losses,
    whitened,
)
from llmx.tasks.rollout_options import RolloutOptions

if TYPE_CHECKING:
    from llmx.models.model import Batch, Model, Models


@dataclass
class Options(RolloutOptions):
    """``task.options`` of ``task=ppo``."""

    group_size: int = number(1, minimum=1, maximum=4096)
    """Completions of each prompt."""
    value_model: str = model_source()
    """The weights that the value model begins with: a model that ``task=reward`` has trained, with
    the tokenizer of the run. Empty: those of ``model.path``, with a new head."""
    value_coefficient: float = number(0.1, above=0, maximum=1000)
    """Weight of the value model's loss beside the policy's."""
    beta: float = number(0.1, minimum=0, maximum=1000, example=0.1)
    """Weight of the KL divergence from the model that training begins with, which is taken from the
    reward of each token (``log p/q``); 0 needs no reference."""
    gamma: float = number(1.0, minimum=0, maximum=1)
    """Discount of later rewards."""
    gae_lambda: float = number(0.95, minimum=0, maximum=1)
    """Generalised advantage estimation: 1 takes whole returns, 0 the next value alone."""
    clip: float = number(0.2, above=0, maximum=1)
    """Ratios of the trained and the sampling policy are clipped to 1 - clip, 1 + clip."""
    value_clip: float = number(0.2, above=0, maximum=10**6)
    """So far a value may move from the one that the rollout had before its loss grows."""
    updates: int = number(4, minimum=1, maximum=1000, example=4)
    """Optimizer updates with the samples of a step. From the second one on ratios are clipped."""


class Ppo(Grpo):
    """Grpo's completions and rewards; advantages, by token, from a value model."""

    # As TRL's PPOConfig.
    defaults = TaskDefaults(full=3e-6, adapter=3e-5)
    Options = Options
    corrects_staleness = False
    token_columns = ("token_advantage", "old_value", "value_target")

    @property
    def _normaliser(self) -> Normaliser:
        return "tokens"

    @property
    def _measured_beside(self) -> tuple[str, ...]:
        return ("reward_failed", "truncated", "completion_tokens")

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return {
            **super().metrics,
            "value_loss": Metric("value loss", kinds=("train",)),
            "value_clipped": Metric("values clipped", "percent", kinds=("train",)),
        }

    def models(self) -> dict[str, ModelSpec]:
        """The policy, the first one, is exported."""
        policy, *other_specs = super().models().items()
        value = ModelSpec(
            source=self.options.value_model or None,
            head=CLASSIFICATION,
            num_labels=1,
            dropout=False,
        )
        return dict([policy, ("value", value), *other_specs])

    def _replace(self, models: Models, groups: list[Group], key: RolloutKey) -> list[Group]:
        """No group is without a signal: advantages are those of tokens."""
        return []

    def _with_signals(self, models: Models, drawn: Sequence[Drawn]) -> list[Drawn]:
        """Advantages and returns of each token. The reward is that of the last token; each has
        the KL divergence taken from it. Totals stay what the completions are rewarded with."""
        options, columns = self.options, self._logps(models, drawn)
        are_trained = [self._is_trained(sample) and not np.isnan(sample.total) for sample in drawn]
        all_values = self._over_ranks(models["value"], drawn, self._values_of)
        advantages = []
        for sample, column, values in zip(drawn, columns, all_values, strict=True):
            rewards = np.zeros(len(values))
            if options.beta:
                difference = np.subtract(column["old_logp"], column["reference_logp"])
                rewards -= options.beta * difference
            rewards[-1:] += np.nan_to_num(sample.total)
            advantages.append(
                estimated_advantages(
                    rewards, values, gamma=options.gamma, gae_lambda=options.gae_lambda
                )
            )
            column["old_value"], column["value_target"] = values, advantages[-1] + values
        trained = [
            part for part, is_trained in zip(advantages, are_trained, strict=True) if is_trained
        ]
        of_trained = iter(whitened(trained))
        with_signals = []
        for sample, column, raw, is_trained in zip(
            drawn, columns, advantages, are_trained, strict=True
        ):
            column["token_advantage"] = next(of_trained) if is_trained else np.zeros(len(raw))
            mean_advantage = float(np.sum(column["token_advantage"])) / max(1, len(raw))
            with_signals.append(
                replace(sample, columns=column, advantage=mean_advantage, is_trained=is_trained)
            )
        return with_signals

    def _values_of(self, model: Model, batch: Batch) -> list[np.ndarray]:
        """fp64 [tokens] of each sequence."""
        return by_sequence(model, batch, model.token_scores(batch).double())

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Loss of the policy and of the value model, summed over target tokens."""
        options, policy = self.options, models.main
        logps, entropy = self._token_values(policy, batch)
        values = models["value"].token_scores(batch)
        by_target = functools.partial(policy.by_target, batch)
        ratios = ratio_of(logps - by_target("old_logp"))
        gains, clipped = clipped_gains(
            ratios, by_target("token_advantage"), 1 - options.clip, 1 + options.clip
        )
        errors, value_clipped = value_losses(
            values, by_target("old_value"), by_target("value_target"), clip=options.value_clip
        )
        weight = float(len(logps))
        metrics = self._rollout_metrics(batch)
        if options.beta:
            kl = kl_estimate("k1", logps.detach() - by_target("reference_logp"))
            metrics["kl"] = (kl.sum(), weight)
        metrics |= {
            "entropy": entropy.sum(),
            "clipped": clipped.sum(),
            "value_loss": errors.detach().sum(),
            "value_clipped": value_clipped.sum(),
        }
        return Loss(options.value_coefficient * errors.sum() - gains.sum(), weight, metrics)
