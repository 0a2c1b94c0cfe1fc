"""task=ppo: the values of plain PyTorch, one gradient for every split, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from llmx.errors import ConfigError
from llmx.models.model import CLASSIFICATION, ModelSpec
from llmx.tasks import task_class
from llmx.tasks.policy_loss import estimated_advantages, whitened
from llmx.tasks.ppo import Ppo
from tests.architectures import small_config
from tests.reference import word_tokenizer
from tests.rollouts import (
    PROMPTS,
    batch_of,
    descend,
    even,
    models_for,
    of_task,
    plain_logps,
    rolled,
    text_of,
    trained,
    trained_for_every_split,
)
from tests.unit.test_models_model import model_of


def task(**options: Any) -> Ppo:
    assert task_class("ppo") is Ppo
    default = {"rewards": ["tests.rollouts:even"], "max_new_tokens": 6, "group_size": 4}
    return Ppo(of_task("ppo", **{**default, **options}), word_tokenizer())


def test_advantages_of_almost_nothing() -> None:
    assert not estimated_advantages(np.zeros(0), np.zeros(0), gamma=1, gae_lambda=1).size
    assert [len(part) for part in whitened([np.array([3.0, 1.0, -2.0]), np.zeros(0)])] == [3, 0]
    assert whitened([np.array([5.0])])[0] == pytest.approx([0.0]), "of one there is no variance"
    assert whitened([]) == []


def plain_values(network: Any, ids: torch.Tensor, at: np.ndarray) -> torch.Tensor:
    """The scores of a network of transformers at the tokens before those of a completion."""
    hidden = network.base_model(input_ids=ids[None]).last_hidden_state[0]
    return network.score(hidden)[at - 1, 0]


def test_a_step_is_that_of_plain_pytorch() -> None:
    """Rewards, advantages, losses and three updates of both networks with SGD, one sample after
    the other."""
    options = {"value_coefficient": 0.5, "value_clip": 0.02, "gamma": 0.9}
    own, lr = task(updates=3, beta=0.3, **options), 0.05
    models = models_for(own, drift=1.1)
    plain = {name: model.module for name, model in models_for(own, drift=1.1).items()}
    samples = rolled(own, models)
    targets = sum(int(sample.targets.sum()) for sample in samples)
    assert targets == sum(len(sample.tokens) for sample in samples) - 4 * sum(
        len(prompt.tokens) for prompt in PROMPTS
    )
    parameters, mean_loss, metrics = trained(own, models, samples, parts=(5, 7), lr=lr)

    # What each token is trained with, from the networks as they were.
    texts = [text_of(sample) for sample in samples]
    old_logps, old_values, advantages, returns, rewards = [], [], [], [], []
    with torch.no_grad():
        for ids, at in texts:
            old_logps.append(plain_logps(plain["policy"], ids, at))
            old_values.append(plain_values(plain["value"], ids, at).double())
            kl = old_logps[-1] - plain_logps(plain["reference"], ids, at)
            rewards.append(even("", own.decode(ids[at].tolist()), ""))
            of_tokens = -0.3 * kl.double()
            of_tokens[-1] += rewards[-1]
            advantage, reversed_advantages = torch.tensor(0.0), []
            for number in reversed(range(len(at))):
                following = old_values[-1][number + 1] if number + 1 < len(at) else 0.0
                error = of_tokens[number] + 0.9 * following - old_values[-1][number]
                advantage = error + 0.9 * 0.95 * advantage
                reversed_advantages.append(advantage)
            advantages.append(torch.stack(reversed_advantages[::-1]))
            returns.append(advantages[-1] + old_values[-1])
    tokens = torch.cat(advantages)
    advantages = [(a - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8) for a in advantages]

    losses, num_clipped = [], [0, 0]
    wanted = [*plain["policy"].parameters(), *plain["value"].parameters()]
    for _ in range(3):
        total = torch.zeros((), dtype=torch.float64)
        for number, (ids, at) in enumerate(texts):
            ratios = (plain_logps(plain["policy"], ids, at) - old_logps[number]).exp()
            surrogate = -advantages[number] * ratios
            clipped = -advantages[number] * ratios.clamp(0.8, 1.2)
            num_clipped[0] += int((clipped > surrogate).sum())
            values, old = plain_values(plain["value"], ids, at), old_values[number]
            held = torch.clamp(values, old - 0.02, old + 0.02)
            errors = [(each - returns[number]) ** 2 for each in (values, held)]
            num_clipped[1] += int((errors[1] > errors[0]).sum())
            total = total + torch.max(surrogate, clipped).sum()
            total = total + 0.5 * 0.5 * torch.max(*errors).sum()
        losses.append(float(total.detach()) / targets)
        descend(total / targets, wanted, lr=lr)
    for ours, theirs in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert mean_loss == pytest.approx(np.mean(losses), abs=1e-5)
    for name, count in zip(("clipped", "value_clipped"), num_clipped, strict=True):
        assert metrics[name] == [count, 3 * targets]
        assert count > 0
    assert metrics["reward"][0] / metrics["reward"][1] == pytest.approx(np.mean(rewards))
    assert {*metrics} == {*own.metrics}


def test_one_gradient_for_every_split() -> None:
    own = task()
    samples = rolled(own, models_for(own))
    drifted = models_for(own, drift=1.05)  # so that ratios and values differ
    assert trained_for_every_split(own, drifted, samples) == {"policy", "value"}


def test_a_completion_without_a_reward_trains_nothing() -> None:
    own = task(rewards=["tests.rollouts:broken"])
    samples = rolled(own, models_for(own))
    rewards = [float(sample.columns["measures"][0, 0]) for sample in samples]
    has_reward = [bool(sample.columns["measured"][0, 0]) for sample in samples]
    assert 0 < sum(has_reward) < len(samples), rewards
    assert [bool(sample.targets.any()) for sample in samples] == has_reward
    white = np.concatenate([s.columns["token_advantage"][s.targets] for s in samples])
    assert white.mean() == pytest.approx(0, abs=1e-6)
    assert white.std(ddof=1) == pytest.approx(1, rel=1e-5)
    truncated = task(mask_truncated=True, max_new_tokens=1)
    assert not any(sample.targets.any() for sample in rolled(truncated, models_for(truncated)))


def test_without_a_penalty_there_is_no_reference() -> None:
    own = task(beta=0, reward_model="owner/reward")
    specs = own.models()
    assert list(specs) == ["policy", "value", "reward_model"]
    assert [name for name, spec in specs.items() if spec.trained] == ["policy", "value"]
    models = models_for(own)
    with torch.no_grad():
        found = own.loss(models, batch_of(own, rolled(own, models)))
    assert {*found.metrics} == {*own.metrics}
    assert "kl" not in found.metrics
    value = task(value_model="owner/reward").models()["value"]
    assert (value.source, value.num_labels, value.trained) == ("owner/reward", 1, True)
    assert task().models()["value"].source is None, "the weights of the policy"


def test_a_network_that_scores_whole_sequences_is_no_value_model() -> None:
    config = small_config("bert")
    config.num_labels = 1
    network = AutoModelForSequenceClassification.from_config(config)
    spec = ModelSpec(head=CLASSIFICATION, num_labels=1)
    model = replace(model_of(network, "padded"), name="value", spec=spec)
    with pytest.raises(ConfigError, match="'value' is a BertForSequenceClassification.*causal one"):
        model.token_scores({})
