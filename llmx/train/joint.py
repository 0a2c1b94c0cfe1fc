"""Losses in which the examples of a step depend on each other (``Task.joint``): contrastive ones.

The loss is that of all examples of the step together, however they are split over ranks and micro
batches. Every rank gets the outputs of all sequences, computes the loss, and passes the gradient
with regard to its own outputs through its network. With several micro batches a first pass without
a graph computes the outputs, and a second one, with the same random numbers, passes the gradients
(GradCache, Gao et al. 2021, arXiv 2101.06983): a third more computation, and the memory of one
micro batch. Tried by ``python -m pytest tests/unit/test_train_joint.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmx.collectives import all_gather
from llmx.data.examples import Schema
from llmx.errors import ConfigError
from llmx.models.model import Batch, Models
from llmx.tasks import JointLoss, Loss, Task
from llmx.train.batches import Step
from llmx.train.step import LossOf, RandomState, random_state, set_random_state

EXAMPLES = "example_ids"


def loss_of_step(task: Task, models: Models, step: Step, *, group: Any = None) -> LossOf:
    """The loss of each micro batch of ``step``, to be asked for in their order.

    ``group``: a gloo group of all ranks. Objects in NCCL make the host wait for the GPU.
    """
    return JointStep(task, models, step.micro_batches, group=group) if task.joint else task.loss


@dataclass(frozen=True)
class Part:
    """What a micro batch of a rank has beside its outputs."""

    sequences: int
    examples: int
    columns: Mapping[str, torch.Tensor]
    """With ``example_ids``, which count from 0 in each part."""


@dataclass(frozen=True)
class Whole:
    """A step, as every rank sees it."""

    outputs: torch.Tensor
    """[sequences, ...], a leaf."""
    columns: Mapping[str, torch.Tensor]
    sequences: list[slice]
    """Of this rank, by micro batch."""
    examples: list[slice]


class JointStep:
    """The losses of one step. Collective: the first call, on all ranks."""

    def __init__(
        self, task: Task, models: Models, micro_batches: tuple[Batch, ...], *, group: Any = None
    ) -> None:
        if task.normaliser != "examples":
            raise ConfigError(
                f"task={task.name} has a joint loss, but its normaliser is {task.normaliser!r}: a "
                'joint loss is a mean over examples. Set normaliser = "examples".'
            )
        self._task, self._models, self._group = task, models, group
        self._micro_batches = micro_batches
        self._states: list[RandomState] = []
        self._whole: Whole | None = None
        self._found: JointLoss | None = None
        self._gradient: torch.Tensor | None = None
        self._next = 0

    def __call__(self, models: Models, batch: Batch) -> Loss:
        """Of the next micro batch. Its value is that of its examples; its gradient is that of the
        whole step with regard to its outputs."""
        number, self._next = self._next, self._next + 1
        if len(self._micro_batches) == 1:
            own = self._task.outputs(models, batch)
            self._compute([own.detach()])
        else:
            if self._whole is None:
                self._compute(self._first_pass())
            set_random_state(self._states[number])
            own = self._task.outputs(models, batch)
        whole, found, gradient = self._whole, self._found, self._gradient
        assert whole is not None
        assert found is not None
        assert gradient is not None
        through = (own * gradient[whole.sequences[number]]).sum()
        examples = whole.examples[number]
        value = found.losses[examples].sum()
        return Loss(
            through + (value - through.detach()),
            float(examples.stop - examples.start),
            {name: _sum_over(values, examples) for name, values in found.metrics.items()},
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
        parts = [part_of(self._task, batch) for batch in self._micro_batches]
        whole = gathered(outputs, parts, group=self._group)
        with torch.enable_grad():
            found = self._task.joint_loss(whole.outputs, whole.columns)
            (self._gradient,) = torch.autograd.grad(found.losses.sum(), whole.outputs)
        self._whole = whole
        self._found = JointLoss(found.losses.detach(), found.metrics)


def _sum_over(
    values: torch.Tensor | tuple[torch.Tensor, torch.Tensor], examples: slice
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A metric of ``Loss``, of a metric of ``JointLoss``."""
    if isinstance(values, tuple):
        return values[0][examples].sum().detach(), values[1][examples].sum()
    return values[examples].sum().detach()


def part_of(task: Task, batch: Batch) -> Part:
    """The columns of a micro batch by sequence and by example."""
    schema = Schema((*task.columns, *task.precomputed))
    names = [column.name for kind in ("sequence", "example") for column in schema.per(kind)]
    ids = batch[EXAMPLES]
    examples = int(ids[-1]) + 1 if len(ids) else 0
    return Part(len(ids), examples, {EXAMPLES: ids, **{name: batch[name] for name in names}})


def gathered(outputs: list[torch.Tensor], parts: list[Part], *, group: Any = None) -> Whole:
    """The step of all ranks, in the order of its samples: by micro batch, then by rank. Collective.

    Args:
        outputs: of this rank, by micro batch; without a graph.
    """
    rank = torch.distributed.get_rank()
    everyone = all_gather([_on_host(part) for part in parts], group=group)
    by_rank = _gathered_outputs(torch.cat(outputs), [_count(each) for each in everyone])
    places = [0] * len(everyone)
    found: list[torch.Tensor] = []
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in parts[0].columns}
    own_sequences, own_examples = [], []
    sequences = examples = 0
    for number in range(len(parts)):
        for other, theirs in enumerate(everyone):
            part = theirs[number]
            stop = places[other] + part.sequences
            found.append(by_rank[other][places[other] : stop])
            places[other] = stop
            for name, values in part.columns.items():
                columns[name].append(values + examples if name == EXAMPLES else values)
            if other == rank:
                own_sequences.append(slice(sequences, sequences + part.sequences))
                own_examples.append(slice(examples, examples + part.examples))
            sequences += part.sequences
            examples += part.examples
    device = outputs[0].device
    return Whole(
        torch.cat(found).requires_grad_(),
        {name: _moved(torch.cat(values), device) for name, values in columns.items()},
        own_sequences,
        own_examples,
    )


def _moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without a wait of the host."""
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def _on_host(part: Part) -> Part:
    """Plain memory, whatever it was: it is pickled."""
    return Part(
        part.sequences,
        part.examples,
        {name: values.cpu().clone() for name, values in part.columns.items()},
    )


def _count(parts: list[Part]) -> int:
    return sum(part.sequences for part in parts)


def _gathered_outputs(own: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """The outputs of every rank, of which there are so many."""
    most = max(counts)
    padded = own.new_zeros((most, *own.shape[1:]))
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(everyone, padded)
    return [each[:count] for each, count in zip(everyone, counts, strict=True)]
