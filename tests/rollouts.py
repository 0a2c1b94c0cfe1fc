"""Tasks that generate (``grpo``, ``ppo``) on networks of 32 dimensions: rewards, prompts, rollouts,
and a step of plain SGD."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from llmx.config import Experiment
from llmx.data import Sample, collate
from llmx.data.examples import Example, Schema
from llmx.data.store.samples import in_memory
from llmx.models.model import CLASSIFICATION, Model, Models
from llmx.models.pooling import give_pooled_forward
from llmx.tasks import Loss, Prompt, RolloutKey
from llmx.tasks.grpo import Grpo
from llmx.train.batches import Step
from llmx.train.step import StepMetrics, train_step
from tests.architectures import small_config
from tests.small_models import small_model
from tests.unit.test_models_model import model_of

PROMPTS = [Prompt((5, 6, 7), ((8, 9),)), Prompt((9, 4), ((7, 7, 8),)), Prompt((3,) * 12, ((4,),))]


def even(prompt: str, completion: str, reference: str) -> float:
    """A reward: the share of words with an even number of letters."""
    words = completion.split()
    return sum(len(word) % 2 == 0 for word in words) / max(1, len(words))


def abstains(prompt: str, completion: str, reference: str) -> float | None:
    """A reward that has no say about every second completion or so."""
    return None if len(completion) % 2 else float(len(completion) % 3)


def broken(prompt: str, completion: str, reference: str) -> float:
    """A reward that fails for every second completion or so."""
    if len(completion) % 2:
        raise RuntimeError("no answer")
    return math.nan if len(completion) % 3 == 0 else 1.0


def nothing(prompt: str, completion: str, reference: str) -> list[float]:
    """No reward."""
    return []


def of_task(kind: str = "grpo", **options: Any) -> Experiment:
    exp = Experiment()
    exp.task.kind, exp.task.options = kind, options
    exp.data.seq_len, exp.data.packing, exp.batch.micro_batch = 16, "none", 3
    return exp


def scorer(vocab_size: int, layout: str) -> Model:
    config = small_config("llama")
    config.num_labels, config.pad_token_id, config.vocab_size = 1, 0, vocab_size
    torch.manual_seed(3)
    return model_of(AutoModelForSequenceClassification.from_config(config).eval(), layout)


def models_for(own: Grpo, layout: str = "packed", *, drift: float = 1.0, **config: Any) -> Models:
    """The networks of a task; those that are trained have ``drift`` times the weights."""
    size, models = len(own.tokenizer), {}
    for name, spec in own.models().items():
        if spec.head == CLASSIFICATION:
            model = scorer(size, layout)
        else:
            model = model_of(small_model("llama", vocab_size=size, **config), layout)
        if spec.trained:
            with torch.no_grad():
                for parameter in model.module.parameters():
                    parameter.mul_(drift)
            if spec.head == CLASSIFICATION:
                give_pooled_forward(model.module)
        models[name] = replace(model, name=name, spec=spec)
    return Models(models)


def samples_of(own: Any, groups: Iterable[Iterable[Example]]) -> list[Sample]:
    """What a rollout has made, in order."""
    schema, size = Schema(own.rollout_columns, own.name, method="rollout()"), len(own.tokenizer)
    return [in_memory(example, schema, vocab_size=size) for group in groups for example in group]


def rolled(
    own: Any, models: Models, prompts: Sequence[Prompt] = PROMPTS, *, step: int = 0
) -> list[Sample]:
    """The samples of one rollout. Where it asks for other prompts, it gets the same ones."""
    with torch.no_grad():
        key = RolloutKey(1, step, lambda attempt: list(prompts))
        return samples_of(own, own.rollout(models, prompts, key))


def batch_of(own: Any, samples: list[Sample], layout: str = "packed") -> dict[str, Any]:
    seq_len, columns = own.exp.data.seq_len, own.rollout_columns
    return collate(samples, seq_len=seq_len, pad_id=0, layout=layout, columns=columns)


def means_of(own: Grpo, found: Loss) -> dict[str, float]:
    """The metrics of a loss, which are those that the task declares."""
    assert {*found.metrics} == {*own.metrics}
    return {name: float(total) / max(weight, 1) for name, (total, weight) in found.metrics.items()}


def text_of(sample: Sample) -> tuple[torch.Tensor, np.ndarray]:
    """Its token ids, and the places of its targets."""
    return torch.tensor(sample.tokens.astype(np.int64)), sample.targets.nonzero()[0]


def plain_logps(
    network: Any, ids: torch.Tensor, at: np.ndarray, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of the tokens at these places, of a network of transformers."""
    logits = network(input_ids=ids[None]).logits[0] / temperature
    return logits.log_softmax(-1)[at - 1, ids[at]]


def descend(loss: torch.Tensor, parameters: Sequence[torch.Tensor], *, lr: float) -> None:
    """A step of SGD."""
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= lr * (torch.zeros(()) if gradient is None else gradient)


class PlainEngine:
    """SGD over micro batches of one rank, as ``train_step`` drives an engine."""

    def __init__(self, models: Models, lr: float) -> None:
        self.models, self.engine, self.device = models, self, torch.device("cpu")
        trained = [model.module for model in models.values() if model.spec.trained]
        self.parameters = [p for module in trained for p in module.parameters()]
        self._optimizer = torch.optim.SGD(self.parameters, lr=lr)
        self._done = 0

    def set_micro_steps(self, count: int) -> None:
        self._count = count

    def loss_scale(self) -> float:
        return 1.0

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._count).backward()

    def step(self) -> None:
        self._done += 1
        if self._done % self._count == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()


def trained(
    own: Grpo, models: Models, samples: list[Sample], *, parts: Sequence[int], lr: float
) -> tuple[list[torch.Tensor], float, dict[str, list[float]]]:
    """The parameters after a step with micro batches of so many samples, the mean loss by token,
    and the metrics: name -> sum, weight."""
    targets = sum(int(sample.targets.sum()) for sample in samples)
    ends = np.cumsum([0, *parts]).tolist()
    batches = tuple(batch_of(own, samples[first:last]) for first, last in pairwise(ends))
    engine: Any = PlainEngine(models, lr)
    metrics = StepMetrics(torch.device("cpu"))
    step = Step(0, batches, float(targets), targets, 0, 0)
    loss = float(train_step(engine, step, own, world=1, metrics=metrics)) / targets
    return engine.parameters, loss, {name: [*pair] for name, pair in metrics.sums().items()}


def trained_for_every_split(own: Grpo, models: Models, samples: list[Sample]) -> set[str]:
    """The models that have a gradient. Assert that it is one for all micro batches, packed and
    padded, of which an empty one adds nothing."""
    gradients, metrics = [], []
    for layout, parts in (("packed", (12,)), ("packed", (5, 0, 7)), ("padded", (1, 11))):
        attention = model_of(models.main.module, layout).attention
        laid_out = Models({n: replace(m, attention=attention) for n, m in models.items()})
        modules = torch.nn.ModuleDict({name: model.module for name, model in models.items()})
        modules.zero_grad()
        first, weight, sums = 0, 0.0, defaultdict[str, float](float)
        for size in parts:
            found = own.loss(laid_out, batch_of(own, samples[first : first + size], layout))
            found.sum.backward()
            weight += found.weight
            first += size
            for name, value in found.metrics.items():
                total = value[0] if isinstance(value, tuple) else value
                sums[name] += float(torch.as_tensor(total).detach())
        named = modules.named_parameters()
        gradients.append({name: p.grad / weight for name, p in named if p.grad is not None})
        metrics.append(sums)
    for other, of_metrics in zip(gradients[1:], metrics[1:], strict=True):
        assert of_metrics == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)
        assert other.keys() == gradients[0].keys()
        for name, values in other.items():
            torch.testing.assert_close(values, gradients[0][name], rtol=1e-4, atol=1e-6)
    return {name.split(".")[0] for name, values in gradients[0].items() if bool(values.any())}
