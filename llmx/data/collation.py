"""Makes the tensors of one micro batch of samples: numpy in, torch out.

The shift is done here, once: ``labels[b, t]`` is the token to predict *at* position t, that
is, token t+1 of the same sequence (or what a task has put there: ``Sample.labels``), or -100. The
loss compares ``logits[b, t]`` with ``labels[b, t]`` and shifts nothing. A label never reaches into
the next sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmx.data.examples import IGNORE, Column, Schema
from llmx.data.store.samples import Sample
from llmx.errors import DataError

if TYPE_CHECKING:
    import torch

PAD_TO = 8
"""Batches are as long as their longest line, rounded up to this (tensor cores like it)."""


def collate(
    samples: Sequence[Sample],
    *,
    seq_len: int,
    pad_id: int,
    layout: str,
    pad_to: int = PAD_TO,
    columns: Sequence[Column] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of one micro batch.

    ``layout="packed"``: B = len(samples), the sequences of a sample lie one after the other and
    are told apart by ``segment_ids`` and by positions that restart. ``layout="padded"``:
    B = number of sequences of all samples, each in a padded line of its own. Both hold the same
    (context, target) pairs. T is the longest used length rounded up to a multiple of
    ``pad_to``, at most ``seq_len``.

    By token, all [B, T]:

    - ``input_ids`` int64; ``pad_id`` after the end
    - ``labels`` int64: the token to predict at this position, or -100
    - ``position_ids`` int64: 0, 1, ... from the start of each sequence; 0 in the padding
    - ``segment_ids`` int32: 1, 2, ... for the sequences of this line, 0 in the padding. Padding is
      known by this alone, never by the token id: pad and end may share one.

    With ``columns`` (those of the store, which may be none), the same in both layouts:

    - ``sequence_ids`` int64 [B, T]: 1, 2, ... for the sequences of the micro batch, 0 in the
      padding. Sums by sequence: ``zeros(n + 1).index_add(0, sequence_ids.flatten(), x.flatten())``
      without its first, with n = ``len(example_ids)``
    - ``example_ids`` int64 [sequences]: the example of each, from 0
    - ``weights`` float32 [B, T]: of ``labels``, and 0 where they are -100; where the task has
      weights
    - the columns by name: [B, T, ...] by token, where what belongs to the token to predict stands
      at its label; [sequences, ...] and [examples, ...]

    No samples give one line of padding without targets, sequences and examples, for ranks that
    must keep step.
    """
    if layout not in ("packed", "padded"):
        raise ValueError(f"layout {layout!r} is not packed or padded")
    lines = [[(sample, *bounds) for bounds in sample.bounds()] for sample in samples]
    if layout == "padded":
        lines = [[span] for line in lines for span in line]
    lines = lines or [[]]
    longest = max(sum(stop - start for _, start, stop in line) for line in lines)
    if longest > seq_len:
        raise DataError(
            f"A sample has {longest} tokens, data.seq_len is {seq_len}: the store was prepared "
            "with another seq_len. Prepare it again with this one."
        )
    length = min(seq_len, max(1, -(-longest // pad_to)) * pad_to)
    shape = (len(lines), length)
    arrays: dict[str, np.ndarray] = {
        "input_ids": np.full(shape, pad_id, np.int64),
        "labels": np.full(shape, IGNORE, np.int64),
        "position_ids": np.zeros(shape, np.int64),
        "segment_ids": np.zeros(shape, np.int32),
    }
    schema = Schema(tuple(columns or ()))
    token_columns = schema.per("token")
    for column in token_columns:
        arrays[column.name] = np.zeros((*shape, *column.shape), column.numpy_dtype)
    if columns is not None:
        arrays["sequence_ids"] = np.zeros(shape, np.int64)
    if schema.weighted:
        arrays["weights"] = np.zeros(shape, np.float32)
    number = 0
    for b, line in enumerate(lines):
        at = 0
        for segment, (sample, start, stop) in enumerate(line, start=1):
            number += 1
            end = at + stop - start
            tokens, shifted = sample.tokens[start:stop], slice(start + 1, stop)
            arrays["input_ids"][b, at:end] = tokens
            if sample.labels is not None:
                arrays["labels"][b, at:end] = sample.labels[start:stop]
            else:
                # Widened first: -100 has no place among the unsigned ids of the store.
                following = tokens[1:].astype(np.int64)
                labels = np.where(sample.targets[shifted], following, IGNORE)
                arrays["labels"][b, at : end - 1] = labels
            arrays["position_ids"][b, at:end] = np.arange(len(tokens))
            arrays["segment_ids"][b, at:end] = segment
            if columns is not None:
                arrays["sequence_ids"][b, at:end] = number
            if schema.weighted:
                weights = sample.targets if sample.weights is None else sample.weights
                arrays["weights"][b, at : end - 1] = weights[shifted]
            for column in token_columns:
                arrays[column.name][b, at : end - 1] = sample.columns[column.name][shifted]
            at = end
    if columns is not None:
        sizes = [size for sample in samples for size in sample.example_sizes()]
        arrays["example_ids"] = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    for column in (*schema.per("sequence"), *schema.per("example")):
        empty = np.zeros((0, *column.shape), column.numpy_dtype)
        arrays[column.name] = np.concatenate([empty, *(s.columns[column.name] for s in samples)])
    import torch

    return {name: torch.from_numpy(values) for name, values in arrays.items()}
