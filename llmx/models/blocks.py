"""The blocks of a network: which they are, and the network with the first few of them alone.

Shown by ``python -m pytest tests/unit/test_models_blocks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from llmx.models.parameters import whole_shape


@dataclass(frozen=True)
class Stack:
    """The blocks of a network, one after the other."""

    owner: nn.Module
    """Whose attribute they are."""
    name: str
    blocks: nn.ModuleList
    least: int = 1
    """Those at the beginning that others are not like, and the first of the others: from there on
    each computes what the next one does."""

    def cut(self, count: int) -> None:
        """Leave the first ``count`` of all blocks in the network; ``restore`` puts the others
        back."""
        self.owner._modules[self.name] = self.blocks[:count]

    def restore(self) -> None:
        """The network as it was."""
        self.owner._modules[self.name] = self.blocks


def stack_of(network: nn.Module) -> Stack | None:
    """The blocks of a Transformers model, where it has one stack of them that share nothing and,
    but for the first few, compute alike; None where it is built otherwise."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [
        Stack(owner, name, child)
        for owner in network.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child) > 1
        and all(isinstance(block, GradientCheckpointingLayer) for block in child)
    ]
    if len(found) != 1:
        return None
    blocks = found[0].blocks
    own = [{id(one) for one in block.parameters()} for block in blocks]
    if len(set().union(*own)) < sum(map(len, own)):
        return None
    built = [_built(block) for block in blocks]
    least = len(blocks)
    while least > 1 and built[least - 2] == built[-1]:
        least -= 1
    return replace(found[0], least=least) if least < len(blocks) else None


def _built(block: nn.Module) -> list[Any]:
    """What decides how long a block computes: its modules, its parameters, and what its attention
    looks at."""
    modules = [
        (
            name,
            type(module),
            getattr(module, "attention_type", None),
            getattr(module, "sliding_window", None),
        )
        for name, module in block.named_modules()
    ]
    parameters = [
        (name, whole_shape(one), one.dtype, one.requires_grad)
        for name, one in block.named_parameters()
    ]
    return [modules, parameters]
