"""One optimizer step: its seed, its weight, forward and backward over the micro batches, update.

Random numbers (dropout) are a pure function of (seed, step, rank), seeded before each step: no
generator's state is saved, and a resumed run draws the same. Shown by
``python -m pytest tests/unit/test_train_random.py`` and ``python -m pytest -m deepspeed
tests/integration/test_train_engines.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from llmx.models.loss import IGNORE
from llmx.models.model import Models
from llmx.tasks import Loss, SampleKey, Task, next_token_loss
from llmx.train.batches import Step, Transform
from llmx.train.engine.build import Engine
from llmx.train.step_times import StepTimes


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed of one step on one rank; neighbouring steps and ranks share nothing."""
    digest = hashlib.blake2b(f"{seed}:step:{step}:rank:{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the generators that a model draws from: the CPU's and this rank's GPU's.

    ``torch.manual_seed`` would visit every device of the host. Python's and NumPy's own
    generators are left alone: nothing in a step draws from them.
    """
    value = step_seed(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


RandomState = tuple[torch.Tensor, torch.Tensor | None]
"""Of the generators that a model draws from: the CPU's and this rank's GPU's."""


def random_state() -> RandomState:
    """As they are now."""
    cuda = None
    if torch.cuda.is_initialized():
        cuda = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
    return torch.default_generator.get_state(), cuda


def set_random_state(state: RandomState) -> None:
    """As they were."""
    cpu, cuda = state
    torch.default_generator.set_state(cpu)
    if cuda is not None:
        torch.cuda.default_generators[torch.cuda.current_device()].set_state(cuda)


LossOf = Callable[[Models, dict[str, torch.Tensor]], Loss]
"""The loss of a micro batch (``Task.loss``)."""


def of_next_tokens(models: Models, batch: dict[str, torch.Tensor]) -> Loss:
    """The loss of language modelling."""
    return next_token_loss(models.main, batch)


def train_step(
    engine: Engine,
    step: Step,
    *,
    world: int,
    loss_of: LossOf = of_next_tokens,
    metrics: StepMetrics | None = None,
    before_update: Callable[[], None] = lambda: None,
    timed: StepTimes | None = None,
) -> torch.Tensor:
    """Forward, backward and one update. Returns this rank's summed loss, fp32 scalar.

    ``metrics`` gets what the loss measures. ``before_update`` is called between the last backward
    pass and the update. ``timed`` takes the time of each phase.

    DeepSpeed divides by the accumulation (in ``backward``) and by the ranks (in the
    reduction): the factor undoes both, so that the gradient is that of the mean over the
    step's weight (its target tokens, say), whatever the split.
    """
    factor = world * len(step.micro_batches) / (step.weight or 1)
    auxiliary_factor = world * len(step.micro_batches) / max(step.tokens, 1)
    models = engine.models
    phase: Callable[[str], contextlib.AbstractContextManager[Any]]
    phase = contextlib.nullcontext if timed is None else timed.phase
    for model in models.values():
        model.routing.begin_step()
    engine.set_micro_steps(len(step.micro_batches))
    loss_sum = torch.zeros((), device=engine.device)
    for number, micro_batch in enumerate(step.micro_batches, start=1):
        scale = factor / len(step.micro_batches) * engine.loss_scale()
        for model in models.values():
            model.gradient_scale = scale
        with phase("forward"):
            loss = loss_of(models, micro_batch)
        objective = loss.sum * factor
        for model in models.values():
            objective = model.routing.objective(objective, factor=auxiliary_factor)
        with phase("backward"):
            engine.backward(objective)
            engine.record_grad_norm()
        if number == len(step.micro_batches):
            before_update()
        with phase("update"):
            engine.engine.step()
        loss_sum += loss.sum.detach()
        if metrics is not None:
            metrics.add(loss)
    return loss_sum


def transform_of(task: Task, *, seed: int) -> Transform | None:
    """``Task.transform`` with the keys of a run; None where the task takes samples as they are."""
    if type(task).transform is Task.transform:
        return None
    return lambda sample, step, place: task.transform(sample, SampleKey(seed, step, place))


def with_weight(step: Step, task: Task, *, group: Any = None) -> Step:
    """With the step's weight and target tokens, where the task knows them from its micro batches.
    Collective then, in a gloo ``group``: nothing waits for a GPU."""
    if task.normaliser != "batch":
        return step
    mine = sum(task.weight(micro_batch) for micro_batch in step.micro_batches)
    targets = sum(int((micro["labels"] != IGNORE).sum()) for micro in step.micro_batches)
    both = torch.tensor([mine, targets], dtype=torch.float64)
    torch.distributed.all_reduce(both, group=group)
    weight, target_tokens = both.tolist()
    return replace(step, weight=weight, target_tokens=int(target_tokens))


class StepMetrics:
    """What losses measure beside themselves, summed on the device: nothing here waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        """By name: [sum, weight], fp64 where the device has it."""

    def add(self, loss: Loss) -> None:
        """Of one micro batch."""
        for name, value in loss.metrics.items():
            total, weight = value if isinstance(value, tuple) else (value, loss.weight)
            pair = torch.zeros(2, dtype=torch.float64, device=self._device)
            # Not an assignment, which copies a number from the host, and waits.
            pair[0].fill_(total)
            pair[1].fill_(weight)
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    @property
    def names(self) -> list[str]:
        """Sorted: the same on every rank."""
        return sorted(self._sums)

    def values(self) -> list[torch.Tensor]:
        """Sum and weight of each name, in their order."""
        return [part for name in self.names for part in self._sums[name]]
