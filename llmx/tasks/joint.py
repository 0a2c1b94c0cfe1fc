"""Tasks in which the loss of an example depends on the others of its step (contrastive ones)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmx.tasks.base import Gathered, Measures, Normaliser, Task

if TYPE_CHECKING:
    import torch

    from llmx.models.model import Batch, Models

EXAMPLES = "example_ids"


@dataclass(frozen=True)
class JointLoss:
    """The losses of all examples of a step, which depend on each other. Arrays are [examples]."""

    losses: torch.Tensor
    """fp32, with a graph."""
    metrics: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    """Values of each example, written as means over a step; or (sums, weights)."""


class JointTask(Task):
    """``outputs`` and ``joint_loss`` take the place of ``loss``, a mean over examples."""

    normaliser: Normaliser = "examples"

    def outputs(self, models: Models, batch: Batch) -> torch.Tensor:
        """Values of each sequence that the loss needs, fp32 [sequences, ...] with a
        graph. Called on every rank equally often; [0, ...] with a graph for a micro batch without
        a sequence."""
        raise NotImplementedError(f"{type(self).__name__}.outputs")

    def joint_loss(self, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> JointLoss:
        """The losses of all examples of a step, over all ranks and micro batches. A function of
        its arguments alone: every rank computes it.

        Args:
            outputs: of all sequences of the step, in its order.
            columns: ``example_ids`` int64 [sequences], the example of each, from 0; and the
                columns by sequence and by example.
        """
        raise NotImplementedError(f"{type(self).__name__}.joint_loss")

    def measured(
        self, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> dict[str, float | None]:
        """Measures of all held-out examples together: by default the means of
        ``joint_loss`` over them."""
        joint = self.joint_loss(outputs, columns)
        values: dict[str, float | None] = {"loss": float(joint.losses.double().mean())}
        for name, value in joint.metrics.items():
            sums, weights = (
                value if isinstance(value, tuple) else (value, value.new_ones(len(value)))
            )
            weight = float(weights.sum())
            values[name] = float(sums.double().sum()) / weight if weight else None
        return {**values, "weight": float(len(joint.losses))}

    def evaluate(self, models: Models, batches: Iterable[Batch]) -> Measures:
        """``measured`` over all ranks."""
        columns = [column.name for column in self.columns if column.per != "token"]
        names = [name for name, metric in self.metrics.items() if "eval" in metric.kinds]
        held_out = HeldOut(columns, self.measured, names=("loss", *names))
        for batch in batches:
            held_out.add_batch(self.outputs(models, batch), batch)
        return {"held_out": held_out}


@dataclass
class HeldOut(Gathered):
    """The ``outputs`` of held-out sequences with their columns, to be measured together."""

    columns: Sequence[str]
    measured: Callable[..., dict[str, float | None]]
    names: Sequence[str] = ()
    """Those that ``measured`` has, for an evaluation without a sequence."""

    def add_batch(self, outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> None:
        """Add the sequences of a micro batch."""
        if len(outputs):
            columns = (batch[name].numpy().copy() for name in self.columns)
            sizes = batch[EXAMPLES].bincount().numpy()
            self.add(outputs.detach().float().cpu().numpy(), sizes, *columns)

    def values(self) -> dict[str, float | None]:
        """The measures of all of them."""
        import torch

        if not self._parts:
            return dict.fromkeys(self.names)
        outputs, sizes, *columns = map(torch.from_numpy, self.arrays())
        by_name = dict(zip(self.columns, columns, strict=True))
        by_name[EXAMPLES] = torch.arange(len(sizes)).repeat_interleave(sizes)
        with torch.no_grad():
            return self.measured(outputs, by_name)
