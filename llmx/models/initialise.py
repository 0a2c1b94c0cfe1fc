"""Weights from scratch that depend on the seed and the module's name, and on nothing else.

One random stream for the whole model makes a weight depend on the order and the place of all
draws before it, so ZeRO-3 (which draws on rank 0, module by module) and the other stages
differ. Here every module has its own stream. Tried by
``python -m pytest -m deepspeed tests/integration/test_train_models.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from llmx.models.parameters import whole


def module_seed(seed: int, name: str) -> int:
    """A 63-bit seed of one module, from the run's seed and its dotted name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, only: Container[str] | None = None) -> None:
    """Draw every weight with the model's own rules (``_init_weights``), module by module.

    Children before parents, as in Transformers, since a parent may redraw a child's weight
    (GPT-2 scales its residual projections). Drawn on the CPU whatever the device, so that a GPU
    has the weights that a CPU would; one module is whole at a time. The state of the global random
    generator is changed.

    Args:
        only: names of parameters and buffers; modules that have none of them of their own are
            left alone.
    """
    _initialise(model, name="", owner=model, seed=seed, only=only)


def _initialise(
    module: nn.Module, *, name: str, owner: Any, seed: int, only: Container[str] | None
) -> None:
    """``owner``: the model whose rules the module is drawn with."""
    if hasattr(module, "_init_weights"):
        owner = module  # a model inside a model knows its own rules
    for child_name, child in module.named_children():
        _initialise(child, name=f"{name}.{child_name}", owner=owner, seed=seed, only=only)
    if only is not None and not any(
        f"{name}.{tensor_name}".lstrip(".") in only
        for tensor_name in (*module._parameters, *module._buffers)
    ):
        return
    touched = {
        id(p): p for part in (module, *module.children()) for p in part.parameters(recurse=False)
    }
    parameters = list(touched.values())
    with whole(parameters, modified=True), _on_cpu(parameters):
        torch.manual_seed(module_seed(seed, name))
        owner._init_weights(module)


@contextlib.contextmanager
def _on_cpu(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters that lie on a GPU lie on the CPU."""
    moved = [(p, p.data) for p in parameters if p.device.type != "cpu"]
    for parameter, data in moved:
        parameter.data = data.cpu()
    try:
        yield
    finally:
        for parameter, data in moved:
            data.copy_(parameter.data)
            parameter.data = data
