"""Arguments of a model's forward with which packed rows never see each other.

``segment_ids`` say which tokens belong together; an ``AttentionMethod`` says how a model is told.
Which one is right for a model is found by trying (``llmx.models.isolation``).
Shown by ``python -m pytest tests/unit/test_train_attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from llmx.models.loss import to_device
from llmx.models.varlen import SEGMENTS


@dataclass(frozen=True)
class AttentionMethod:
    """The arguments with which a model gets a micro batch."""

    implementation: str = "sdpa"
    """The value of transformers' ``attn_implementation``."""
    isolation: str = "mask"
    """The argument that tells it which tokens belong together:

    - ``mask``: positions, and a mask made here where a line holds several rows
    - ``position_ids``: positions that restart, from which transformers makes its own masks, with
      the model's windows and chunks
    - ``cu_seq_lens``: positions, and where rows begin; all in one line
    - ``padding_mask``: which tokens are padding, and no positions (one row a line)
    - ``none``: the tokens alone (one row a line, padding at its right)
    """
    layout: str = "packed"
    """``packed`` or ``padded`` (see ``llmx.data.collate``)."""
    causal: bool = True
    """A token sees those before it; else all of its row (BERT and other encoders)."""


def methods(
    implementation: str, layout: str, *, causal: bool = True
) -> tuple[AttentionMethod, ...]:
    """The methods to try with this implementation, the preferred one first."""
    isolations: tuple[str, ...]
    if layout == "padded":
        # Where tokens see what follows them, the padding must be masked.
        isolations = ("position_ids", "padding_mask", "none") if causal else ("padding_mask",)
    elif implementation.startswith(("llmx_", "flash_attention")):
        isolations = ("cu_seq_lens",)
    elif not causal:
        isolations = ("mask",)
    elif implementation == "flex_attention":
        isolations = ("position_ids", "mask")
    else:
        isolations = ("mask", "position_ids", "cu_seq_lens")
    return tuple(
        AttentionMethod(implementation, name, layout, causal=causal) for name in isolations
    )


def needs_mask(segment_ids: torch.Tensor, *, causal: bool) -> bool:
    """Whether ``isolation_mask`` says more than the model's own attention knows.

    Not where it is causal and no row of the batch holds a second segment: padding is at the right
    (segment 0), where no token of a row looks.
    """
    return int(segment_ids.max()) > 1 or not (causal or int(segment_ids.min()) == 1)


def isolation_mask(segment_ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Boolean [B, 1, T, T], True where position i may see position j."""
    length = segment_ids.shape[1]
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    if not causal:
        return same_segment.unsqueeze(1)
    before = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    return (same_segment & before).unsqueeze(1)


def additive(mask: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The boolean ``mask`` as eager attention wants it: 0 where seen, else the lowest number."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def segment_bounds(segment_ids: torch.Tensor) -> tuple[int, ...]:
    """The start of each segment in the concatenated lines, and the end.

    The padding of a line is a segment of its own. On the CPU: looking costs a device nothing.
    """
    lines, length = segment_ids.shape
    flat = segment_ids.reshape(-1).numpy()
    starts = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    # Two lines may meet in the same number.
    starts = np.union1d(starts, np.arange(lines) * length)
    return (*map(int, starts), len(flat))


def sequence_spans(segment_ids: torch.Tensor) -> list[tuple[int, int]]:
    """First token and end of each sequence in the concatenated lines, line by line."""
    flat = segment_ids.reshape(-1).numpy()
    return [(first, end) for first, end in pairwise(segment_bounds(segment_ids)) if flat[first]]


def model_inputs(
    batch: dict[str, torch.Tensor],
    *,
    method: AttentionMethod,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Keyword arguments of the forward, on ``device``; and the labels, still where they were.

    Args:
        batch: ``input_ids``, ``position_ids``, ``segment_ids``, ``labels``, all [B, T], as
            ``llmx.data.collate`` gives them: on the CPU, so that looking at them waits for
            no GPU.
        dtype: of the activations (eager adds its mask to them).
    """
    ids, labels = batch["input_ids"], batch["labels"]
    positions, segments = batch["position_ids"], batch["segment_ids"]
    if method.isolation == "none":
        return {"input_ids": to_device(ids, device)}, labels
    if method.isolation == "padding_mask":
        real = (segments != 0).to(torch.long)
        # A line of padding alone would be a row of nothing in a softmax.
        real[:, 0] = 1
        inputs = {"input_ids": ids, "attention_mask": real}
        return {name: to_device(x, device) for name, x in inputs.items()}, labels
    arguments: dict[str, Any] = {"attention_mask": None}
    if method.isolation == "cu_seq_lens":
        ids, positions, labels = (x.reshape(1, -1) for x in (ids, positions, labels))
        arguments.update(_bound_arguments(segment_bounds(segments), method.implementation, device))
    elif method.isolation == "mask" and needs_mask(segments, causal=method.causal):
        arguments["attention_mask"] = _mask(to_device(segments, device), method, dtype)
    # position_ids are given always: OPT would otherwise count them from the attention mask.
    if (
        method.isolation != "cu_seq_lens"
        and _fast_without_mask(device)
        and int(segments.max()) <= 1
    ):
        # Where they restart, be it in the padding, transformers makes a mask [B, 1, T, T], which
        # each layer keeps. One row a line needs none: nothing looks at the padding at its right.
        on_device = torch.arange(ids.shape[1], device=device).expand(ids.shape[0], -1)
    else:
        on_device = to_device(positions, device)
    return {"input_ids": to_device(ids, device), "position_ids": on_device, **arguments}, labels


def _fast_without_mask(device: torch.device) -> bool:
    """CPU runs keep what they have always computed, to the bit."""
    return device.type != "cpu"


def _bound_arguments(
    bounds: tuple[int, ...], implementation: str, device: torch.device
) -> dict[str, Any]:
    """The starts of rows, under the argument names of the kernels."""
    if implementation == SEGMENTS:
        # On the CPU, where attention reads it. Not a tuple: torch.compile would compile a block
        # anew for each number of rows.
        return {"segment_bounds": torch.tensor(bounds)}
    longest = max(stop - start for start, stop in pairwise(bounds))
    arguments = {
        # Given, no layer has to find the rows by the restarts of position_ids, which costs
        # flash-attention two waits for the device a layer.
        "cu_seq_lens_q": to_device(torch.tensor(bounds, dtype=torch.int32), device),
        "max_length_q": longest,
        "max_length_k": longest,
    }
    arguments["cu_seq_lens_k"] = arguments["cu_seq_lens_q"]
    if not implementation.startswith(("llmx_", "flash_attention")):
        # The kernels of state-space layers know a row by its number.
        lengths = torch.tensor(bounds, dtype=torch.int32).diff()
        rows = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
        arguments["seq_idx"] = to_device(rows[None], device)
    return arguments


def _mask(segment_ids: torch.Tensor, method: AttentionMethod, dtype: torch.dtype) -> Any:
    if method.implementation == "flex_attention":
        return _block_mask(segment_ids, causal=method.causal)
    mask = isolation_mask(segment_ids, causal=method.causal)
    return additive(mask, dtype=dtype) if method.implementation == "eager" else mask


def _block_mask(segment_ids: torch.Tensor, *, causal: bool = True) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = segment_ids.shape

    def visible(b: Any, _head: Any, query: Any, key: Any) -> Any:
        sees = segment_ids[b, query] == segment_ids[b, key]
        return sees & (query >= key) if causal else sees

    return create_block_mask(visible, batch, None, length, length, device=str(segment_ids.device))
