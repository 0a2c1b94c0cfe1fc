"""In which order the gradients of a network become ready.

DeepSpeed's stages 1 and 2 put gradients into buckets as they come, and add up the buckets of all
ranks: ranks whose order differs would add up different parameters, without a word. Where ranks
compute in different ways (activation checkpointing or attention by type of device), each tries its
network on a few tokens, and they compare.

``python -m pytest tests/unit/test_models_gradient_order.py``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def gradient_order(network: nn.Module, forward: Callable[[], Any]) -> list[str]:
    """Names of trained parameters in the order in which a backward pass completes their gradients.

    ``forward`` passes the network forward. Gradients are dropped one by one, so that it takes no
    memory for all of them. The network is as it was afterwards, but for random numbers drawn.
    """
    found: list[str] = []
    handles = []

    def record(name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            found.append(name)
            parameter.grad = None

        return hook

    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(record(name)))
    try:
        with torch.enable_grad():
            parts = [one.float().square().sum() for one in _differentiable(forward())]
            torch.stack(parts).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _differentiable(output: Any) -> list[torch.Tensor]:
    """What of an output a loss may see: logits or hidden states, an auxiliary loss."""
    values = output.values() if hasattr(output, "keys") else [output]
    found = [one for one in values if isinstance(one, torch.Tensor) and one.requires_grad]
    if not found:
        raise ValueError("its forward pass has no output with a gradient")
    return found
