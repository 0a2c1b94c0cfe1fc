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

import torch
from torch import nn


def module_seed(seed: int, name: str) -> int:
    """A 63-bit seed of one module, from the run's seed and its dotted name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, only: Container[str] | None = None) -> None:
    """Draw every weight with the model's own rules (``_init_weights``), module by module.

    Children before parents, as in Transformers, since a parent may redraw a child's weight
    (GPT-2 scales its residual projections). Every rank draws the same values; under ZeRO-3
    only the module's own parameters and its children's are ever whole. The state of the
    global random generator is changed.

    Args:
        only: names of parameters and buffers; modules that have none of them of their own are
            left alone.
    """
    _initialise(model, name="", owner=model, seed=seed, only=only)


def _initialise(
    module: nn.Module, *, name: str, owner: nn.Module, seed: int, only: Container[str] | None
) -> None:
    if hasattr(module, "_init_weights"):
        owner = module  # a model inside a model knows its own rules
    for child_name, child in module.named_children():
        _initialise(child, name=f"{name}.{child_name}", owner=owner, seed=seed, only=only)
    if only is not None and not any(
        f"{name}.{own}".lstrip(".") in only for own in (*module._parameters, *module._buffers)
    ):
        return
    touched = {id(p): p for p in module.parameters(recurse=False)}
    for child in module.children():
        touched.update({id(p): p for p in child.parameters(recurse=False)})
    with whole(list(touched.values()), modified=True):
        torch.manual_seed(module_seed(seed, name))
        owner._init_weights(module)


@contextlib.contextmanager
def whole(parameters: list[nn.Parameter], *, modified: bool = False) -> Iterator[None]:
    """Inside, the parameters are whole on every rank, also under ZeRO-3.

    Args:
        modified: write back what rank 0 changed (it is broadcast). Collective under ZeRO-3.
    """
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modified else None):
        yield
