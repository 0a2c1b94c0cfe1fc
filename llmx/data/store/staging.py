"""Tokenized examples on their way into samples: on disk, so that memory stays flat.

Packing needs the length of every example before it can place the first one. So examples are
written as they come, only their lengths are kept, and the samples are gathered afterwards; where
the packing keeps the order, the file of the tokens simply becomes the store's.

Every now and then the state is noted in ``journal.json``: after a kill, the next preparation of
the same store resumes there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmx.data.examples import WEIGHT, Column, Schema
from llmx.data.store.packing import PACKERS, Packing, of_sequences
from llmx.data.store.samples import save_index
from llmx.data.tokenize.documents import TokenBlock
from llmx.run.rundir import write_json

JOURNAL_BYTES = 64 << 20
"""Bytes of tokens after which the state is noted."""
CHUNK_TOKENS = 1 << 18
"""Tokens that are gathered at once."""


@dataclass(frozen=True)
class _Layout:
    """The places of all sequences and samples in the store."""

    packing: Packing
    """The packing of the sequences."""
    pieces: np.ndarray
    """[sequences + 1]: the first token of each sequence in the store."""
    samples: np.ndarray
    """[samples + 1]: the first sequence of each sample."""
    ends: np.ndarray
    """[samples + 1]: the first token of each sample."""
    sources: np.ndarray | None
    """[sequences]: the first token of each in the staged files; None where that is the order."""


class Staging:
    """Examples in files of ``directory``; append all, then gather once."""

    def __init__(self, directory: Path, columns: tuple[Column, ...] = ()) -> None:
        self.directory = directory
        self.columns = columns
        self._schema = schema = Schema(columns)
        self._targets_name = WEIGHT if schema.weighted else "targets"
        # Bytes of one value in each file.
        self._files = {"tokens": 4, self._targets_name: 4 if schema.weighted else 1, "lengths": 8}
        self._files["sizes"] = 4
        self._files |= {column.name: column.value_bytes for column in columns}
        directory.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, Any] = self._recorded()
        """The state that was recorded last; empty at a new start."""
        noted = self.state.get("files", dict.fromkeys(self._files, 0))
        for name in self._files:
            with self._path(name).open("ab") as stream:
                stream.truncate(noted[name])
        self.lengths = array("q", self._path("lengths").read_bytes())
        """Tokens of each sequence."""
        self.sizes = array("i", self._path("sizes").read_bytes())
        """Sequences of each example; empty as long as each has one."""
        self._journalled = noted["tokens"]
        self._written = {"lengths": len(self.lengths), "sizes": len(self.sizes)}
        self._digest = _Digest()
        with self._path("tokens").open("rb") as stream:
            while piece := stream.read(1 << 20):
                self._digest.update(piece)
        self._streams = {
            name: self._path(name).open("ab")
            for name in self._files
            if name not in ("lengths", "sizes")
        }

    @property
    def example_lengths(self) -> np.ndarray:
        """The number of tokens of each example, int64."""
        lengths = np.frombuffer(self.lengths, np.int64)
        if not self.sizes:
            return lengths
        sizes = np.frombuffer(self.sizes, np.int32).astype(np.int64)
        return np.add.reduceat(lengths, np.cumsum(sizes) - sizes)

    def append(self, block: TokenBlock) -> None:
        """Append the examples of a block to the staged files."""
        if not len(block.lengths):
            return
        tokens = np.ascontiguousarray(block.tokens, dtype=np.uint32).data.cast("B")
        self._streams["tokens"].write(tokens)
        self._digest.update(tokens)
        kind = np.float32 if self._schema.weighted else np.bool_
        self._streams[self._targets_name].write(_bytes(block.targets.astype(kind, copy=False)))
        for column, values in block.columns.items():
            self._streams[column.name].write(_bytes(values))
        is_grouped = block.sizes is not None and int(block.sizes.max()) > 1
        if is_grouped and not self.sizes:
            self.sizes = array("i", np.ones(len(self.lengths), np.int32).tobytes())
        if is_grouped or self.sizes:
            one_each = np.ones(len(block.lengths))
            sizes = one_each if block.sizes is None else block.sizes
            self.sizes.frombytes(sizes.astype(np.int32).tobytes())
        self.lengths.frombytes(np.ascontiguousarray(block.lengths, np.int64).tobytes())

    def record(self, state: dict[str, Any]) -> None:
        """Record the state, if much was written since the last time: from here it resumes."""
        if self._streams["tokens"].tell() - self._journalled < JOURNAL_BYTES:
            return
        for stream in self._streams.values():
            _to_disk(stream)
        # Sizes begin late where all were 1 before.
        for name, values in (("lengths", self.lengths), ("sizes", self.sizes)):
            with self._path(name).open("r+b") as file:
                file.seek(self._files[name] * self._written[name])
                file.write(values[self._written[name] :].tobytes())
                _to_disk(file)
        self._written = {"lengths": len(self.lengths), "sizes": len(self.sizes)}
        sizes = {name: self._path(name).stat().st_size for name in self._files}
        write_json(self._journal, {**state, "files": sizes})
        self._journalled = sizes["tokens"]

    def gather(self, directory: Path, *, packing: str, seq_len: int) -> dict[str, Any]:
        """Pack the examples, and write the arrays of a store into ``directory``; returns its counts
        and checksums. ``packing`` is ``data.packing``.

        The first token of a sequence is never a target: nothing stands before it in its sequence
        that it could be predicted from.
        """
        self.close()
        packed = PACKERS[packing](self.example_lengths, capacity=seq_len)
        digests = self._write_by_example(packed, directory)
        layout = self._layout(packed)
        digests["tokens.bin"] = self._write_tokens(layout, directory)
        for column in self._schema.per("token"):
            name = f"{column.name}.bin"
            digests[name] = hashlib.sha256()
            with (directory / name).open("wb") as stream:
                for values in self._chunks(column.name, column.numpy_dtype, column.shape, layout):
                    _written(stream, values, digests[name])
        counts = np.zeros(len(packed), np.int64)
        weights = np.zeros(len(packed), np.float64)
        weighted = self._schema.weighted
        name = f"{self._targets_name}.bin"
        digests[name] = hashlib.sha256()
        ends, pieces = layout.ends, layout.pieces
        sample = position = 0
        with (directory / name).open("wb") as stream:
            kind = np.float32 if weighted else np.uint8
            for targets in self._chunks(self._targets_name, kind, (), layout):
                stop = position + len(targets)
                low, high = np.searchsorted(pieces, [position, stop])
                targets[pieces[low:high] - position] = 0
                _written(stream, targets, digests[name])
                last = int(np.searchsorted(ends, stop))
                sums = np.concatenate([[0], np.cumsum(targets != 0, dtype=np.int64)])
                counts[sample:last] = np.diff(sums[ends[sample : last + 1] - position])
                if weighted:
                    # Sample by sample, so that a sum is the same whatever stands beside it.
                    starts = ends[sample:last] - position
                    weights[sample:last] = np.add.reduceat(targets.astype(np.float64), starts)
                position, sample = stop, last
        if layout.packing.examples is None:
            examples: np.ndarray = np.arange(len(pieces), dtype=np.int64)
        else:
            examples = layout.packing.examples
        index = save_index(
            directory,
            samples=packed.samples,
            examples=examples,
            sequences=pieces,
            target_counts=counts,
            weights=weights if weighted else None,
        )
        return {**index, "sha256": {name: digest.hexdigest() for name, digest in digests.items()}}

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def remove(self) -> None:
        """Close the files and delete them."""
        for stream in self._streams.values():
            # On a full disk the last bytes cannot be flushed, and nobody wants them.
            with contextlib.suppress(OSError):
                stream.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def abandon(self) -> None:
        """Close what can be closed: on a full disk the last bytes cannot be flushed."""
        for stream in self._streams.values():
            for _ in range(2):  # what could not be flushed is dropped by the second
                with contextlib.suppress(OSError):
                    stream.close()

    @property
    def _journal(self) -> Path:
        return self.directory / "journal.json"

    def _path(self, name: str) -> Path:
        return self.directory / f"staged.{name}"

    def _recorded(self) -> dict[str, Any]:
        """The journal, if the files still hold what it says."""
        try:
            note: dict[str, Any] = json.loads(self._journal.read_text(encoding="utf-8"))
            sizes = {name: self._path(name).stat().st_size for name in self._files}
            is_complete = all(sizes[name] >= note["files"][name] for name in self._files)
        except (OSError, ValueError, KeyError):
            return {}
        return note if is_complete else {}

    def _layout(self, packing: Packing) -> _Layout:
        lengths = np.frombuffer(self.lengths, np.int64)
        if self.sizes:
            sizes = np.frombuffer(self.sizes, np.int32).astype(np.int64)
            packing = of_sequences(packing, lengths, sizes)
        pieces = np.zeros(len(packing.items) + 1, np.int64)
        np.cumsum(packing.stops - packing.starts, out=pieces[1:])
        samples = packing.samples
        if packing.examples is not None:
            samples = packing.examples[samples]
        sources = None
        if not packing.in_order:
            starts = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=starts[1:])
            sources = starts[packing.items]
            sources += packing.starts
        return _Layout(packing, pieces, samples, pieces[samples], sources)

    def _write_tokens(self, layout: _Layout, directory: Path) -> Any:
        """Write ``tokens.bin``; returns its digest."""
        if layout.packing.in_order:
            total = int(layout.pieces[-1])
            digest = self._digest.of(4 * total)
            os.truncate(self._path("tokens"), 4 * total)
            os.link(self._path("tokens"), directory / "tokens.bin")
            return digest
        digest = hashlib.sha256()
        with (directory / "tokens.bin").open("wb") as stream:
            for tokens in self._chunks("tokens", np.uint32, (), layout):
                _written(stream, tokens, digest)
        return digest

    def _write_by_example(self, packing: Packing, directory: Path) -> dict[str, Any]:
        """Write the columns by sequence and by example, in their new order."""
        digests: dict[str, Any] = {}
        orders = {"example": packing.items, "sequence": packing.items}
        if self.sizes:
            sizes = np.frombuffer(self.sizes, np.int32).astype(np.int64)
            lengths = np.frombuffer(self.lengths, np.int64)
            orders["sequence"] = of_sequences(packing, lengths, sizes).items
        for kind, order in orders.items():
            for column in self._schema.per(kind):
                name = f"{column.name}.bin"
                digests[name] = hashlib.sha256()
                shape = (-1, *column.shape)
                values = np.memmap(self._path(column.name), column.numpy_dtype, "r").reshape(shape)
                with (directory / name).open("wb") as stream:
                    for start in range(0, len(order), CHUNK_TOKENS):
                        chosen = values[order[start : start + CHUNK_TOKENS]]
                        _written(stream, chosen, digests[name])
        return digests

    def _chunks(
        self, name: str, dtype: Any, shape: tuple[int, ...], layout: _Layout
    ) -> Iterator[np.ndarray]:
        """Values by token in the order of the samples, whole samples at a time."""
        path = self._path(name)
        if not path.stat().st_size:
            return
        stored = np.memmap(path, dtype=dtype, mode="r")
        values = stored.reshape(-1, *shape)
        samples, ends, pieces = layout.samples, layout.ends, layout.pieces
        first = 0
        while first < len(samples) - 1:
            chunk_end = ends[first] + CHUNK_TOKENS
            last = max(first + 1, int(np.searchsorted(ends, chunk_end, side="right")) - 1)
            if layout.sources is None:
                yield np.array(values[ends[first] : ends[last]])
            else:
                low, high = int(samples[first]), int(samples[last])
                sizes = np.diff(pieces[low : high + 1])
                offsets = layout.sources[low:high] - (pieces[low:high] - pieces[low])
                index = np.repeat(offsets, sizes) + np.arange(int(sizes.sum()))
                yield values[index]
            # What was read is not needed again: the process must not grow with the file.
            stored._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
            first = last


class _Digest:
    """SHA-256 of a file as it is written, of which the last bytes may still be cut off."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self._last = b""

    def update(self, piece: Any) -> None:
        self._digest.update(self._last)
        self._digest.update(piece[:-4])
        self._last = bytes(piece[-4:])
        self._size += len(piece)

    def of(self, size: int) -> Any:
        """The digest of the first ``size`` bytes: all of them, or all but one token."""
        if size == self._size:
            self._digest.update(self._last)
        elif size != self._size - len(self._last):
            raise AssertionError(f"digest of {size} bytes, {self._size} were written")
        return self._digest


def _bytes(values: np.ndarray) -> Any:
    if not values.size:  # memoryview refuses it
        return b""
    return np.ascontiguousarray(values).data.cast("B")


def _written(stream: IO[bytes], values: np.ndarray, digest: Any) -> None:
    content = _bytes(values)
    stream.write(content)
    digest.update(content)


def _to_disk(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
