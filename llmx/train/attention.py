"""What a model's forward gets, so that packed rows never see each other.

``segment_ids`` say which tokens belong together; each attention implementation is told in its
own way. Shown by ``python -m pytest tests/unit/test_train_attention.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from llmx.errors import ConfigError


def sliding_window(config: Any) -> int | None:
    """Tokens that a layer with a sliding window sees; None if every layer sees everything."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if not window or (layers is not None and "sliding_attention" not in layers):
        return None
    return int(window)


def check_isolation(config: Any, *, seq_len: int, layout: str) -> None:
    """Raise ConfigError for a model whose attention cannot be isolated in a packed row.

    A ready-made mask replaces the sliding window that some models build for themselves.
    """
    window = sliding_window(config)
    if layout == "packed" and window is not None and window < seq_len:
        raise ConfigError(
            f"data.layout=packed with a sliding window of {window} tokens, below "
            f"data.seq_len={seq_len}: the mask that isolates packed rows would replace the "
            f"window. Set data.layout=padded, or data.seq_len to at most {window}."
        )


def isolation_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Boolean [B, 1, T, T], True where position i may see position j.

    Not needed when no row of the batch holds a second segment: the causal mask is enough then,
    for padding is at the right (segment 0), where no token of a row looks.
    """
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    return (same & causal).unsqueeze(1)


def additive(mask: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The boolean ``mask`` as eager attention wants it: 0 where seen, else the lowest number."""
    hidden = torch.tensor(torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), hidden)


def model_inputs(
    batch: dict[str, torch.Tensor],
    *,
    implementation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Keyword arguments of the forward, on ``device``; and the labels, still where they were.

    Args:
        batch: ``input_ids``, ``position_ids``, ``segment_ids``, ``labels``, all [B, T], as
            ``llmx.data.collate`` gives them: on the CPU, so that looking at them waits for
            no GPU.
        implementation: the model's attention: sdpa, eager, flash_attention_2, flex_attention.
        dtype: of the activations (eager adds its mask to them).
    """
    ids, positions, labels = batch["input_ids"], batch["position_ids"], batch["labels"]
    if implementation == "flash_attention_2":
        # Its varlen kernel finds the rows by the restarts of position_ids, in a single row.
        ids, positions, labels = (x.reshape(1, -1) for x in (ids, positions, labels))
    segments = batch["segment_ids"]
    mask: Any = None
    if implementation != "flash_attention_2" and int(segments.max()) > 1:
        segments = segments.to(device, non_blocking=True)
        if implementation == "flex_attention":
            mask = _block_mask(segments)
        else:
            mask = isolation_mask(segments)
            if implementation == "eager":
                mask = additive(mask, dtype=dtype)
    # position_ids are given always: OPT would otherwise count them from the attention mask.
    inputs = {
        "input_ids": ids.to(device, non_blocking=True),
        "position_ids": positions.to(device, non_blocking=True),
        "attention_mask": mask,
    }
    return inputs, labels


def _block_mask(segment_ids: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = segment_ids.shape

    def visible(b: Any, _head: Any, query: Any, key: Any) -> Any:
        return (segment_ids[b, query] == segment_ids[b, key]) & (query >= key)

    return create_block_mask(visible, batch, None, length, length, device=str(segment_ids.device))
