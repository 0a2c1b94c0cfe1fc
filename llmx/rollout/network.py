"""The policy as it goes to a rollout server: a description, what is not trained, what is trained.

The server builds the network from the description alone, so a rollout host needs neither the
model's files nor its tokenizer. Parameters and buffers keep their dtype: on the same kind of device
the server computes the same bits as a rank.
Shown by ``python -m pytest tests/unit/test_rollout_server.py``.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from llmx.models.adapter import inject_described
from llmx.models.attention import AttentionMethod
from llmx.models.experts import accept_masks
from llmx.models.generate import Decoder
from llmx.models.isolation import turn_dropout_off
from llmx.models.model import Model, auto_class, head_of
from llmx.models.network_config import config_from, plain_values
from llmx.models.parameters import in_parts, whole, whole_bytes

GATHER_BYTES = 1 << 30
"""Weights that ZeRO-3 gathers at the same time."""


def describe(model: Model) -> dict[str, Any]:
    """All that ``build`` and vLLM need, as JSON takes it."""
    names: dict[nn.Parameter, str] = {}
    tied = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        if names.setdefault(parameter, name) != name:
            tied[name] = names[parameter]
    return {
        "config": plain_values(model.config),
        "architecture": type(model.module).__name__,
        "buffers": sorted(
            {name for name, _ in model.module.named_buffers()} - model.module.state_dict().keys()
        ),
        "tied": tied,
        "vocab_size": model.vocab_size,
        "attention": dataclasses.asdict(model.attention),
        "dtype": str(model.dtype).removeprefix("torch."),
        "adapter": None if model.adapter is None else model.adapter.description,
    }


def gather(model: Model, *, trained: bool, keep: bool) -> dict[str, torch.Tensor]:
    """The parameters that are trained, or the others and all buffers: whole, on the CPU, copied.
    Empty unless ``keep``. Collective under ZeRO-3."""
    tensors: dict[str, torch.Tensor] = {}
    if keep and not trained:
        tensors = {name: _copy(buffer) for name, buffer in model.module.named_buffers()}
    parameters = [
        (name, parameter)
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad is trained
    ]
    for part in in_parts(parameters, lambda pair: whole_bytes(pair[1]), limit=GATHER_BYTES):
        with torch.no_grad(), whole([parameter for _, parameter in part]):
            if keep:
                tensors.update((name, _copy(parameter)) for name, parameter in part)
    return tensors


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def pack(tensors: dict[str, torch.Tensor], description: dict[str, Any] | None = None) -> bytes:
    """The body of ``PUT /model`` (with ``description``) or ``PUT /weights/N``."""
    metadata = None if description is None else {"description": json.dumps(description)}
    body: bytes = safetensors.torch.save(tensors, metadata=metadata)
    return body


def unpack(body: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a body, and the description in it (empty where it has none)."""
    size = int.from_bytes(body[:8], "little")
    metadata = json.loads(body[8 : 8 + size]).get("__metadata__") or {}
    return safetensors.torch.load(body), json.loads(metadata.get("description", "{}"))


def build(description: dict[str, Any], device: torch.device) -> Decoder:
    """The network of a description, its weights undefined."""
    from transformers.initialization import no_init_weights

    config = config_from(description["config"])
    attention = AttentionMethod(**description["attention"])
    if attention.implementation.startswith("llmx_"):  # knows packed lines, and no cache
        attention = dataclasses.replace(attention, implementation="sdpa")
    dtype = getattr(torch, description["dtype"])
    with device, no_init_weights():
        network = auto_class(head_of(config), config).from_config(
            config, dtype=dtype, attn_implementation=attention.implementation
        )
    network.tie_weights()
    accept_masks(network)
    if description["adapter"] is not None:
        inject_described(network, description["adapter"])
        network.to(device)
    turn_dropout_off(network)
    return Decoder(
        module=network.eval().requires_grad_(False),
        config=config,
        vocab_size=description["vocab_size"],
        attention=attention,
        dtype=dtype,
        device=device,
    )


@torch.no_grad()
def fill(network: nn.Module, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Put tensors into the parameters and buffers of their names, in the dtype that they have.
    Returns the names.

    Raises:
        ValueError: a name or a shape is not that of the network.
    """
    places: dict[str, torch.Tensor] = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None or place.shape != tensor.shape:
            shape = None if place is None else tuple(place.shape)
            raise ValueError(f"{name} is {tuple(tensor.shape)} there and {shape} in the network")
    for name, tensor in tensors.items():
        place = places[name]
        if place.dtype == tensor.dtype:
            place.copy_(tensor)
        else:
            place.data = tensor.to(place.device)
    return set(tensors)
