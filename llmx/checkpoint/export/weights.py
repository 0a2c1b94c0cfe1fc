"""The weights of a checkpoint as whole tensors for an export.

Read, converted and written a piece at a time: neither a tensor nor a shard is ever whole in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmx.checkpoint.export.dtypes import NUMPY, convert, converted, num_infinite
from llmx.checkpoint.export.shards import SHARD_BYTES, ShardWriter
from llmx.checkpoint.fragments import BUFFER, FROZEN, MASTER, FragmentIndex
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.tensors import ITEM_BYTES, Fragment

PIECE_ELEMENTS = 4 * 2**20
"""Read, converted and written at a time: 16 MiB of fp32."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the export."""

    name: str
    state: str
    shape: tuple[int, ...]
    """Without rows that only pad the vocabulary."""
    stored: str
    """dtype in the checkpoint."""
    written: str
    """dtype in the export."""
    prefix: str = ""
    """Of its name in the checkpoint, where that holds several models."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.written]


def list_weights(state: Mapping[str, Any], index: FragmentIndex, *, dtype: str) -> list[Weight]:
    """Every tensor of the model that is exported, tied ones once, in the model's own order,
    buffers last.

    Args:
        state: ``state.json``.
        dtype: safetensors' name, for all that is floating point.
    """
    rows, padded = state["vocab_size"], state["padded_vocab_size"]
    tables = set(state["vocabulary"])
    prefix = state.get("main_prefix", "")
    found = []
    for name, entry in state["parameters"].items():
        if entry["tied_to"] or not name.startswith(prefix):
            continue
        shape = tuple(entry["shape"])
        if name in tables and shape and shape[0] == padded:
            # Elements are counted row by row, so the padding is what comes last.
            shape = (rows, *shape[1:])
        found.append((name, MASTER if entry["trained"] else FROZEN, shape))
    found += [
        (name, BUFFER, tuple(entry["shape"]))
        for name, entry in state.get("buffers", {}).items()
        if name.startswith(prefix)
    ]
    return [
        Weight(
            name.removeprefix(prefix), kind, shape, stored, converted(stored, dtype), prefix=prefix
        )
        for name, kind, shape in found
        for stored in (index.dtype(kind, name),)
    ]


def write_weights(
    directory: Path,
    weights: Sequence[Weight],
    index: FragmentIndex,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the shards and their index into an existing directory.

    Args:
        on_bytes: called with the bytes of each piece as it is written.

    Raises:
        OSError: the disk is full or broken.
        CheckpointError: a value does not fit the dtype.
    """
    shards = ShardWriter(directory, shard_bytes=shard_bytes)
    for weight in weights:
        values = pieces(weight, index, on_bytes)
        shards.add(Fragment(weight.name, weight.written, weight.num_elements, values, weight.shape))
    shards.finish()


def pieces(
    weight: Weight, index: FragmentIndex, on_bytes: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """The values of a weight in the dtype that is written, ``PIECE_ELEMENTS`` at a time.

    One is valid until the next is taken. Raises CheckpointError for a value that does not
    fit the dtype.
    """
    kind = NUMPY.get(weight.stored, f"<u{ITEM_BYTES[weight.stored]}")
    staging = np.empty(min(PIECE_ELEMENTS, weight.num_elements), dtype=kind)
    for start in range(0, weight.num_elements, PIECE_ELEMENTS):
        stop = min(start + PIECE_ELEMENTS, weight.num_elements)
        values = staging[: stop - start]
        index.read_range(weight.state, weight.prefix + weight.name, start, stop, values)
        written = convert(values, weight.stored, weight.written)
        if weight.stored != weight.written and (
            bad := num_infinite(written, weight.written) - num_infinite(values, weight.stored)
        ):
            raise CheckpointError(
                f"{weight.name} has {bad} values that are too large for {weight.written}. "
                "Export with --dtype bf16 or fp32."
            )
        yield written
        on_bytes(written.nbytes)
