"""Reading safetensors files range by range: mapped, or read into a buffer of the caller's."""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.tensors import ITEM_BYTES, MAX_HEADER_BYTES, TensorSpec, as_bytes

NUMPY = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8",
    "F32": "<f4", "I32": "<i4", "U32": "<u4",
    "F16": "<f2", "I16": "<i2", "U16": "<u2",
    "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""numpy's; what numpy does not know (BF16, F8) is read as unsigned integers of that width."""


@dataclass(frozen=True)
class _Entry:
    spec: TensorSpec
    offset: int


class TensorFile:
    """One safetensors file, opened for reading; only its header is read.

    Raises CheckpointError if the header does not describe exactly this file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._mapped: mmap.mmap | None = None
        self._descriptor = _open(self.path)
        try:
            self._size = os.fstat(self._descriptor).st_size
            self.metadata, self._entries = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise

    def _read_header(self) -> tuple[dict[str, str], dict[str, _Entry]]:
        size = self._size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path} is no whole safetensors file: {size} bytes, and a header that asks "
                f"for {8 + length}"
            )
        try:
            table = json.loads(os.pread(self._descriptor, length, 8))
            metadata = {str(k): str(v) for k, v in table.pop("__metadata__", {}).items()}
            entries, end = {}, 8 + length
            for key, value in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
                shape = tuple(int(extent) for extent in value["shape"])
                count = int(np.prod(shape, dtype=np.int64)) if shape else 1
                spec = TensorSpec(key, value["dtype"], count, shape)
                first, last = value["data_offsets"]
                if 8 + length + first != end or last - first != spec.num_bytes or count < 0:
                    raise ValueError(f"{key!r} is said to lie at {first} to {last}")
                entries[key] = _Entry(spec, end)
                end += spec.num_bytes
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error}") from error
        if end != size:
            raise CheckpointError(f"{self.path} has {size} bytes, its header describes {end}")
        return metadata, entries

    def keys(self) -> list[str]:
        """As they lie in the file."""
        return list(self._entries)

    @property
    def specs(self) -> list[TensorSpec]:
        """As they lie in the file."""
        return [entry.spec for entry in self._entries.values()]

    def dtype(self, key: str) -> str:
        """safetensors' name."""
        return self._entries[key].spec.dtype

    def count(self, key: str) -> int:
        """Elements."""
        return self._entries[key].spec.num_elements

    def read(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements ``[start, stop)``, 1-D, read-only, a view of the mapped file: no copy.

        BF16 and F8 come as unsigned integers of the same width.
        """
        entry, stop = self._range(key, start, stop)
        width = ITEM_BYTES[entry.spec.dtype]
        kind = NUMPY.get(entry.spec.dtype, f"<u{width}")
        if self._mapped is None:
            self._mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(
            self._mapped, dtype=kind, count=stop - start, offset=entry.offset + start * width
        )

    def read_into(self, key: str, start: int, stop: int, out: Any) -> None:
        """Elements ``[start, stop)`` into ``out``, a writable buffer of exactly their size.

        Reads instead of mapping: a broken disk is an OSError, and no page of the file counts as
        this process's memory.
        """
        entry, stop = self._range(key, start, stop)
        width = ITEM_BYTES[entry.spec.dtype]
        view = as_bytes(out)
        if len(view) != (stop - start) * width:
            raise ValueError(
                f"{key}: {stop - start} x {entry.spec.dtype} do not fit {len(view)} bytes"
            )
        position = entry.offset + start * width
        while len(view):
            count = os.preadv(self._descriptor, [view[: 2**30]], position)
            if count == 0:
                raise CheckpointError(f"{self.path} ends at {position} bytes: it was truncated")
            view, position = view[count:], position + count

    def _range(self, key: str, start: int, stop: int | None) -> tuple[_Entry, int]:
        entry = self._entries[key]
        end = entry.spec.num_elements if stop is None else stop
        if not 0 <= start <= end <= entry.spec.num_elements:
            raise IndexError(f"{key} has {entry.spec.num_elements} elements, not {start} to {end}")
        return entry, end

    def close(self) -> None:
        """Let go of the file; views of it stay good."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._mapped = None

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _open(path: Path) -> int:
    """Open for reading. A checkpoint of many ranks may have more files than the soft limit."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return os.open(path, flags)
