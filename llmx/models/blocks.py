"""The blocks of a network: which they are, and the network with the first few of them alone.

Also how they are computed: ``torch.compile``, and activation checkpointing, which computes again in
the backward pass what was not kept.

Shown by ``python -m pytest tests/unit/test_models_blocks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from llmx.models.parameters import whole_shape
from llmx.models.varlen import SEGMENTS, segments_forward


@dataclass(frozen=True)
class Stack:
    """The blocks of a network, one after the other."""

    owner: nn.Module
    """The module that has the blocks as an attribute."""
    name: str
    blocks: nn.ModuleList
    least: int = 1
    """The number of blocks up to the first that computes as all later ones do: the first few may
    differ."""

    def cut(self, count: int) -> None:
        """Leave the first ``count`` of all blocks in the network, however many are left."""
        self.owner._modules[self.name] = self.blocks[:count]


def stack_of(network: nn.Module) -> Stack | None:
    """The blocks of a Transformers model, where it has one stack of them that share nothing and,
    but for the first few, compute alike; None where it is built otherwise."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks = [
        Stack(owner, name, child)
        for owner in network.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child) > 1
        and all(isinstance(block, GradientCheckpointingLayer) for block in child)
    ]
    if len(stacks) != 1:
        return None
    blocks = stacks[0].blocks
    parameter_ids = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    if len(set().union(*parameter_ids)) < sum(map(len, parameter_ids)):
        return None
    built = [_built(block) for block in blocks]
    least = len(blocks)
    while least > 1 and built[least - 2] == built[-1]:
        least -= 1
    return replace(stacks[0], least=least) if least < len(blocks) else None


def _built(block: nn.Module) -> list[Any]:
    """Everything that decides how long a block computes: its modules, its parameters, and the
    windows of its attention."""
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
        (name, whole_shape(parameter), parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    ]
    return [modules, parameters]


KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
"""Operators whose results are kept: nearly all of a block's time. What is left to compute again
(norms, rotations, activation functions, additions) only moves memory."""
KEPT_NAMES = ("flash_attn", "varlen_attn", "flex_attention")
"""Names of such operators that packages register, or that exist only while a model runs."""


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operator in KEPT or any(name in str(operator) for name in KEPT_NAMES):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """``torch.compile`` the blocks of a Transformers model, each by itself: they are alike, so one
    is compiled. ``options`` are those of ``torch.compile``.

    Lengths and numbers of rows differ from batch to batch: after two or three of them a block is
    compiled for any. Attention row by row is left as it is, or its loop would be compiled anew for
    each number of rows, and given up after eight.

    The forward pass of the whole stays Python, with DeepSpeed's hooks in it. A block's activation
    checkpointing is compiled with it, so that the compiler knows what is to be kept.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    as_it_is: Any = torch.compiler.disable(segments_forward)
    ALL_ATTENTION_FUNCTIONS.register(SEGMENTS, as_it_is)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(**options)


def recompute(model: nn.Module, kind: str, **options: Any) -> None:
    """Switch on activation checkpointing of a Transformers model's blocks.

    Args:
        kind: ``full`` keeps a block's input only, ``selective`` also what ``KEPT`` names.
        options: further ones of ``torch.utils.checkpoint.checkpoint``.
    """
    arguments: dict[str, Any] = {"use_reentrant": False, **options}
    if kind == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    network: Any = model
    network.activation_checkpointing_enable(arguments)
