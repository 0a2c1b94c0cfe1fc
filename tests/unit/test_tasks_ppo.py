"""task=ppo: the values of plain PyTorch, one gradient for every split, what is refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from llmx.compose.task_rules import task_problems
from llmx.config import Experiment
from llmx.data import Sample
from llmx.errors import ConfigError
from llmx.models.model import CLASSIFICATION, Models, ModelSpec
from llmx.models.pooling import give_pooled_forward
from llmx.tasks import RolloutKey, task_class
from llmx.tasks.policy_loss import clipped_gains, estimated_advantages, value_losses, whitened
from llmx.tasks.ppo import Ppo
from llmx.train.batches import Step
from llmx.train.step import StepMetrics, train_updates
from tests.composing import composed
from tests.reference import word_tokenizer
from tests.small_models import small_model
from tests.unit.test_models_model import model_of
from tests.unit.test_tasks_grpo import PROMPTS, PlainEngine, batch_of, of_task, rolled, scorer


def task(**options: Any) -> Ppo:
    assert task_class("ppo") is Ppo
    rewards = ["tests.unit.test_tasks_grpo:even"]
    exp = of_task(**{"rewards": rewards, "max_new_tokens": 6, "group_size": 4, **options})
    exp.task.kind = "ppo"
    return Ppo(exp, word_tokenizer())


def models_for(own: Ppo, layout: str = "packed", *, drift: float = 1.0) -> Models:
    """``drift`` times the first weights are those of policy and value model."""
    size, networks = len(own.tokenizer), {}
    for name, spec in own.models().items():
        model = (
            scorer(size, layout)
            if spec.head == CLASSIFICATION
            else model_of(small_model("llama", vocab_size=size), layout, trained=spec.trained)
        )
        if spec.head == CLASSIFICATION:
            give_pooled_forward(model.module)
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(drift if spec.trained else 1.0)
        networks[name] = replace(model, name=name, spec=spec)
    return Models(networks)


REWARDS = np.array([0.1, -0.2, 0.3, 1.0])
VALUES = np.array([0.5, 0.4, -0.3, 0.7])


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0)])
def test_advantages_are_weighted_sums_of_the_errors_that_follow(
    gamma: float, gae_lambda: float
) -> None:
    advantages = estimated_advantages(REWARDS, VALUES, gamma=gamma, gae_lambda=gae_lambda)
    after = [*VALUES[1:], 0.0]
    errors = [r + gamma * v - value for r, v, value in zip(REWARDS, after, VALUES, strict=True)]
    for at, advantage in enumerate(advantages):
        weights = [(gamma * gae_lambda) ** number for number in range(len(errors) - at)]
        assert advantage == pytest.approx(np.dot(weights, errors[at:]))
    if (gamma, gae_lambda) == (1.0, 1.0):  # the whole return, without what was expected
        assert advantages + VALUES == pytest.approx(REWARDS[::-1].cumsum()[::-1])
    assert not estimated_advantages(np.zeros(0), np.zeros(0), gamma=1, gae_lambda=1).size


def test_advantages_are_whitened_over_all_completions() -> None:
    parts = [np.array([3.0, 1.0, -2.0]), np.array([0.5]), np.zeros(0)]
    white = whitened(parts)
    assert [len(part) for part in white] == [3, 1, 0]
    tokens = np.concatenate(white)
    assert tokens.mean() == pytest.approx(0)
    assert tokens.std(ddof=1) == pytest.approx(1)
    assert whitened([np.array([5.0])])[0] == pytest.approx([0.0]), "of one there is no variance"
    assert whitened([]) == []


def test_values_are_held_near_the_old_ones() -> None:
    """Within the clip the loss is the squared error. Beyond it, away from the return it still
    pulls, and towards the return no more."""
    values = torch.tensor([1.1, 2.0, 0.0, 2.0], requires_grad=True)
    old, returns = torch.ones(4), torch.tensor([3.0, 3.0, 3.0, -1.0])
    losses, held = value_losses(values, old, returns, clip=0.2)
    assert losses.tolist() == pytest.approx([1.9**2 / 2, 1.8**2 / 2, 3.0**2 / 2, 3.0**2 / 2])
    assert held.tolist() == [False, True, False, False]
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.9, 0.0, -3.0, 3.0])


def test_ratios_are_clipped_where_they_gain() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], requires_grad=True)
    gains, clipped = clipped_gains(ratios, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), 0.8, 1.2)
    assert gains.tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8, 1.1])
    assert clipped.tolist() == [True, False, False, True, False]


def plain_values(network: Any, ids: torch.Tensor, at: np.ndarray) -> torch.Tensor:
    """The scores of a network of transformers at the tokens before those of a completion."""
    hidden = network.base_model(input_ids=ids[None]).last_hidden_state[0]
    return network.score(hidden)[at - 1, 0]


def plain_logps(network: Any, ids: torch.Tensor, at: np.ndarray) -> torch.Tensor:
    return network(input_ids=ids[None]).logits[0].log_softmax(-1)[at - 1, ids[at]]


@pytest.mark.parametrize("parts", [(12,), (5, 7)])
def test_a_step_is_that_of_plain_pytorch(parts: tuple[int, ...]) -> None:
    """Rewards, advantages, losses and three updates of both networks with SGD, one sample after
    the other."""
    own, lr = task(updates=3, beta=0.3, value_coefficient=0.5, value_clip=0.02), 0.05
    models = models_for(own, drift=1.1)
    plain = {name: model.module for name, model in models_for(own, drift=1.1).items()}
    samples = rolled(own, models)
    targets = sum(int(sample.targets.sum()) for sample in samples)
    assert targets == sum(len(sample.tokens) for sample in samples) - 4 * sum(
        len(prompt.tokens) for prompt in PROMPTS
    )
    ends = np.cumsum([0, *parts]).tolist()
    batches = tuple(batch_of(own, samples[a:b]) for a, b in pairwise(ends))
    metrics = StepMetrics(torch.device("cpu"))
    engine: Any = PlainEngine(models, lr)
    parameters = [*models["policy"].module.parameters(), *models["value"].module.parameters()]
    engine._optimizer = torch.optim.SGD(parameters, lr=lr)
    step = Step(0, batches, float(targets), targets, 0, 0)
    mean_loss = float(train_updates(engine, step, own, world=1, metrics=metrics)) / targets

    # What each token is trained with, from the networks as they were.
    texts = [(torch.tensor(s.tokens.astype(np.int64)), s.targets.nonzero()[0]) for s in samples]
    old_logps, old_values, advantages, returns, rewards = [], [], [], [], []
    with torch.no_grad():
        for ids, at in texts:
            old_logps.append(plain_logps(plain["policy"], ids, at))
            old_values.append(plain_values(plain["value"], ids, at).double())
            kl = old_logps[-1] - plain_logps(plain["reference"], ids, at)
            words = own.decode(ids[at].tolist()).split()
            rewards.append(sum(len(word) % 2 == 0 for word in words) / max(1, len(words)))
            of_tokens = -0.3 * kl.double()
            of_tokens[-1] += rewards[-1]
            advantage, reversed_advantages = torch.tensor(0.0), []
            for number in reversed(range(len(at))):
                following = old_values[-1][number + 1] if number + 1 < len(at) else 0.0
                error = of_tokens[number] + following - old_values[-1][number]
                advantage = error + 0.95 * advantage
                reversed_advantages.append(advantage)
            advantages.append(torch.stack(reversed_advantages[::-1]))
            returns.append(advantages[-1] + old_values[-1])
    tokens = torch.cat(advantages)
    advantages = [(a - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8) for a in advantages]

    losses, num_clipped = [], [0, 0]
    trained = [*plain["policy"].parameters(), *plain["value"].parameters()]
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
        gradients = torch.autograd.grad(total / targets, trained, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= lr * (torch.zeros(()) if gradient is None else gradient)
    for ours, theirs in zip(parameters, trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert mean_loss == pytest.approx(np.mean(losses), abs=1e-5)
    values = dict(zip(metrics.names, zip(*[iter(metrics.values())] * 2, strict=True), strict=True))
    for name, count in zip(("clipped", "value_clipped"), num_clipped, strict=True):
        assert [float(value) for value in values[name]] == [count, 3 * targets]
        assert count > 0
    assert float(values["reward"][0] / values["reward"][1]) == pytest.approx(np.mean(rewards))
    assert {*values} == {*own.metrics}


def test_one_gradient_for_every_split() -> None:
    """Of both networks; of micro batches, packed and padded; an empty one adds nothing."""
    own = task()
    samples = rolled(own, models_for(own))
    trained = models_for(own, drift=1.05)  # so that ratios and values differ
    gradients, metrics = [], []
    for layout, parts in (("packed", (12,)), ("packed", (5, 0, 7)), ("padded", (1, 11))):
        attention = models_for(own, layout).main.attention
        models = Models({n: replace(m, attention=attention) for n, m in trained.items()})
        modules = torch.nn.ModuleList(model.module for model in models.values())
        modules.zero_grad()
        first, weight, sums = 0, 0.0, defaultdict[str, float](float)
        for size in parts:
            found = own.loss(models, batch_of(own, samples[first : first + size], layout))
            found.sum.backward()
            weight += found.weight
            first += size
            for name, value in found.metrics.items():
                total = value[0] if isinstance(value, tuple) else value
                sums[name] += float(torch.as_tensor(total).detach())
        gradients.append(
            {n: p.grad / weight for n, p in modules.named_parameters() if p.grad is not None}
        )
        metrics.append(sums)
    for other, of_metrics in zip(gradients[1:], metrics[1:], strict=True):
        assert of_metrics == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)
        assert other.keys() == gradients[0].keys()
        for name, values in other.items():
            torch.testing.assert_close(values, gradients[0][name], rtol=1e-4, atol=1e-6)
    assert {name.split(".")[0] for name in gradients[0]} == {"0", "1"}, "policy, value model"


def test_a_completion_without_a_reward_trains_nothing() -> None:
    own = task(rewards=["tests.unit.test_tasks_grpo:broken"])
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


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_score_of_each_token(layout: str) -> None:
    own = task()
    models = models_for(own, layout)
    samples = rolled(own, models)
    model = models["value"]
    with torch.no_grad():
        found = model.token_scores(batch_of(own, samples, layout))
        wanted = [
            plain_values(
                model.module,
                torch.tensor(sample.tokens.astype(np.int64)),
                sample.targets.nonzero()[0],
            )
            for sample in samples
        ]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=1e-5)


def test_a_network_that_scores_whole_sequences_is_no_value_model() -> None:
    from transformers import AutoModelForSequenceClassification

    from tests.architectures import small_config

    config = small_config("bert")
    config.num_labels = 1
    network = AutoModelForSequenceClassification.from_config(config)
    spec = ModelSpec(head=CLASSIFICATION, num_labels=1)
    model = replace(model_of(network, "padded"), name="value", spec=spec)
    with pytest.raises(ConfigError, match="'value' is a BertForSequenceClassification.*causal one"):
        model.token_scores({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": []}, r"task\.options\.rewards is empty"),
        ({"clip": 0}, r"task\.options\.clip=0: must be a number above 0"),
        ({"gae_lambda": 2}, r"task\.options\.gae_lambda=2: must be a number from 0 to 1"),
        ({"advantage": "centred"}, r"unknown key"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**options)


def test_what_cannot_be_trained_is_refused() -> None:
    exp = of_task(max_new_tokens=20)
    exp.task.kind, exp.data.packing = "ppo", "best_fit"
    exp.model.config = {"resid_pdrop": 0.1}
    problems = "\n".join(task_problems(exp))
    assert "model.config.resid_pdrop=0.1: task=ppo trains without dropout" in problems
    assert "data.packing=best_fit: for task=ppo a sample is one prompt" in problems
    assert "task.options.max_new_tokens=20: prompt and completion are at most" in problems


def test_the_command_composes() -> None:
    exp: Experiment = composed(["experiment=demo", "task=ppo", "optim=adamw"]).experiment
    assert (exp.task.kind, exp.data.packing) == ("ppo", "none")
    assert exp.task.options["max_new_tokens"] == 64
    own = Ppo(exp, None)
    assert (own.options.beta, own.options.clip, own.options.gamma) == (0.1, 0.2, 1.0)
    assert own.options.gae_lambda == 0.95
    assert own.normaliser == "tokens"


def test_a_rollout_draws_again_what_it_has_drawn() -> None:
    own = task()
    models = models_for(own)
    first, again = rolled(own, models), rolled(own, models)
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        for name, values in one.columns.items():
            assert np.array_equal(values, other.columns[name]), name
    with torch.no_grad():
        other_step = own.rollout(models, PROMPTS, RolloutKey(1, 1))
    assert [e.sequences[0].ids for group in other_step for e in group] != [
        sample.tokens.tolist() for sample in first
    ]
    assert isinstance(first[0], Sample)
