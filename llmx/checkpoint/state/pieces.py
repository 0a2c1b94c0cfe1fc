"""What a rank holds of a model's state: tensors of the optimizer, and pieces of parameters in them.

Live memory, or DeepSpeed's swap files; named as in ``module.named_parameters()``. Made by
``llmx.checkpoint.state.layout``. Tried by
``python -m pytest tests/unit/test_train_state_values.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from llmx.checkpoint.fragments import MASTER
from llmx.checkpoint.state.swap import SwappedGroup
from llmx.errors import ConfigError


@dataclass(frozen=True)
class Owner:
    """A tensor that the optimizer updates: one parameter, or many in a flat buffer."""

    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer
    """The one with this tensor's states."""
    swap: SwappedGroup | None = None
    """Where its values lie while the optimizer is not at work, if not in memory."""

    def values(self) -> dict[str, torch.Tensor]:
        """``master`` and what the optimizer keeps for each element, each flat. Live memory.

        Raises ConfigError for a state that is neither one value an element nor a number
        (``check_states`` says so before training).
        """
        if self.swap is not None:
            return self.swap.mapped()
        kept = self.optimizer.state.get(self.tensor, {})
        if wrong := states_of_another_shape(kept, self.tensor):
            raise wrong_states(self.optimizer, wrong)
        states = {
            key: value.detach().view(-1)
            for key, value in kept.items()
            if torch.is_tensor(value) and not is_scalar(key, value)
        }
        return {MASTER: self.tensor.detach().view(-1), **states}


def states_of_another_shape(states: dict[str, Any], tensor: torch.Tensor) -> dict[str, list[int]]:
    """Name -> shape of the states of ``tensor`` that are neither of its shape nor a number."""
    return {
        key: list(value.shape)
        for key, value in states.items()
        if torch.is_tensor(value) and not is_scalar(key, value) and value.shape != tensor.shape
    }


def wrong_states(optimizer: torch.optim.Optimizer, wrong: dict[str, list[int]]) -> ConfigError:
    """Of an optimizer whose states cannot be cut and put together again."""
    found = ", ".join(f"{key} of shape {shape}" for key, shape in wrong.items())
    return ConfigError(
        f"{type(optimizer).__name__} keeps states that are not one value for each element of a "
        f"parameter ({found}). ZeRO cuts parameters into flat parts and checkpoints follow it, so "
        "such states would be lost. Set optim.kind=adamw."
    )


def is_scalar(key: str, value: Any) -> bool:
    """A number, or a tensor of one number as torch keeps its step counts."""
    if torch.is_tensor(value):
        return value.dim() == 0 and (key == "step" or not value.is_floating_point())
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, start + length)`` of one trained parameter that lie on this rank."""

    name: str
    start: int
    length: int
    owner: Owner
    offset: int
    """Where they begin in the flattened owner."""

    def part(self, first: int, last: int) -> Piece:
        """Elements ``[first, last)`` of this piece."""
        return replace(
            self, start=self.start + first, length=last - first, offset=self.offset + first
        )

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements of the flattened owner, or of one of its states."""
        return flat[self.offset : self.offset + self.length]


@dataclass(frozen=True)
class Fixed:
    """Elements ``[start, start + length)`` of what is not trained: a parameter or a buffer."""

    name: str
    start: int
    values: torch.Tensor
    """A 1-D view of live memory."""

    @property
    def length(self) -> int:
        return len(self.values)

    def part(self, first: int, last: int) -> Fixed:
        """Elements ``[first, last)`` of it."""
        return Fixed(self.name, self.start + first, self.values[first:last])
