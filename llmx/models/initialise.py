"""Weights from scratch that depend on the seed and the module's name, and on nothing else.

One random stream for the whole model makes a weight depend on the order and the place of all
draws before it, so ZeRO-3 (which draws on rank 0, module by module) and the other stages
differ. Here every module has its own stream. Tried by
``python -m pytest -m deepspeed tests/integration/test_train_models.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from llmx.models.parameters import whole, whole_shape


def module_seed(seed: int, name: str) -> int:
    """A 63-bit seed of one module, from the run's seed and its dotted name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, only: Container[str] | None = None) -> None:
    """Draw every weight with the model's own rules (``_init_weights``), module by module.

    Children before parents, as in Transformers, since a parent may redraw a child's weight
    (GPT-2 scales its residual projections). Drawn on the CPU whatever the device, so that a GPU
    has the weights that a CPU would: the layers at the same time, by threads, and under ZeRO-3
    shared out over the ranks. The most that is whole is the layers that are drawn together. The
    state of the global random generator is changed.

    Args:
        only: names of parameters and buffers; modules that have none of them of their own are
            left alone.
    """
    layers = [] if only is not None else _layers(model)
    for batch in _batches(layers):
        _draw_layers(batch, seed=seed)
    done = {id(layer) for _, layer, _ in layers}
    _initialise(model, name="", owner=model, seed=seed, only=only, done=done)


def _initialise(
    module: nn.Module,
    *,
    name: str,
    owner: Any,
    seed: int,
    only: Container[str] | None = None,
    done: Container[int] = (),
    in_place: bool = False,
) -> None:
    """``in_place``: the parameters are whole and on the CPU; else they are brought there here."""
    if id(module) in done:
        return
    if hasattr(module, "_init_weights"):
        owner = module  # a model inside a model knows its own rules
    for child_name, child in module.named_children():
        _initialise(
            child,
            name=f"{name}.{child_name}",
            owner=owner,
            seed=seed,
            only=only,
            done=done,
            in_place=in_place,
        )
    if only is not None and not any(
        f"{name}.{tensor_name}".lstrip(".") in only
        for tensor_name in (*module._parameters, *module._buffers)
    ):
        return
    if in_place:
        with _Seeded(module_seed(seed, name)):
            owner._init_weights(module)
        return
    touched = {id(p): p for p in module.parameters(recurse=False)}
    for child in module.children():
        touched.update({id(p): p for p in child.parameters(recurse=False)})
    parameters = list(touched.values())
    with whole(parameters, modified=True), _on_cpu(parameters):
        torch.manual_seed(module_seed(seed, name))
        owner._init_weights(module)


Layer = tuple[str, nn.Module, nn.Module]
"""Dotted name, module, and the model that knows its rules."""


def _layers(model: nn.Module) -> list[Layer]:
    """The members of the outermost lists of modules: drawn apart from each other, since no weight
    of one is in another or outside."""
    layers: list[Layer] = []

    def walk(module: nn.Module, name: str, owner: nn.Module) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        for child_name, child in module.named_children():
            place = f"{name}.{child_name}"
            if isinstance(module, nn.ModuleList):
                rules = child if hasattr(child, "_init_weights") else owner
                layers.append((place, child, rules))
            else:
                walk(child, place, owner)

    walk(model, "", model)
    inside: dict[int, int] = {}
    for _, layer, _ in layers:
        for parameter in layer.parameters():
            inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    members = {id(module) for _, layer, _ in layers for module in layer.modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in members
        for parameter in module.parameters(recurse=False)
    }
    shared = any(count > 1 for count in inside.values()) or outside & inside.keys()
    return [] if shared else layers


def _batches(layers: list[Layer]) -> Iterator[list[Layer]]:
    """Layers that are drawn together: one a thread and rank, within ``TOGETHER_BYTES``."""
    size = max((_num_bytes(layer) for _, layer, _ in layers), default=0)
    at_once = max(1, min(_num_threads(), TOGETHER_BYTES // max(size, 1)))
    sharded = any(hasattr(p, "ds_id") for _, layer, _ in layers for p in layer.parameters())
    if sharded:
        at_once *= torch.distributed.get_world_size()
    for start in range(0, len(layers), at_once):
        yield layers[start : start + at_once]


TOGETHER_BYTES = 4 * 2**30
"""The most bytes of layers that a rank holds whole on the host while they are drawn."""


def _num_bytes(layer: nn.Module) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in layer.parameters())


def _num_threads() -> int:
    """Threads of this rank: its share of the host's cores."""
    local_ranks = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def _draw_layers(layers: list[Layer], *, seed: int) -> None:
    """Draw ``layers`` at the same time and put them in place. Collective under ZeRO-3."""
    sharded = any(hasattr(p, "ds_id") for _, layer, _ in layers for p in layer.parameters())
    rank, world = 0, 1
    if sharded:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own_layers = [layer for number, layer in enumerate(layers) if number % world == rank]
    drawn: dict[int, torch.Tensor] = {}
    original_data: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        for _, layer, _ in own_layers:
            for parameter in layer.parameters():
                original_data.append((parameter, parameter.data))
                shape = whole_shape(parameter)
                parameter.data = torch.empty(shape, dtype=parameter.dtype, device="cpu")
                drawn[id(parameter)] = parameter.data

        def draw(layer_to_draw: Layer) -> None:
            name, layer, rules = layer_to_draw
            with torch.no_grad():
                _initialise(layer, name=name, owner=rules, seed=seed, in_place=True)

        if len(own_layers) == 1:
            draw(own_layers[0])
        else:
            with ThreadPoolExecutor(max_workers=max(1, len(own_layers))) as pool:
                list(pool.map(draw, own_layers))
    finally:
        for parameter, data in original_data:
            parameter.data = data
    for number, (_, layer, _) in enumerate(layers):
        for parameter in layer.parameters():
            # One at a time: the layer is whole already on the rank that drew it.
            with whole([parameter], modified=True, by=number % world):
                if id(parameter) in drawn:
                    parameter.data.copy_(drawn.pop(id(parameter)))


class _Seeded(TorchFunctionMode):
    """Inside, and in this thread alone, random numbers come from a generator of its own: the same
    numbers that the global one would give after ``torch.manual_seed``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # ``torch.nn.init`` comes by here as a whole, and takes a generator for what is inside.
        draws = getattr(func, "__name__", "") in RANDOM or "generator" in kwargs
        place = next(
            (x.device.type for x in (*args, *kwargs.values()) if torch.is_tensor(x)), "cpu"
        )
        if draws and kwargs.get("generator") is None and place == "cpu":
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


RANDOM = frozenset(
    "normal_ uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_ normal rand "
    "randn randint randperm bernoulli multinomial".split()
)
"""PyTorch's functions that draw; ``trunc_normal_`` and the like are made of these."""


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
