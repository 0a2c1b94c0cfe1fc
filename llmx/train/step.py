"""One step: its seed, its weight, forward and backward over the micro batches, update.

Random numbers (dropout) are a pure function of (seed, step, rank), seeded before each step: no
generator's state is saved, and a resumed run draws the same.

In a joint loss (``JointTask``: contrastive ones) the examples of a step depend on each other,
however they are split over ranks and micro batches. Every rank gets the outputs of all sequences,
computes the loss, and passes the gradient with regard to its own outputs through its network. With
several micro batches a first pass without a graph computes the outputs, and a second one, with the
same random numbers, passes the gradients (GradCache, Gao et al. 2021, arXiv 2101.06983): a third
more computation, and the memory of one micro batch.

Tried by ``python -m pytest tests/unit/test_train_step.py`` and
``python -m pytest -m deepspeed tests/integration/test_train_engines.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from llmx.collectives import all_gather
from llmx.data.examples import Schema
from llmx.errors import ConfigError
from llmx.models.loss import IGNORE, to_device
from llmx.models.model import Batch, Models
from llmx.tasks import JointTask, Loss, SampleKey, Task
from llmx.train.batches import Step, Transform
from llmx.train.engine.build import Engine
from llmx.train.step_times import StepTimes


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed of one step on one rank; neighbouring steps and ranks share nothing."""
    digest = hashlib.blake2b(f"{seed}:step:{step}:rank:{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _generators() -> list[torch.Generator]:
    """The generators that a model draws from: the CPU's and this rank's GPU's.

    ``torch.manual_seed`` would visit every device of the host. Python's and NumPy's own
    generators are left alone: nothing in a step draws from them.
    """
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the generators that a model draws from."""
    for generator in _generators():
        generator.manual_seed(step_seed(seed, step, rank))


def random_state() -> list[torch.Tensor]:
    """The states of the generators that a model draws from."""
    return [generator.get_state() for generator in _generators()]


def set_random_state(states: list[torch.Tensor]) -> None:
    """Set these generators to an earlier state."""
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(state)


def train_step(
    engine: Engine,
    step: Step,
    task: Task,
    *,
    world: int,
    group: Any = None,
    metrics: StepMetrics | None = None,
    timed: StepTimes | None = None,
    before_update: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Forward, backward and update, as often as ``Task.updates`` says, on the same micro batches.

    DeepSpeed divides by the accumulation (in ``backward``) and by the ranks (in the
    reduction): the factor undoes both, so that the gradient is that of the mean over the
    step's weight (its target tokens, say), whatever the split.

    Args:
        group: a gloo group of all ranks, for a joint loss. Objects in NCCL make the host wait for
            the GPU.
        metrics: gets what the loss measures.
        timed: takes the time of each phase.
        before_update: called between the last backward pass and the last update.

    Returns:
        This rank's summed loss, fp32 scalar: the mean over the updates.
    """
    count, models = len(step.micro_batches), engine.models
    factor = world * count / (step.weight or 1)
    auxiliary_factor = world * count / max(step.tokens, 1)
    phase = contextlib.nullcontext if timed is None else timed.phase
    engine.set_micro_steps(count)
    routings = [model.routing for model in models.values() if model.routing.routers]
    fused = [model for model in models.values() if model.fused_loss]
    losses = []
    for update in range(1, task.updates + 1):
        joint = None
        if isinstance(task, JointTask):
            joint = JointStep(task, models, step.micro_batches, group=group)
        loss_of = joint or task.loss
        for routing in routings:
            routing.begin_step()
        loss_sum = torch.zeros((), device=engine.device)
        for number, micro_batch in enumerate(step.micro_batches, start=1):
            for model in fused:
                model.gradient_scale = factor / count * engine.loss_scale()
            with phase("forward"):
                loss = loss_of(models, micro_batch)
            objective = loss.sum * factor
            for routing in routings:
                objective = routing.objective(objective, factor=auxiliary_factor)
            with phase("backward"):
                engine.backward(objective)
            if number == count and update == task.updates:
                before_update()
            with phase("update"):
                engine.engine.step()
            loss_sum += loss.sum.detach()
            if metrics is not None and loss.metrics:
                metrics.add(loss)
        losses.append(loss_sum)
    return torch.stack(losses).mean()


def transform_of(task: Task, *, seed: int) -> Transform | None:
    """``Task.transform`` with the keys of a run; None where the task takes samples as they are."""
    if type(task).transform is Task.transform:
        return None
    return lambda sample, step, place: task.transform(sample, SampleKey(seed, step, place))


def weighed(step: Step, task: Task, *, group: Any = None) -> Step:
    """The step with its weight and target tokens, of a task that knows them from its micro batches
    (``normaliser = "batch"``). Collective, in a gloo ``group``: nothing waits for a GPU."""
    weight_here = sum(task.weight(micro_batch) for micro_batch in step.micro_batches)
    targets = sum(int((micro["labels"] != IGNORE).sum()) for micro in step.micro_batches)
    sums = torch.tensor([weight_here, targets], dtype=torch.float64)
    torch.distributed.all_reduce(sums, group=group)
    weight, target_tokens = sums.tolist()
    return replace(step, weight=weight, target_tokens=int(target_tokens))


class StepMetrics:
    """Sums of the metrics that losses measure, on the device: nothing here waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        """[sum, weight] by name, fp64 where the device has it."""

    @torch.no_grad()
    def add(self, loss: Loss) -> None:
        """Add what the loss of one micro batch measures."""
        for name, value in loss.metrics.items():
            total, weight = value if isinstance(value, tuple) else (value, loss.weight)
            pair = torch.zeros(2, dtype=torch.float64, device=self._device)
            # Not an assignment, which copies a number from the host, and waits.
            pair[0].fill_(total)
            pair[1].fill_(weight)
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def sums(self) -> dict[str, tuple[float, float]]:
        """Sum and weight by name. Waits for the device."""
        pairs = {name: pair.tolist() for name, pair in self._sums.items()}
        return {name: (total, weight) for name, (total, weight) in pairs.items()}


EXAMPLES = "example_ids"


class Part(NamedTuple):
    """The sequences, examples and columns of one micro batch of a rank."""

    sequences: int
    examples: int
    columns: Mapping[str, torch.Tensor]
    """Columns by sequence and by example, with ``example_ids``, which count from 0 in each part."""


class JointStep:
    """The losses of one step. Collective: the first call, on all ranks."""

    _losses: torch.Tensor
    """The losses of all examples of the step."""
    _metrics: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    _gradient: torch.Tensor
    """The gradient with regard to the outputs of all sequences of the step."""
    _slices: list[tuple[slice, slice]]
    """The sequences and the examples of each micro batch of this rank, among all of the step."""

    def __init__(
        self,
        task: JointTask,
        models: Models,
        micro_batches: tuple[Batch, ...],
        *,
        group: Any = None,
    ) -> None:
        if task.normaliser != "examples":
            raise ConfigError(
                f"task={task.name} has a joint loss, but its normaliser is {task.normaliser!r}: a "
                'joint loss is a mean over examples. Set normaliser = "examples".'
            )
        self._task, self._models, self._group = task, models, group
        self._micro_batches = micro_batches
        self._states: list[list[torch.Tensor]] = []
        self._next = 0

    def __call__(self, models: Models, batch: Batch) -> Loss:
        """The loss of the next micro batch. Its value is that of its examples; its gradient is that
        of the whole step with regard to its outputs."""
        number, self._next = self._next, self._next + 1
        if len(self._micro_batches) == 1:
            outputs = self._task.outputs(models, batch)
            self._compute([outputs.detach()])
        else:
            if not self._states:
                self._compute(self._first_pass())
            set_random_state(self._states[number])
            outputs = self._task.outputs(models, batch)
        sequences, examples = self._slices[number]
        through = (outputs * self._gradient[sequences]).sum()
        value = self._losses[examples].sum()
        return Loss(
            through + (value - through.detach()),
            float(examples.stop - examples.start),
            {name: _sum_over(values, examples) for name, values in self._metrics.items()},
        )

    @torch.no_grad()
    def _first_pass(self) -> list[torch.Tensor]:
        """The outputs of every micro batch, and the random numbers that they drew."""
        outputs = []
        for batch in self._micro_batches:
            self._states.append(random_state())
            outputs.append(self._task.outputs(self._models, batch))
        return outputs

    def _compute(self, outputs: list[torch.Tensor]) -> None:
        """The losses and the gradient of the step of all ranks, in the order of its samples: by
        micro batch, then by rank. ``outputs``: of this rank, by micro batch; without a graph.
        Collective."""
        parts = [part_of(self._task, batch) for batch in self._micro_batches]
        by_rank = all_gather(parts, group=self._group)
        ordered = [part for parts_of_ranks in zip(*by_rank, strict=True) for part in parts_of_ranks]
        sizes = [[part.sequences for part in rank_parts] for rank_parts in by_rank]
        gathered = _gathered_outputs(torch.cat(outputs), [sum(counts) for counts in sizes])
        pieces = [rows.split(counts) for rows, counts in zip(gathered, sizes, strict=True)]
        step_outputs = torch.cat(
            [piece for of_ranks in zip(*pieces, strict=True) for piece in of_ranks]
        )
        sequences = _slices_of(part.sequences for part in ordered)
        examples = _slices_of(part.examples for part in ordered)
        columns = {name: [part.columns[name] for part in ordered] for name in parts[0].columns}
        columns[EXAMPLES] = [
            ids + span.start for ids, span in zip(columns[EXAMPLES], examples, strict=True)
        ]
        on_device = {
            name: to_device(torch.cat(x), step_outputs.device) for name, x in columns.items()
        }
        with torch.enable_grad():
            joint = self._task.joint_loss(step_outputs.requires_grad_(), on_device)
            (self._gradient,) = torch.autograd.grad(joint.losses.sum(), step_outputs)
        self._losses, self._metrics = joint.losses.detach(), joint.metrics
        pairs = list(zip(sequences, examples, strict=True))
        self._slices = pairs[torch.distributed.get_rank() :: len(by_rank)]


def _sum_over(
    values: torch.Tensor | tuple[torch.Tensor, torch.Tensor], examples: slice
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A metric of ``Loss``, of a metric of ``JointLoss``."""
    if isinstance(values, tuple):
        return values[0][examples].sum().detach(), values[1][examples].sum()
    return values[examples].sum().detach()


def _slices_of(sizes: Iterable[int]) -> list[slice]:
    """The places of parts of these sizes, one after the other."""
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def part_of(task: Task, batch: Batch) -> Part:
    """The columns of a micro batch by sequence and by example, in memory that can be pickled."""
    schema = Schema((*task.columns, *task.precomputed))
    names = [column.name for kind in ("sequence", "example") for column in schema.per(kind)]
    ids = batch[EXAMPLES]
    examples = int(ids[-1]) + 1 if len(ids) else 0
    columns = {name: batch[name].cpu().clone() for name in (EXAMPLES, *names)}
    return Part(len(ids), examples, columns)


def _gathered_outputs(outputs: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """The outputs of every rank. ``counts``: how many each rank has. Collective."""
    padded = outputs.new_zeros((max(counts), *outputs.shape[1:]))
    padded[: len(outputs)] = outputs
    by_rank = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(by_rank, padded)
    return [rank_outputs[:count] for rank_outputs, count in zip(by_rank, counts, strict=True)]
