"""safetensors files: streamed out while they are hashed, read back range by range.

The header is known before the first byte of a tensor, so the bytes can be reserved, and a file
larger than memory can be written. Any safetensors library reads the result.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.checkpoint.disk import CHUNK_BYTES, DISK, UNSUPPORTED, Disk, write_all
from llmx.checkpoint.manifest import HASH_BYTES, CheckpointError, FileEntry

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors' name of the dtype."""

NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""safetensors' name by ours."""
SHARD_BYTES = 2 * 2**30
"""Largest file of an export."""
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses more."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor before its values are there."""

    key: str
    dtype: str
    """safetensors' name: ``F32``, ``BF16``, ..."""
    num_elements: int
    shape: tuple[int, ...] | None = None
    """None is one-dimensional."""

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Fragment:
    """One tensor with its values."""

    key: str
    dtype: str
    num_elements: int
    buffer: Any
    """C-contiguous, with the buffer protocol: numpy arrays, memoryviews, bytes. Or an iterator of
    such pieces, each valid until the next is taken."""
    shape: tuple[int, ...] | None = None

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.key, self.dtype, self.num_elements, self.shape)


class TensorWriter:
    """One new file, in three steps that each can fail alone: ``reserve``, ``write``, ``close``.

    Used as a context manager it is always closed; an unfinished file is left for
    the caller, who removes the directory.
    """

    def __init__(
        self,
        path: Path,
        specs: Iterable[TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        disk: Disk = DISK,
    ) -> None:
        self.path = path
        # Wide elements first, so that each tensor is aligned to its width.
        self.order = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
        """In which ``write`` takes the fragments."""
        self._header = _header(self.order, metadata or {})
        self._disk = disk
        self._descriptor = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole file, header included."""
        return len(self._header) + sum(spec.num_bytes for spec in self.order)

    def reserve(self) -> None:
        """Create the file and claim its bytes. OSError ENOSPC: they are not there."""
        self._descriptor = self._disk.create(self.path)
        try:
            self._disk.reserve(self._descriptor, self.num_bytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            # A file system that cannot reserve: check the free space, where it reports its size.
            free = os.statvfs(self.path.parent)
            if free.f_blocks and free.f_bavail * free.f_frsize < self.num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error

    def write(self, fragments: Iterable[Fragment]) -> FileEntry:
        """Write and hash everything, then wait until it is on the disk.

        Args:
            fragments: as ``order`` has them; taken one by one, so they may be made on the way.

        Raises:
            OSError: the disk is full or broken.
            ValueError: another fragment than was announced.
        """
        if self._descriptor < 0:
            self.reserve()
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self._put(memoryview(self._header), digest)
        pending = iter(fragments)
        for spec in self.order:
            fragment = next(pending, None)
            if fragment is None or fragment.spec != spec:
                raise ValueError(f"{self.path.name}: {spec} was announced, {fragment!r:.200} came")
            buffer, size = fragment.buffer, 0
            for piece in buffer if isinstance(buffer, Iterator) else (buffer,):
                data = as_bytes(piece)
                size += len(data)
                if size > spec.num_bytes:
                    break
                self._put(data, digest)
            if size != spec.num_bytes:
                raise ValueError(
                    f"{spec.key} is {spec.num_elements} x {spec.dtype}, {spec.num_bytes} bytes; "
                    f"its buffer has {size}"
                )
        extra = next(pending, None)
        if extra is not None:
            raise ValueError(f"{self.path.name}: {extra.key} was not announced")
        self._disk.sync(self._descriptor)
        return FileEntry(self.num_bytes, digest.hexdigest())

    def _put(self, data: memoryview, digest: hashlib.blake2b) -> None:
        for first in range(0, len(data), CHUNK_BYTES):
            chunk = data[first : first + CHUNK_BYTES]
            # Hashed first: while the kernel takes the bytes they are still in the cache.
            digest.update(chunk)
            write_all(self._disk, self._descriptor, chunk)

    def close(self) -> None:
        """Close the file; does nothing where it is closed already."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._disk.close(descriptor)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def write_tensors(
    path: Path, tensors: Sequence[Fragment], *, metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Reserve, write, hash and sync one new file. Fragments in any order."""
    with TensorWriter(path, [tensor.spec for tensor in tensors], metadata=metadata) as file:
        by_key = {tensor.key: tensor for tensor in tensors}
        return file.write(by_key[spec.key] for spec in file.order)


def as_bytes(buffer: Any) -> memoryview:
    """The bytes of a C-contiguous buffer, not copied; also of an empty one."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a tensor's buffer must be C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        if spec.key in table or spec.key == "__metadata__":
            raise ValueError(f"two tensors have the key {spec.key!r}")
        shape = [spec.num_elements] if spec.shape is None else list(spec.shape)
        end = offset + spec.num_bytes
        table[spec.key] = {"dtype": spec.dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(specs)} tensors need a header of {len(text)} bytes: too many")
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """One safetensors file, opened for reading; only its header is read.

    Raises CheckpointError if the header does not describe exactly this file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._descriptor = _open(self.path)
        try:
            self._entries = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise

    def _read_header(self) -> dict[str, tuple[TensorSpec, int]]:
        """Each tensor, and the place of its first byte."""
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path} is not a complete safetensors file: {size} bytes, and a header of "
                f"{8 + length} bytes"
            )
        try:
            table = json.loads(os.pread(self._descriptor, length, 8))
            table.pop("__metadata__", None)
            entries, end = {}, 8 + length
            for key, value in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
                shape = tuple(int(extent) for extent in value["shape"])
                count = math.prod(shape)
                spec = TensorSpec(key, value["dtype"], count, shape)
                first, last = value["data_offsets"]
                if 8 + length + first != end or last - first != spec.num_bytes or count < 0:
                    raise ValueError(f"{key!r} is recorded at {first} to {last}")
                entries[key] = spec, end
                end += spec.num_bytes
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error}") from error
        if end != size:
            raise CheckpointError(f"{self.path} has {size} bytes, its header describes {end}")
        return entries

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors of the file, in its order."""
        return [spec for spec, _ in self._entries.values()]

    def read_into(self, key: str, start: int, stop: int, out: Any) -> None:
        """Elements ``[start, stop)``, which it has, into ``out``, a writable buffer of their size.

        Reads instead of mapping: a broken disk is an OSError, and no page of the file counts as
        this process's memory.
        """
        spec, offset = self._entries[key]
        position = offset + start * ITEM_BYTES[spec.dtype]
        size = (stop - start) * ITEM_BYTES[spec.dtype]
        view = as_bytes(out)[:size]
        if len(view) != size:
            raise ValueError(f"{key!r}: {len(view)} bytes have no room for {size}")
        while len(view):
            count = os.preadv(self._descriptor, [view[: 2**30]], position)
            if count == 0:
                raise CheckpointError(f"{self.path} ends at {position} bytes: it was truncated")
            view, position = view[count:], position + count

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
