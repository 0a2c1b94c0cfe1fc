"""Parameters and buffers of a network, whole or sharded by ZeRO-3."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from llmx.config.model_rules import LANGUAGE_SECTION
from llmx.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

GATHER_BYTES = 256 * 2**20
"""Parameters gathered together under ZeRO-3: few collectives, bounded memory."""


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Also of one that ZeRO-3 has sharded."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def whole_bytes(parameter: torch.Tensor) -> int:
    """Bytes of a parameter, also of one that ZeRO-3 has sharded."""
    return math.prod(whole_shape(parameter)) * parameter.element_size()


def in_parts(
    items: Iterable[T], num_bytes: Callable[[T], int], *, limit: int = GATHER_BYTES
) -> Iterator[list[T]]:
    """The items, in lists of ``limit`` bytes or a little more: what is gathered together."""
    part: list[T] = []
    size = 0
    for item in items:
        part.append(item)
        size += num_bytes(item)
        if size >= limit:
            yield part
            part, size = [], 0
    if part:
        yield part


def vocabulary_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters that have a row for each token: the embedding, and the head."""
    inputs: nn.Module | None = cast("PreTrainedModel", model).get_input_embeddings()
    return {
        id(parameter)
        for module in (inputs, output_embedding(model))
        if module is not None
        for parameter in module.parameters(recurse=False)
    }


def is_multimodal(config: Any) -> bool:
    """Whether a Hugging Face config has a language model beside others, which see or hear."""
    return LANGUAGE_SECTION in getattr(config, "sub_configs", {})


def tower_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of a multi-modal model that are not of its language model. They are
    frozen: no text reaches them."""
    network = cast("PreTrainedModel", model)
    if not is_multimodal(getattr(network, "config", None)):
        return set()
    parts = (network.get_decoder(), output_embedding(model))
    language = {id(p) for part in parts if part is not None for p in part.parameters()}
    return {name for name, p in model.named_parameters() if id(p) not in language}


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


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The head of a model of Transformers that gives the logits; None where it has none."""
    head: nn.Module | None = cast("PreTrainedModel", model).get_output_embeddings()
    return head


def matching_parameters(key: str, pattern: str, names: list[str], noun: str) -> list[str]:
    """The ``names`` that ``pattern``, a value of ``key``, matches.

    Raises:
        ConfigError: there is none.
    """
    if matches := [name for name in names if fnmatchcase(name, pattern)]:
        return matches
    hint = did_you_mean(pattern.strip("*.")[:100], names)
    examples = [*names[:3], "...", *names[-2:]] if len(names) > 6 else names
    raise ConfigError(
        f"{key}: {pattern} matches none of the {len(names)} {noun}: {', '.join(examples)}.{hint} A "
        "star stands for any characters, as in '*.embed_tokens.*'."
    )


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint holds, by dotted name."""
    for module_name, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield (f"{module_name}.{name}" if module_name else name), buffer
