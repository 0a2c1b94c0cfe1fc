"""Floating point operations that training a model needs: the numerator of MFU.

Counted from the modules that are there: what multiplies, and how often for a token. Held against
``torch.utils.flop_counter`` by ``python -m pytest tests/unit/test_train_flops.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from llmx.models.parameters import output_embedding, whole_shape
from llmx.models.quantized import QuantizedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelFlops:
    """Sizes of a model from which a step's operations follow."""

    matrices: float
    """Elements of the weights that a token is multiplied with, without the head: of the experts
    only those that a token goes through; no embeddings, which are look-ups; no pooler and no
    classification head, which multiply one vector of a sequence, a thousandth of the whole."""
    head: int
    """Elements of the output embedding, which is computed at target positions only."""
    attention: tuple[tuple[float, int | None], ...]
    """Width of each layer with attention, heads x head_dim (the mean of keys' and values'), and its
    window in tokens; None without a window."""
    causal: bool = True
    """A token sees those before it; else all of its row."""
    frozen_matrices: float = 0.0
    """The part of ``matrices`` that is frozen while others are trained: it gets no gradient."""
    frozen_head: int = 0

    def of_step(self, *, tokens: int, target_tokens: int, square_tokens: float) -> float:
        """Forward and backward of one step, recomputed activations not counted.

        6 for each weight and token, 4 where it is frozen; for attention 6 x heads x head_dim x n^2
        a row of n tokens in each layer, the causal half; twice that where attention is not causal.

        Args:
            tokens: without padding.
            square_tokens: sum of n^2 over the rows.
        """
        attended = sum(
            # Each token of a window looks at most so far back.
            width * (square_tokens if window is None else min(square_tokens, 2 * window * tokens))
            for width, window in self.attention
        ) * (1 if self.causal else 2)
        frozen = self.frozen_matrices * tokens + self.frozen_head * target_tokens
        return 6.0 * (self.matrices * tokens + self.head * target_tokens + attended) - 2.0 * frozen


def model_flops(model: nn.Module, *, causal: bool = True) -> ModelFlops:
    """The sizes of a language model or another network, sharded or not."""
    in_part = any(parameter.requires_grad for parameter in model.parameters())
    config = cast("PreTrainedModel", model).config.get_text_config()
    head = output_embedding(model)
    # A tied matrix multiplies as the head.
    head_matrices = [p for p in head.parameters() if p.dim() > 1] if head else []
    modules = list(_text_modules(model))
    looked_up = {
        id(parameter)
        for module in modules
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    active = _active_part(model, config)
    matrices, frozen = 0.0, 0.0
    counted = looked_up | {id(p) for p in head_matrices}
    counted |= _of_whole_sequences(model, has_head=head is not None)
    for module in modules:
        if isinstance(module, QuantizedLinear):  # its weight is no parameter, and frozen
            matrices, frozen = matrices + module.num_weights, frozen + module.num_weights
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in counted and len(whole_shape(parameter)) > 1:
                elements = math.prod(whole_shape(parameter)) * active.get(id(parameter), 1.0)
                matrices += elements
                frozen += 0.0 if parameter.requires_grad or not in_part else elements
                counted.add(id(parameter))
    return ModelFlops(
        matrices=matrices,
        head=sum(math.prod(whole_shape(p)) for p in head_matrices),
        attention=_attention(config),
        causal=causal,
        frozen_matrices=frozen,
        frozen_head=sum(
            math.prod(whole_shape(p)) for p in head_matrices if in_part and not p.requires_grad
        ),
    )


def _text_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules without the towers that see and hear, which do nothing for a text."""
    yield model
    for child in model.children():
        if getattr(child, "main_input_name", "input_ids") == "input_ids":
            yield from _text_modules(child)


def _of_whole_sequences(model: nn.Module, *, has_head: bool) -> set[int]:
    """The parameters of a pooler, and of a head that is none over the vocabulary."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    pools = not has_head and prefix and hasattr(model, prefix)
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if "pooler" in name.split(".") or (pools and not name.startswith(f"{prefix}."))
    }


def _active_part(model: nn.Module, config: Any) -> dict[int, float]:
    """Id of each weight of an expert -> the fraction of tokens that are multiplied with it."""
    parts: dict[int, float] = {}
    named = [getattr(config, name, None) for name in EXPERTS_PER_TOKEN]
    chosen = next((value for value in named if isinstance(value, int)), None)
    if chosen is None:
        return parts
    for name, module in model.named_modules():
        if not (name.endswith("experts") or type(module).__name__.endswith("Experts")):
            continue
        parameters = list(module.parameters())
        experts = next(
            (whole_shape(p)[0] for p in parameters if len(whole_shape(p)) == 3),
            getattr(module, "num_experts", None),
        )
        if isinstance(module, nn.ModuleList):
            experts = len(module)
        if experts:
            parts.update((id(p), min(1.0, chosen / experts)) for p in parameters)
    return parts


EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
)
"""Names under which configs of transformers have it."""


def _attention(config: Any) -> tuple[tuple[float, int | None], ...]:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not heads:
        return ()  # state-space models
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        kinds = ["full_attention"] * int(config.num_hidden_layers)
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            kinds = ["sliding_attention"] * len(kinds)
    layers = []
    for number, kind in enumerate(kinds):
        if "linear" in kind or ("attention" not in kind and kind != "hybrid"):
            continue
        window = None
        if "sliding" in kind:
            window = getattr(config, "sliding_window", None)
        elif "chunked" in kind:
            window = getattr(config, "attention_chunk_size", None)
        by_layer = getattr(config, "per_layer_config", None)
        layers.append((_attention_width(by_layer[number] if by_layer else config), window))
    return tuple(layers)


def _attention_width(config: Any) -> float:
    """Heads x head_dim, the mean of the width of keys and of values."""
    heads = int(config.num_attention_heads)
    nope, rope = (getattr(config, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    if nope and rope:  # multi-head latent attention
        value = getattr(config, "v_head_dim", None) or nope
        return float(heads * (nope + rope + value) / 2)
    # A head_dim that the config has, and hidden_size / heads where it has none.
    return float(heads * (getattr(config, "head_dim", None) or config.hidden_size / heads))
