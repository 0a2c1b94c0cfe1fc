"""The weights of an export: safetensors files of bounded size and their index, or an adapter as a
directory of ``peft``. Standard library and numpy only.

``ShardWriter`` writes every export, from a checkpoint and from the engine alike; the bytes are
those that ``safetensors`` would write. A checkpoint is read, converted and written a piece at a
time: neither a tensor nor a shard is ever whole in memory. Floating-point numbers change their
width bit for bit as torch rounds them.

Tried by ``python -m pytest tests/unit/test_checkpoint_export.py`` and ``python -m pytest -m
deepspeed tests/integration/test_adapter.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmx.checkpoint.disk import DISK, Disk, write_file
from llmx.checkpoint.fragments import BUFFER, FROZEN, MASTER, FragmentIndex
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.tensors import ITEM_BYTES, Fragment, write_tensors
from llmx.models.adapter_names import WEIGHTS_FILE, exported_name

NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""safetensors' name by ours."""
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""As a Hugging Face config calls them."""

NUMPY = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8",
    "F32": "<f4", "I32": "<i4", "U32": "<u4",
    "F16": "<f2", "I16": "<i2", "U16": "<u2",
    "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""numpy's; what numpy does not know (BF16, F8) is read as unsigned integers of that width."""


def convert(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """1-D values of dtype ``source`` as ``target`` (safetensors' names; BF16 as uint16).

    Rounds to nearest, ties to even. What is not floating point stays as it is.
    """
    if source == target or source not in TORCH_NAMES:
        return values
    if source == "BF16":
        wide = (values.astype(np.uint32) << 16).view(np.float32)
    else:
        wide = values.astype(np.float32, copy=False)
    if target == "F32":
        return wide
    if target == "F16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16)
    bits: np.ndarray = np.ascontiguousarray(wide).view(np.uint32)
    # To nearest, ties to even.
    bits = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    bits[np.isnan(wide)] = 0x7FC0
    return bits.astype(np.uint16)


def converted(source: str, target: str) -> str:
    """The dtype that ``convert`` gives."""
    return target if source in TORCH_NAMES else source


def num_infinite(values: np.ndarray, dtype: str) -> int:
    """The number of values that are infinite or NaN: too large for the dtype."""
    if dtype == "BF16":
        return int(np.count_nonzero((values & 0x7F80) == 0x7F80))
    return int(values.size - np.count_nonzero(np.isfinite(values)))


SHARD_BYTES = 2 * 2**30


class ShardWriter:
    """Collects tensors and writes a file whenever the next one would not fit.

    ``finish`` gives the files their names, which have their number in them. All methods raise
    OSError where the disk is full or broken.
    """

    def __init__(
        self, directory: Path, *, shard_bytes: int = SHARD_BYTES, disk: Disk = DISK
    ) -> None:
        self._directory, self._limit, self._disk = directory, shard_bytes, disk
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
            file = "model.safetensors"
            if count > 1:
                file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._disk.rename(path, self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2) + "\n"
            write_file(self._disk, self._directory / "model.safetensors.index.json", text.encode())

    def _write(self) -> None:
        path = self._directory / f"part-{len(self._files)}.safetensors"
        tensors = sorted(self._open, key=lambda tensor: tensor.key)
        write_tensors(path, tensors, metadata={"format": "pt"}, disk=self._disk)
        self._files.append((path, [tensor.key for tensor in self._open]))
        self._open, self._open_bytes = [], 0


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
    tensors = []
    for name, entry in state["parameters"].items():
        if entry["tied_to"] or not name.startswith(prefix):
            continue
        shape = tuple(entry["shape"])
        if name in tables and shape and shape[0] == padded:
            # Elements are counted row by row, so the padding is what comes last.
            shape = (rows, *shape[1:])
        tensors.append((name, MASTER if entry["trained"] else FROZEN, shape))
    tensors += [
        (name, BUFFER, tuple(entry["shape"]))
        for name, entry in state.get("buffers", {}).items()
        if name.startswith(prefix)
    ]
    return [
        Weight(
            name.removeprefix(prefix), kind, shape, stored, converted(stored, dtype), prefix=prefix
        )
        for name, kind, shape in tensors
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
    tensors = [
        Fragment(
            exported_name(name),
            weight.written,
            weight.num_elements,
            pieces(weight, index, on_bytes),
            weight.shape,
        )
        for weight in weights
        for name in names[weight.name]
    ]
    write_tensors(directory / WEIGHTS_FILE, tensors, metadata={"format": "pt"})
    return sum(weight.num_elements for weight in weights)
