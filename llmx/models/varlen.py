"""Attention over packed rows without a mask: the tokens of a row attend to that row alone.

Two functions behind transformers' own interface for attention. Both get where each row begins,
which the collation knows, so that no layer asks the device for it:

- ``llmx_varlen``: the variable-length flash kernel that PyTorch brings (2.12 and newer; CUDA,
  16 bits, compute capability 8.0 and up). One launch a layer, no mask.
- ``llmx_segments``: PyTorch's scaled_dot_product_attention, row by row. Runs everywhere; on a
  V100 each row gets the memory-efficient kernel. No mask is kept for the backward pass.

What a model wants beyond a scale, a window and shared key heads (soft-caps, sinks, biases,
dropout) is refused by raising; ``llmx.models.isolation`` then tries the next method.
Shown by ``python -m pytest tests/unit/test_train_attention.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch.nn import functional

VARLEN = "llmx_varlen"
SEGMENTS = "llmx_segments"
IMPLEMENTATIONS = {"varlen": VARLEN, "segments": SEGMENTS}
"""Value of ``model.attention`` -> the name that transformers knows."""


def name_of_attention(implementation: str) -> str:
    """The value of ``model.attention`` that chooses it."""
    names = {registered: name for name, registered in IMPLEMENTATIONS.items()}
    return names.get(implementation, implementation)


class Unsupported(Exception):
    """A model asks its attention for something that this kernel does not compute."""


def register() -> None:
    """Make both known to transformers as values of ``attn_implementation``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Not among the mask functions on purpose: transformers then builds no mask at all, and so
    # does not ask the device whether the positions restart.
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_forward)
    ALL_ATTENTION_FUNCTIONS.register(SEGMENTS, segments_forward)


def has_kernel() -> bool:
    """Whether this torch has the kernel behind ``llmx_varlen``, with all that it is asked for:
    windows came with torch 2.11, shared key heads with 2.12."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before 2.10
        return False
    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """PyTorch's causal kernel over ``query`` [T, H, D], ``key`` and ``value`` [T, K, D].

    Args:
        cu_seq_lens: int32 [rows + 1], on the device: where rows begin, and the end.
        max_length: tokens of the longest row, known on the host.
        window: tokens that a position sees, itself included; None for all before it.
    """
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        query,
        key,
        value,
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(torch.Tensor, result)  # a pair only where more is asked for


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    window: int | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_options: Any,
) -> torch.Tensor:
    """Attention over all rows in one launch of the kernel."""
    if cu_seq_lens_q is None or max_length_q is None:
        raise Unsupported("the model does not hand cu_seq_lens_q to its attention")
    head, width = query.shape[-1], value.shape[-1]
    if width > head:
        raise Unsupported("its values are wider than its keys")
    if width < head:  # multi-head latent attention: the kernel wants one width
        value = functional.pad(value, (0, head - width))
    out = varlen_kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens=cu_seq_lens_q,
        max_length=max_length_q,
        scale=scale,
        window=window,
    )
    return out[None, ..., :width]


def _by_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    window: int | None,
    segment_bounds: torch.Tensor | None = None,
    **_options: Any,
) -> torch.Tensor:
    """One causal attention for each row; ``segment_bounds``: int64 [rows + 1], on the CPU."""
    if segment_bounds is None:
        raise Unsupported("the model does not hand segment_bounds to its attention")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # Not enable_gqa: where no flash kernel runs (V100, fp32) it takes the one that keeps
        # all scores.
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    parts = []
    for start, stop in pairwise(segment_bounds.numpy().tolist()):
        mask = None
        if window and window < stop - start:
            places = torch.arange(stop - start, device=query.device)
            ahead = places[:, None] - places[None, :]
            mask = (ahead >= 0) & (ahead < window)
        parts.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, start:stop],
                value[:, :, start:stop],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _attention_function(compute: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """``compute`` as transformers calls the attention of a layer: ``query``, ``key`` and ``value``
    are [1, H, T, D], the result is [1, T, H, D]."""

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        _refuse(attention_mask, options)
        return compute(query, key, value, scale=scaling, window=sliding_window, **options), None

    return forward


varlen_forward = _attention_function(_by_kernel)
segments_forward = _attention_function(_by_segment)


def _refuse(attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Raise for what neither computes."""
    if attention_mask is not None:
        raise Unsupported("the model makes a mask of its own")
    if options.get("dropout"):
        raise Unsupported("its attention has dropout")
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(name) is not None:
            raise Unsupported(f"its attention has {name}")
    if options.get("is_causal") is False:
        raise Unsupported("its attention is not causal")
