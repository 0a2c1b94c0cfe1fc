"""Writes tokenized examples once, in the order in which they are read, and packs them by an index.

Packing needs the length of every example before it can place the first one. So tokens, targets and
columns by token stay where they were appended, and the index says where each sequence of a sample
begins. Only the columns by sequence and by example, which are small, are put into the order of the
samples.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import WEIGHT, Column, EncodedExample, Schema
from llmx.data.store.packing import PACKERS, borders, of_sequences
from llmx.data.store.samples import save_index

CHUNK_TOKENS = 1 << 20
"""Tokens whose targets are counted at once."""
CHUNK_ROWS = 1 << 16
"""Values by sequence or by example that are moved at once."""


class Writer:
    """Appends examples to the files of a store in ``directory``; then ``pack`` writes its index."""

    def __init__(self, directory: Path, columns: tuple[Column, ...], *, task: str) -> None:
        self._directory = directory
        self._schema = Schema(columns, task)
        self._targets = WEIGHT if self._schema.weighted else "targets"
        self._target_type: type = np.float32 if self._schema.weighted else np.uint8
        file_names = dict.fromkeys(["tokens", self._targets, *(column.name for column in columns)])
        self._streams = {name: self._path(name).open("wb") for name in file_names}
        self._digests = {name: hashlib.sha256() for name in file_names}
        self.lengths = array("q")
        """Tokens of each sequence."""
        self._sizes = array("i")
        """Sequences of each example; empty as long as each has one."""
        self.bytes = 0
        """Bytes that were written."""

    @property
    def example_lengths(self) -> np.ndarray:
        """The number of tokens of each example, int64."""
        lengths = np.frombuffer(self.lengths, np.int64)
        if not self._sizes:
            return lengths
        return np.add.reduceat(lengths, borders(np.frombuffer(self._sizes, np.int32))[:-1])

    def append(self, examples: Sequence[EncodedExample]) -> int:
        """Append examples with the tokens of their sequences; returns the number of tokens."""
        sequences = [sequence for _, parts in examples for sequence in parts]
        if not sequences:
            return 0
        lengths = [len(sequence.tokens) for sequence in sequences]
        self._write("tokens", [sequence.tokens for sequence in sequences], np.uint32)
        self._write(self._targets, [sequence.targets for sequence in sequences], self._target_type)
        if self._schema.columns:
            for column, values in self._schema.values(examples).items():
                self._write(column.name, [values], column.numpy_dtype)
        is_grouped = len(sequences) > len(examples)
        if is_grouped and not self._sizes:
            self._sizes = array("i", [1]) * len(self.lengths)
        if is_grouped or self._sizes:
            self._sizes.extend(len(parts) for _, parts in examples)
        self.lengths.extend(lengths)
        return sum(lengths)

    def pack(self, packing: str, *, seq_len: int) -> dict[str, Any]:
        """Close the files and write the index; returns counts and checksums for ``meta.json``.
        ``packing`` is ``data.packing``."""
        for stream in self._streams.values():
            stream.close()
        lengths = np.frombuffer(self.lengths, np.int64)
        packed = PACKERS[packing](self.example_lengths, capacity=seq_len)
        if self._sizes:
            sizes = np.frombuffer(self._sizes, np.int32).astype(np.int64)
            sequences, examples = of_sequences(packed.items, sizes)
            offsets, lengths = borders(lengths)[sequences], lengths[sequences]
        else:
            sequences, examples = packed.items, np.arange(len(packed.items) + 1)
            offsets = borders(lengths)[sequences] + packed.starts
            lengths = packed.stops - packed.starts
        for per, order in (("sequence", sequences), ("example", packed.items)):
            for column in self._schema.per(per):
                self._reorder(column, order)
        counts, weights = self._sums(offsets, lengths, seq_len=seq_len)
        firsts = examples[packed.samples[:-1]]
        arrays = {
            "samples": packed.samples,
            "examples": examples,
            "sequences": borders(lengths),
            "offsets": offsets,
            "target_counts": np.add.reduceat(counts, firsts),
        }
        sums = None if weights is None else np.add.reduceat(weights, firsts)
        index = save_index(self._directory, arrays, sums)
        digests = {f"{name}.bin": digest.hexdigest() for name, digest in self._digests.items()}
        return {**index, "sha256": digests}

    def discard(self) -> None:
        """Close the files; on a full disk their last bytes cannot be written."""
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                stream.close()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.bin"

    def _write(self, name: str, parts: Sequence[np.ndarray], dtype: Any) -> None:
        """Append values to the file of a column."""
        values = np.concatenate(parts, dtype=dtype, casting="unsafe")
        if values.size:  # memoryview refuses an empty array
            content = values.data.cast("B")
            self._streams[name].write(content)
            self._digests[name].update(content)
            self.bytes += len(content)

    def _reorder(self, column: Column, items: np.ndarray) -> None:
        """Put the values of a column into the order of the samples."""
        path = self._path(column.name)
        values = np.memmap(path, column.numpy_dtype, "r").reshape(-1, *column.shape)
        reordered = path.with_suffix(".reordered")
        with reordered.open("wb") as stream:
            for start in range(0, len(items), CHUNK_ROWS):
                stream.write(values[items[start : start + CHUNK_ROWS]].tobytes())
        reordered.replace(path)
        del self._digests[column.name]  # of the other order

    def _sums(
        self, offsets: np.ndarray, sizes: np.ndarray, *, seq_len: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The target tokens of each sequence of the samples, and the sum of their weights where
        there are weights. The first token of a sequence is no target: nothing stands before it."""
        stored = np.memmap(self._path(self._targets), self._target_type, "r")
        counts = np.zeros(len(offsets), np.int64)
        weights = np.zeros(len(offsets), np.float64) if self._schema.weighted else None
        in_file = np.argsort(offsets, kind="stable")  # where they lie one after the other
        step = max(1, CHUNK_TOKENS // seq_len)
        for start in range(0, len(offsets), step):
            chosen = in_file[start : start + step]
            begin, end = int(offsets[chosen[0]]), int(offsets[chosen[-1]] + sizes[chosen[-1]])
            targets, firsts = np.array(stored[begin:end]), offsets[chosen] - begin
            targets[firsts] = 0
            counts[chosen] = np.add.reduceat(targets != 0, firsts, dtype=np.int64)
            if weights is not None:
                weights[chosen] = np.add.reduceat(targets, firsts, dtype=np.float64)
        return counts, weights
