"""The sample store: prepared samples in a directory, memory-mapped, written once, atomically.

A sample is up to ``seq_len`` tokens made of one or more rows (a row is a conversation, a
document or a piece of one), each isolated from its neighbours. Files:

    tokens.bin        uint32 [num_tokens]     all samples, one after the other
    targets.bin       uint8  [num_tokens]     1 where that token is to be predicted
    samples.npy       int64  [num_samples+1]  where each sample starts in tokens.bin
    rows.npy          int64  [num_rows+1]     where each row starts in tokens.bin
    sample_rows.npy   int64  [num_samples+1]  the first row of each sample
    target_counts.npy int64  [num_samples]    targets of each sample
    meta.json         fingerprint, options, counts, checksums

``SampleStore.open(path)`` then ``store[i]``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmx.errors import DataError

FORMAT_VERSION = 1
INDEX_FILES = ("samples.npy", "rows.npy", "sample_rows.npy", "target_counts.npy")


@dataclass(frozen=True)
class Sample:
    """One sample: n tokens of k rows."""

    tokens: np.ndarray
    """uint32 [n]"""
    targets: np.ndarray
    """bool [n]: True where that token is to be predicted from those before it in its row.
    Never True at a row's first token, which has nothing before it."""
    row_starts: np.ndarray
    """int64 [k]: where each row begins; ``row_starts[0] == 0``."""

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, targets) of each row."""
        borders = [*self.row_starts.tolist(), len(self.tokens)]
        for start, stop in itertools.pairwise(borders):
            yield self.tokens[start:stop], self.targets[start:stop]


class SampleStore:
    """Read access to a prepared store. Cheap to open; safe to share between threads."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        num_tokens = int(meta["num_tokens"])
        self._tokens = _memory_map(path / "tokens.bin", np.uint32, num_tokens)
        self._targets = _memory_map(path / "targets.bin", np.uint8, num_tokens)
        arrays = [np.load(path / name, mmap_mode="r") for name in INDEX_FILES]
        self._samples, self._rows, self._sample_rows, self._target_counts = arrays

    @classmethod
    def open(cls, path: Path | str) -> SampleStore:
        """Open a store; raises DataError if it is not one, is of another format version, or
        a file has not the size that ``meta.json`` records."""
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise DataError(
                f"{path} is not a prepared data store ({error}). "
                "Remove the directory; it is prepared again at the next run."
            ) from error
        if meta.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"{path} has format {meta.get('format_version')}, this llmx reads "
                f"{FORMAT_VERSION}. Remove the directory; it is prepared again."
            )
        for name, size in meta["file_bytes"].items():
            found = (path / name).stat().st_size if (path / name).exists() else None
            if found != size:
                raise DataError(
                    f"{path / name} has {found} bytes, {size} were written: the store is "
                    "damaged. Remove the directory; it is prepared again."
                )
        return cls(path, meta)

    @property
    def fingerprint(self) -> str:
        """Hex digest of source bytes, tokenizer, template and every option that matters."""
        return str(self.meta["fingerprint"])

    @property
    def seq_len(self) -> int:
        return int(self.meta["seq_len"])

    @property
    def num_rows(self) -> int:
        return len(self._rows) - 1

    def __len__(self) -> int:
        return len(self._target_counts)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in [0, {len(self)})")
        start, stop = int(self._samples[index]), int(self._samples[index + 1])
        first, last = int(self._sample_rows[index]), int(self._sample_rows[index + 1])
        return Sample(
            tokens=self._tokens[start:stop],
            targets=self._targets[start:stop].view(np.bool_),
            row_starts=self._rows[first:last] - start,
        )

    def num_target_tokens(self, index: int | np.ndarray) -> int:
        """Target tokens of one sample, or of all of several samples together. Known from the
        index, so every rank knows the targets of a whole step without communication."""
        return int(np.sum(self._target_counts[index]))

    def num_tokens(self, index: int | np.ndarray) -> int:
        """Tokens (there is no padding in the store) of one sample or of several together."""
        index = np.asarray(index)
        return int(np.sum(self._samples[index + 1] - self._samples[index]))

    def verify(self) -> None:
        """Compare every file with its checksum; raises DataError that names the damaged one."""
        for name, digest in self.meta["sha256"].items():
            if sha256_of_file(self.path / name) != digest:
                raise DataError(
                    f"{self.path / name} does not have its recorded checksum: the store is "
                    "damaged. Remove the directory; it is prepared again."
                )


def write_store(
    path: Path, samples: Iterable[Sample], *, fingerprint: str, seq_len: int, meta: dict[str, Any]
) -> SampleStore:
    """Write a store of these samples, which are streamed: memory holds the indices only."""
    return publish(
        path,
        lambda directory: _write_arrays(directory, samples),
        fingerprint=fingerprint,
        seq_len=seq_len,
        meta=meta,
    )


def publish(
    path: Path,
    fill: Callable[[Path], dict[str, Any]],
    *,
    fingerprint: str,
    seq_len: int,
    meta: dict[str, Any],
) -> SampleStore:
    """Let ``fill`` write the arrays of a store, so that ``path`` appears whole or not at all.

    ``fill`` gets an empty directory and returns the counts, with ``sha256`` of the files that it
    summed as it wrote them. If another process made ``path`` in the meantime (same name, so same
    content), ours is thrown away and theirs is used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        temporary.mkdir()
        counts = fill(temporary)
        names = ["tokens.bin", "targets.bin", *INDEX_FILES]
        digests = counts.pop("sha256", {})
        whole_meta = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "seq_len": seq_len,
            **counts,
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
    return SampleStore.open(path)


def cannot_write(directory: Path, error: OSError) -> DataError:
    """For a disk that is full or not ours; what was prepared before is untouched."""
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


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_arrays(directory: Path, samples: Iterable[Sample]) -> dict[str, Any]:
    sample_starts, row_starts, sample_rows, target_counts = [0], [], [0], []
    with (
        (directory / "tokens.bin").open("wb") as tokens,
        (directory / "targets.bin").open("wb") as targets,
    ):
        for sample in samples:
            start = sample_starts[-1]
            tokens.write(np.ascontiguousarray(sample.tokens, dtype=np.uint32).tobytes())
            targets.write(np.ascontiguousarray(sample.targets, dtype=np.uint8).tobytes())
            sample_starts.append(start + len(sample.tokens))
            row_starts += (sample.row_starts + start).tolist()
            sample_rows.append(len(row_starts))
            target_counts.append(int(np.count_nonzero(sample.targets)))
    row_starts.append(sample_starts[-1])
    for name, values in zip(
        INDEX_FILES, (sample_starts, row_starts, sample_rows, target_counts), strict=True
    ):
        np.save(directory / name, np.asarray(values, dtype=np.int64))
    return {
        "num_samples": len(target_counts),
        "num_rows": len(row_starts) - 1,
        "num_tokens": sample_starts[-1],
        "num_target_tokens": sum(target_counts),
    }


def _memory_map(path: Path, dtype: type, length: int) -> np.ndarray:
    if length == 0:  # mmap refuses an empty file
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
