"""From samples to the tensors of one micro batch: numpy in, torch out.

The shift is done here, once: ``labels[b, t]`` is the token to predict *at* position t, that
is, token t+1 of the same row, or -100. The loss compares ``logits[b, t]`` with
``labels[b, t]`` and shifts nothing. A label never reaches into the next row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmx.data.store import Sample
from llmx.errors import DataError

if TYPE_CHECKING:
    import torch

IGNORE = -100
PAD_TO = 8
"""Batches are as long as their longest row, rounded up to this (tensor cores like it)."""


def collate(
    samples: list[Sample],
    *,
    seq_len: int,
    pad_id: int,
    layout: str,
    pad_to: int | None = PAD_TO,
) -> dict[str, torch.Tensor]:
    """Tensors of one micro batch, all [B, T].

    ``layout="packed"``: B = len(samples), the rows of a sample lie one after the other and
    are told apart by ``segment_ids`` and by positions that restart. ``layout="padded"``:
    B = number of rows of all samples, each in a padded row of its own. Both hold the same
    (context, target) pairs. T is the longest used length rounded up to a multiple of
    ``pad_to``, at most ``seq_len``; ``pad_to=None`` gives T = seq_len always.

    - ``input_ids`` int64; ``pad_id`` after the end
    - ``labels`` int64: the token to predict at this position, or -100
    - ``position_ids`` int64: 0, 1, ... from the start of each row; 0 in the padding
    - ``segment_ids`` int32: 1, 2, ... for the rows of this line, 0 in the padding. Padding is
      known by this alone, never by the token id: pad and end may share one.

    No samples give one line of padding without targets, for ranks that must keep step.
    """
    if layout == "packed":
        lines = [list(sample.rows()) for sample in samples]
    elif layout == "padded":
        lines = [[row] for sample in samples for row in sample.rows()]
    else:
        raise ValueError(f"layout {layout!r} is not packed or padded")
    lines = lines or [[]]
    longest = max(sum(len(tokens) for tokens, _ in line) for line in lines)
    if longest > seq_len:
        raise DataError(
            f"A sample has {longest} tokens, data.seq_len is {seq_len}: the store was prepared "
            "with another seq_len. Prepare it again with this one."
        )
    length = seq_len
    if pad_to is not None:
        length = min(seq_len, max(1, -(-longest // pad_to)) * pad_to)
    return _tensors(lines, length=length, pad_id=pad_id)


def _tensors(
    lines: list[list[tuple[np.ndarray, np.ndarray]]], *, length: int, pad_id: int
) -> dict[str, torch.Tensor]:
    import torch

    shape = (len(lines), length)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    segment_ids = np.zeros(shape, dtype=np.int32)
    for b, line in enumerate(lines):
        start = 0
        for segment, (tokens, targets) in enumerate(line, start=1):
            stop = start + len(tokens)
            input_ids[b, start:stop] = tokens
            # Widened first: -100 has no place among the unsigned ids of the store.
            labels[b, start : stop - 1] = np.where(targets[1:], tokens[1:].astype(np.int64), IGNORE)
            position_ids[b, start:stop] = np.arange(len(tokens))
            segment_ids[b, start:stop] = segment
            start = stop
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(position_ids),
        "segment_ids": torch.from_numpy(segment_ids),
    }
