"""Tasks in which the loss of an example depends on the others of its step (contrastive ones)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmx.tasks.base import Accumulator, Mean, Normaliser, Task

if TYPE_CHECKING:
    import numpy as np
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

    def evaluate(
        self, models: Models, batches: Iterable[Batch]
    ) -> Mapping[str, Mean | Accumulator]:
        """``measured`` over all ranks."""
        columns = [column.name for column in self.columns if column.per != "token"]
        names = [name for name, metric in self.metrics.items() if "eval" in metric.kinds]
        held_out = HeldOut(columns, self.measured, names=("loss", *names))
        for batch in batches:
            held_out.add(self.outputs(models, batch), batch)
        return {"held_out": held_out}


class HeldOut(Accumulator):
    """The ``outputs`` of held-out sequences with their columns, to be measured together."""

    def __init__(
        self,
        columns: Iterable[str],
        measured: Callable[..., dict[str, float | None]],
        *,
        names: Sequence[str] = (),
    ) -> None:
        """``names``: those that ``measured`` has, for an evaluation without a sequence."""
        self._measured, self._names = measured, names
        self._outputs: list[np.ndarray] = []
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in columns}
        self._sizes: list[np.ndarray] = []
        """Sequences of each example, by micro batch."""

    def __getstate__(self) -> dict[str, Any]:
        """The arrays alone, which another rank takes in."""
        return {name: vars(self)[name] for name in ("_outputs", "_columns", "_sizes")}

    def add(self, outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> None:
        """Add the sequences of a micro batch."""
        if len(outputs):
            self._outputs.append(outputs.detach().float().cpu().numpy())
            self._sizes.append(batch[EXAMPLES].bincount().numpy())
            for name, arrays in self._columns.items():
                arrays.append(batch[name].numpy().copy())

    def merge(self, other: HeldOut) -> None:
        self._outputs += other._outputs
        self._sizes += other._sizes
        for name, arrays in self._columns.items():
            arrays += other._columns[name]

    def values(self) -> dict[str, float | None]:
        """The measures of all of them."""
        import numpy as np
        import torch

        if not self._outputs:
            return dict.fromkeys(self._names)
        sizes = np.concatenate(self._sizes)
        columns = {
            EXAMPLES: torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)),
            **{n: torch.from_numpy(np.concatenate(x)) for n, x in self._columns.items()},
        }
        with torch.no_grad():
            return self._measured(torch.from_numpy(np.concatenate(self._outputs)), columns)
