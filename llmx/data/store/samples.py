"""The sample store: prepared samples in a directory, memory-mapped, written once, atomically.

A sample is up to ``seq_len`` tokens of one or more examples. An example is one sequence (a
conversation, a document or a piece of one) or several that belong together (a pair); each sequence
is isolated from its neighbours. Files:

    tokens.bin         uint32  [tokens]       all sequences, in the order in which they were read
    targets.bin        uint8   [tokens]       1 where that token is to be predicted; or
    weight.bin         float32 [tokens]       its weight, where a task gives weights
    NAME.bin           of a column that a task adds: by token, by sequence or by example
    offsets.npy        int64   [sequences]    where the tokens of each sequence begin in the files
    sequences.npy      int64   [sequences+1]  its first token, counted over all samples
    examples.npy       int64   [examples+1]   the first sequence of each example
    samples.npy        int64   [samples+1]    the first example of each sample
    target_counts.npy  int64   [samples]      target tokens of each sample
    sample_weights.npy float64 [samples]      the sum of their weights, where there are weights
    meta.json          fingerprint, options, columns, counts, checksums

Sequences, examples and samples are numbered in the order of the samples. The first token of a
sequence counts as no target, whatever the file says: nothing stands before it.

``SampleStore.open(path)`` then ``store[i]``.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import WEIGHT, Column, Example, Schema, Tokens
from llmx.data.source.files import sha256_of_file
from llmx.data.store.packing import borders
from llmx.errors import ConfigError, DataError

STORE_FORMAT = 4
"""The version of the files. Data in another version is prepared again, under the same fingerprint
if the samples are the same."""
INDEX = ("samples", "examples", "sequences", "offsets", "target_counts")
WEIGHTS_FILE = "sample_weights.npy"


@dataclass(frozen=True)
class Sample:
    """One sample: n tokens of k sequences."""

    tokens: np.ndarray
    """uint32 [n]"""
    targets: np.ndarray
    """bool [n]: True where that token is to be predicted from those before it in its sequence.
    Never True at a sequence's first token, which has nothing before it."""
    sequence_starts: np.ndarray
    """int64 [k]: where each sequence begins; ``sequence_starts[0] == 0``."""
    weights: np.ndarray | None = None
    """float32 [n]: of each target, 0 elsewhere; None where every target counts 1."""
    example_starts: np.ndarray | None = None
    """int64 [examples]: the first sequence of each; None where each sequence is an example."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The task's columns: [n, ...], [k, ...] or [examples, ...]."""
    labels: np.ndarray | None = None
    """int64 [n]: the token to predict *at* each place, or -100, of a sample that a task has
    transformed; None: the token after it, where that is a target."""

    def sequences(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, targets) of each sequence."""
        for start, stop in self.bounds():
            yield self.tokens[start:stop], self.targets[start:stop]

    def bounds(self) -> Iterator[tuple[int, int]]:
        """The first token of each sequence, and the token after its last."""
        return itertools.pairwise([*self.sequence_starts.tolist(), len(self.tokens)])

    def example_sizes(self) -> list[int]:
        """The number of sequences of each example."""
        if self.example_starts is None:
            return [1] * len(self.sequence_starts)
        sizes: list[int] = np.diff(self.example_starts, append=len(self.sequence_starts)).tolist()
        return sizes


def in_memory(example: Example, schema: Schema, *, vocab_size: int) -> Sample:
    """A sample of one example that was never stored: generated tokens and their columns.

    Args:
        example: of ``Tokens`` alone, with the columns of ``schema`` (``Schema.checked``).

    Raises:
        ConfigError: what the task gave are no tokens, or no values of its columns.
    """
    kinds = {type(part).__name__ for part in example.sequences if not isinstance(part, Tokens)}
    if kinds:
        raise ConfigError(
            f"task={schema.task}: the sequences of generated examples are Tokens; rollout() gave "
            f"{', '.join(sorted(kinds))}."
        )
    parts = [
        schema.sequence(sequence, vocab_size=vocab_size)
        for sequence in example.sequences
        if isinstance(sequence, Tokens)
    ]
    starts = borders([len(part.tokens) for part in parts])[:-1]
    targets = np.concatenate([part.targets for part in parts])
    targets[starts] = 0  # nothing stands before the first token of a sequence
    columns = schema.values([(example, parts)])
    return Sample(
        tokens=np.concatenate([part.tokens for part in parts]),
        targets=targets != 0,
        sequence_starts=starts,
        weights=targets if schema.weighted else None,
        example_starts=np.zeros(1, np.int64) if len(parts) > 1 else None,
        columns={column.name: values for column, values in columns.items()},
    )


class SampleStore:
    """Read access to a prepared store. Cheap to open; safe to share between threads."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.fingerprint = str(meta["fingerprint"])
        """Hex digest of source bytes, tokenizer, template and every option that matters."""
        self.seq_len = int(meta["seq_len"])
        self.num_sequences = int(meta["num_sequences"])
        """The number of sequences in all samples."""
        self.columns = tuple(
            Column(**{**values, "shape": tuple(values["shape"])}) for values in meta["columns"]
        )
        """The task's columns, beside tokens and targets."""
        self._schema = schema = Schema(self.columns)
        arrays = [np.load(path / f"{name}.npy", mmap_mode="r") for name in INDEX]
        self._samples, self._examples, self._sequences, self._offsets, self._target_counts = arrays
        self._tokens = mapped(path / "tokens.bin", np.uint32, ())
        self._arrays = {
            column.name: mapped(path / f"{column.name}.bin", column.dtype, column.shape)
            for column in self.columns
        }
        self._of_targets: frozenset[str] = frozenset()
        """Columns by token whose arrays have a value for each target token, and no others."""
        if schema.weighted:
            self._targets = self._arrays[WEIGHT]
            self._weights = np.load(path / WEIGHTS_FILE, mmap_mode="r")
        else:
            self._targets = mapped(path / "targets.bin", np.uint8, ())
            self._weights = self._target_counts

    @classmethod
    def open(cls, path: Path | str) -> SampleStore:
        """Open a store; raises DataError if it is not one, is of another format version, or
        a file has not the size that ``meta.json`` records."""
        meta = read_meta(Path(path), version=STORE_FORMAT)
        return cls(Path(path), meta)

    @property
    def batch_columns(self) -> tuple[Column, ...] | None:
        """The ``columns`` for ``collate``; None if each example is one sequence without columns, so
        that batches need only tokens."""
        grouped = len(self._examples) != len(self._sequences)
        return self.columns if self.columns or grouped else None

    def with_columns(self, columns: Mapping[Column, np.ndarray]) -> SampleStore:
        """The same store with further columns, which ``columns`` maps to their values in the order
        of the store: of a column by token those of the target tokens, and the others are 0."""
        store = SampleStore(self.path, self.meta)
        store.columns = (*self.columns, *columns)
        Schema(store.columns)
        store._arrays = {**self._arrays, **{column.name: of for column, of in columns.items()}}
        by_token = {column.name for column in columns if column.per == "token"}
        store._of_targets = self._of_targets | by_token
        return store

    def values_of(self, column_name: str) -> np.ndarray:
        """All values of a column by sequence or by example, in the order of the store; of a
        precomputed one by token those of the target tokens."""
        return self._arrays[column_name]

    @functools.cached_property
    def _first_targets(self) -> np.ndarray:
        """int64 [samples + 1]: target tokens before each sample."""
        return borders(self._target_counts)

    def span(self, per: str, first: int, last: int) -> slice:
        """The sequences, the examples or the target tokens (``per``: ``target``) of the samples
        ``first`` to ``last - 1``."""
        if per == "target":
            return slice(int(self._first_targets[first]), int(self._first_targets[last]))
        low, high = int(self._samples[first]), int(self._samples[last])
        if per == "sequence":
            low, high = int(self._examples[low]), int(self._examples[high])
        return slice(low, high)

    def __len__(self) -> int:
        return len(self._target_counts)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in [0, {len(self)})")
        examples = self.span("example", index, index + 1)
        sequences = self.span("sequence", index, index + 1)
        first, last = sequences.start, sequences.stop
        starts = self._sequences[first : last + 1] - self._sequences[first]
        offsets = self._offsets[sequences]
        in_file = [slice(*span) for span in zip(offsets, offsets + np.diff(starts), strict=True)]

        def gathered(by_token: np.ndarray) -> np.ndarray:
            return np.concatenate([by_token[span] for span in in_file])

        targets = gathered(self._targets)
        targets[starts[:-1]] = 0
        columns: dict[str, np.ndarray] = {}
        for column in self.columns:
            if column.name == WEIGHT:
                continue
            stored = self._arrays[column.name]
            if column.per != "token":
                columns[column.name] = stored[examples if column.per == "example" else sequences]
            elif column.name in self._of_targets:
                values = np.zeros((len(targets), *column.shape), column.numpy_dtype)
                values[targets != 0] = stored[self.span("target", index, index + 1)]
                columns[column.name] = values
            else:
                columns[column.name] = gathered(stored)
        grouped = last - first != examples.stop - examples.start
        return Sample(
            tokens=gathered(self._tokens),
            targets=targets != 0,
            sequence_starts=starts[:-1],
            weights=targets if self._schema.weighted else None,
            example_starts=self._examples[examples] - first if grouped else None,
            columns=columns,
        )

    def num_target_tokens(self, index: int | np.ndarray) -> int:
        """Target tokens of one sample, or of all of several samples together. Known from the
        index, so every rank knows the targets of a whole step without communication."""
        return int(np.sum(self._target_counts[index]))

    def weight_of(self, index: int | np.ndarray) -> float:
        """Sum of the weights of the target tokens of one sample or of several together, from the
        index; their number where they have no weights."""
        return float(np.sum(self._weights[index]))

    def num_tokens(self, index: int | np.ndarray) -> int:
        """Tokens (there is no padding in the store) of one sample or of several together."""
        index = np.asarray(index)
        first, last = self._examples[self._samples[index]], self._examples[self._samples[index + 1]]
        return int(np.sum(self._sequences[last] - self._sequences[first]))

    def row_shapes(
        self, index: np.ndarray, *, packed: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Three lists over the samples: lines in a micro batch, tokens of the longest line, and the
        sum of the squared lengths of the sequences. ``packed``: one line per sample, else one per
        sequence."""
        lines, lengths, squares = [], [], []
        for sample in np.asarray(index).tolist():
            span = self.span("sequence", sample, sample + 1)
            sizes = np.diff(self._sequences[span.start : span.stop + 1])
            lines.append(1 if packed else len(sizes))
            lengths.append(int(sizes.sum() if packed else sizes.max()))
            squares.append(int(np.dot(sizes, sizes)))
        return lines, lengths, squares

    def num_examples(self, index: int | np.ndarray) -> int:
        """Examples of one sample or of several together."""
        index = np.asarray(index)
        return int(np.sum(self._samples[index + 1] - self._samples[index]))

    def verify(self) -> None:
        """Compare every file with its checksum; raises DataError that names the damaged one."""
        check_sums(self.path, self.meta)


def publish(path: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Let ``fill`` write files into a directory that appears as ``path``, whole or not at all.

    ``fill`` gets an empty directory and returns what ``meta.json`` holds beside sizes and
    checksums, with ``sha256`` of the files that it summed as it wrote them. If another process
    made ``path`` in the meantime (same name, so same content), ours is thrown away and theirs is
    used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        temporary.mkdir()
        meta = fill(temporary)
        names = sorted(file.name for file in temporary.iterdir())
        digests = meta.pop("sha256", {})
        whole_meta = {
            **meta,
            "file_bytes": {name: (temporary / name).stat().st_size for name in names},
            "sha256": {
                name: digests.get(name) or sha256_of_file(temporary / name) for name in names
            },
        }
        text = json.dumps(whole_meta, indent=2, ensure_ascii=False) + "\n"
        (temporary / "meta.json").write_text(text, encoding="utf-8")
        for name in [*names, "meta.json", "."]:
            _fsync(temporary / name)
        try:
            temporary.rename(path)
        except OSError:
            if not (path / "meta.json").exists():
                raise
        _fsync(path.parent)
    except OSError as error:
        raise cannot_write(path.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The values in a file, each of this shape, memory-mapped."""
    if not path.stat().st_size:  # mmap refuses an empty file
        return np.zeros((0, *shape), dtype)
    return np.memmap(path, dtype, "r").reshape(-1, *shape)


def read_meta(path: Path, *, version: int) -> dict[str, Any]:
    """The ``meta.json`` of a published directory.

    Raises DataError where there is none, or of another format version, or where a file has not the
    size that it records.
    """
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(
            f"{path} is not a prepared data store ({error}). "
            "Remove the directory; it is prepared again at the next run."
        ) from error
    if meta.get("format_version") != version:
        raise DataError(
            f"{path} has store format {meta.get('format_version')}, this version of llmx "
            f"reads {version}. Remove the directory; it is prepared again."
        )
    for name, size in meta["file_bytes"].items():
        actual_size = (path / name).stat().st_size if (path / name).exists() else None
        if actual_size != size:
            raise DataError(
                f"{path / name} has {actual_size} bytes, {size} were written: the store is "
                "damaged. Remove the directory; it is prepared again."
            )
    return meta


def check_sums(path: Path, meta: Mapping[str, Any]) -> None:
    """Raise DataError where a file has not the checksum that ``meta.json`` records."""
    for name, digest in meta["sha256"].items():
        if sha256_of_file(path / name) != digest:
            raise DataError(
                f"{path / name} does not have its recorded checksum: the store is damaged. Remove "
                "the directory; it is prepared again."
            )


def cannot_write(directory: Path, error: OSError) -> DataError:
    """The error for a full disk, or one without permission to write."""
    return DataError(
        f"Cannot write prepared data to {directory}: {error}. "
        "Free some space, or set data.cache_dir to another disk."
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a store that is being prepared, so that a second process waits and
    then finds it done. The kernel releases it when its holder dies, however it dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.with_name(f"{path.name}.lock").open("a")
    except OSError as error:
        raise DataError(
            f"Cannot write to {path.parent}: {error}. Set data.cache_dir (or LLMX_CACHE) to a "
            "directory that you may write to."
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            # Whoever holds the lock is alone: parts left by a killed process can go.
            for left in path.parent.glob(f"{path.name}.tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            # Closing is not enough: a child forked meanwhile would hold the lock on.
            fcntl.flock(stream, fcntl.LOCK_UN)


def save_index(
    directory: Path, index: Mapping[str, Any], weights: np.ndarray | None
) -> dict[str, Any]:
    """Write the index of a store, an array for each of ``INDEX``, and the weight of each sample;
    returns its counts, for meta.json."""
    for name in INDEX:
        np.save(directory / f"{name}.npy", np.asarray(index[name], np.int64))
    counts: dict[str, Any] = {
        "num_samples": len(index["target_counts"]),
        "num_examples": len(index["examples"]) - 1,
        "num_sequences": len(index["sequences"]) - 1,
        "num_tokens": int(index["sequences"][-1]),
        "num_target_tokens": int(np.sum(index["target_counts"])),
    }
    if weights is not None:
        np.save(directory / WEIGHTS_FILE, weights)
        counts["target_weight"] = float(np.sum(weights))
    return counts


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
