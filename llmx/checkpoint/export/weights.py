"""The weights of an export: safetensors files of bounded size and their index, or an adapter as a
directory of ``peft``.

``ShardWriter`` writes every export, from a checkpoint and from the engine alike; the bytes are
those that ``safetensors`` would write. A checkpoint is read, converted and written a piece at a
time: neither a tensor nor a shard is ever whole in memory. Where files of the Hub have another
layout than memory (fused experts apart), transformers converts a few whole tensors at a time.

Tried by ``python -m pytest tests/unit/test_checkpoint_export.py`` and ``python -m pytest -m
deepspeed tests/integration/test_adapter.py``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.disk import DISK, write_file
from llmx.checkpoint.fragments import BUFFER, FROZEN, MASTER, FragmentIndex
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.state.engine_state import TORCH_DTYPES, as_buffer, whole_tensor
from llmx.checkpoint.tensors import ITEM_BYTES, SHARD_BYTES, Fragment, write_tensors
from llmx.models.adapter_names import WEIGHTS_FILE, exported_name
from llmx.models.conversion import WholeShapes, conversions_of, convert_export, plan_export
from llmx.models.model import empty_network


class ShardWriter:
    """Collects tensors and writes a file whenever the next one would not fit.

    ``finish`` gives the files their names, which have their number in them. All methods raise
    OSError where the disk is full or broken.
    """

    def __init__(
        self, directory: Path, *, shard_bytes: int = SHARD_BYTES, file: str = "model.safetensors"
    ) -> None:
        self._directory, self._limit, self._file = directory, shard_bytes, file
        self._open: list[Fragment] = []
        self._open_bytes = self._total_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []

    def add(self, tensor: Fragment) -> None:
        """The next tensor. Its buffer is read when its file is written, by ``finish`` at the
        latest: keep it until then."""
        size = tensor.spec.num_bytes
        if self._open and self._open_bytes + size > self._limit:
            self._write()
        self._open.append(tensor)
        self._open_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        """Write the rest, and the index if there are several files."""
        self._write()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            file = self._file
            if count > 1:
                file = f"model-{number:05d}-of-{count:05d}.safetensors"
            DISK.rename(path, self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2) + "\n"
            write_file(DISK, self._directory / "model.safetensors.index.json", text.encode())

    def _write(self) -> None:
        path = self._directory / f"part-{len(self._files)}.safetensors"
        tensors = sorted(self._open, key=lambda tensor: tensor.key)
        write_tensors(path, tensors, metadata={"format": "pt"})
        self._files.append((path, [tensor.key for tensor in self._open]))
        self._open, self._open_bytes = [], 0


PIECE_ELEMENTS = 2**20
"""Read, converted and written at a time: 4 MiB of fp32."""


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
    prefix: str
    """Prefix of its name in a checkpoint of several models."""

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
    weights: list[Weight] = []

    def add(name: str, kind: str, shape: tuple[int, ...]) -> None:
        stored = index.dtype(kind, name)
        # Counters and the like among the buffers keep their dtype.
        written = dtype if TORCH_DTYPES[stored].is_floating_point else stored
        weights.append(Weight(name.removeprefix(prefix), kind, shape, stored, written, prefix))

    for name, entry in state["parameters"].items():
        if entry["tied_to"] or not name.startswith(prefix):
            continue
        shape = tuple(entry["shape"])
        if name in tables and shape and shape[0] == padded:
            # Elements are counted row by row, so the padding is what comes last.
            shape = (rows, *shape[1:])
        add(name, MASTER if entry["trained"] else FROZEN, shape)
    for name, entry in state.get("buffers", {}).items():
        if name.startswith(prefix):
            add(name, BUFFER, tuple(entry["shape"]))
    return weights


def write_weights(
    directory: Path,
    weights: Sequence[Weight],
    index: FragmentIndex,
    *,
    conversions: list[str],
    model: Path,
    trust_remote_code: bool,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the shards and their index into an existing directory.

    Args:
        conversions: those of ``state.json``, between the layout in memory and that of files.
        model: directory with the ``config.json`` of the architecture.
        trust_remote_code: as in the run: an architecture of its own code is built with that.
        on_bytes: called with the bytes of each piece as it is read.

    Raises:
        OSError: the disk is full or broken.
        LlmxError: a value does not fit the dtype; another version of transformers is needed.
    """
    shards = ShardWriter(directory, shard_bytes=shard_bytes)
    if conversions:
        for tensor in _converted(weights, index, conversions, model, trust_remote_code, on_bytes):
            shards.add(tensor)
    else:
        for weight in weights:
            shards.add(_fragment(weight.name, weight, index, on_bytes))
    shards.finish()


def _fragment(
    name: str, weight: Weight, index: FragmentIndex, on_bytes: Callable[[int], None]
) -> Fragment:
    values = (as_buffer(piece) for piece in pieces(weight, index, on_bytes))
    return Fragment(name, weight.written, weight.num_elements, values, weight.shape)


def _converted(
    weights: Sequence[Weight],
    index: FragmentIndex,
    conversions: list[str],
    model: Path,
    trust_remote_code: bool,
    on_bytes: Callable[[int], None],
) -> Iterator[Fragment]:
    """The tensors as files of the Hub have them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    empty = empty_network(config, trust_remote_code=trust_remote_code)
    transforms = conversions_of(empty, conversions)
    by_name = {weight.name: weight for weight in weights}
    shapes = {weight.name: weight.shape for weight in weights}
    stand_in = WholeShapes(empty, transforms)
    for group in plan_export(empty, shapes, transforms):
        values = {}
        for _, name in group.sources:
            # A piece is valid until the next one is taken.
            parts = [piece.clone() for piece in pieces(by_name[name], index, on_bytes)]
            values[name] = torch.cat(parts).reshape(shapes[name])
        with torch.no_grad():
            tensors = convert_export(group, values, stand_in)
        for name, tensor in tensors.items():
            yield whole_tensor(name, tensor.to("cpu", copy=True))


def pieces(
    weight: Weight, index: FragmentIndex, on_bytes: Callable[[int], None]
) -> Iterator[torch.Tensor]:
    """The values of a weight in the dtype that is written, ``PIECE_ELEMENTS`` at a time.

    One is valid until the next is taken. Raises CheckpointError for a value that does not
    fit the dtype.
    """
    size = min(PIECE_ELEMENTS, weight.num_elements)
    staging = torch.empty(size, dtype=TORCH_DTYPES[weight.stored])
    for start in range(0, max(weight.num_elements, 1), PIECE_ELEMENTS):
        stop = min(start + PIECE_ELEMENTS, weight.num_elements)
        values = staging[: stop - start]
        index.read_range(weight.state, weight.prefix + weight.name, start, stop, as_buffer(values))
        written = values.to(TORCH_DTYPES[weight.written])
        if written.dtype != values.dtype and (
            too_large := int(written.isinf().sum() - values.isinf().sum())
        ):
            raise CheckpointError(
                f"{weight.name} has {too_large} values that are too large for {weight.written}. "
                "Export with --dtype bf16 or fp32."
            )
        yield written
        on_bytes(written.nbytes)


def write_adapter(
    directory: Path,
    state: Mapping[str, Any],
    index: FragmentIndex,
    *,
    dtype: str,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Write ``adapter_model.safetensors`` into an existing directory; the number of parameters.

    A weight that has several names (an embedding that is the output head, too) is written under
    each: peft keeps a copy for every module that is trained whole.

    Args:
        state: ``state.json``.
        dtype: safetensors' name.

    Raises:
        OSError: the disk is full or broken.
        CheckpointError: a value does not fit the dtype.
    """
    weights = list_weights(state, index, dtype=dtype)
    prefix = state.get("main_prefix", "")
    names: dict[str, list[str]] = {weight.name: [weight.name] for weight in weights}
    for name, entry in state["parameters"].items():
        if entry["tied_to"] and name.startswith(prefix):
            names[entry["tied_to"].removeprefix(prefix)].append(name.removeprefix(prefix))
    file = ShardWriter(directory, shard_bytes=sys.maxsize, file=WEIGHTS_FILE)
    for weight in weights:
        for name in names[weight.name]:
            file.add(_fragment(exported_name(name), weight, index, on_bytes))
    file.finish()
    return sum(weight.num_elements for weight in weights)
