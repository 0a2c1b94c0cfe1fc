"""Tokenized rows on their way into samples: on disk, so that memory stays flat.

Packing needs every row's length before it can place the first one. So rows are written as
they come, only their lengths are kept, and the samples are gathered afterwards; where the
packing keeps the order of the rows, the file of their tokens simply becomes the store's.

Every now and then the state is noted in ``journal.json``: after a kill, the next preparation of
the same store goes on from there.
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
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmx.data.encode import TokenBlock
from llmx.data.pack import Packing
from llmx.data.store import INDEX_FILES
from llmx.rundir import write_json

JOURNAL_BYTES = 64 << 20
"""Bytes of tokens after which the state is noted."""
CHUNK_TOKENS = 1 << 18
"""Tokens that are gathered at once."""
_FILES = {"tokens": 4, "targets": 1, "lengths": 8}
"""Files of a spool, with bytes of one value."""


class Spool:
    """Rows in files of ``directory``; append all, then gather once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.note: dict[str, Any] = self._recorded()
        """What the caller noted last; empty at a new start."""
        sizes = self.note.get("spool", dict.fromkeys(_FILES, 0))
        for name in _FILES:
            with self._path(name).open("ab") as stream:
                stream.truncate(sizes[name])
        self.lengths = array("q", self._path("lengths").read_bytes())
        """Tokens of each row."""
        self._journalled = sizes["tokens"]
        self._lengths_written = max(0, len(self.lengths) - 1)
        self._digest = _Digest()
        with self._path("tokens").open("rb") as stream:
            while piece := stream.read(1 << 20):
                self._digest.update(piece)
        self._tokens = self._path("tokens").open("ab")
        self._targets = self._path("targets").open("ab")

    def append(self, block: TokenBlock, *, joins: bool = False) -> None:
        """Add rows. ``joins``: the first is the rest of the row that was added last."""
        if not len(block.lengths):
            return
        tokens = np.ascontiguousarray(block.tokens, dtype=np.uint32).data.cast("B")
        self._tokens.write(tokens)
        self._digest.update(tokens)
        self._targets.write(np.ascontiguousarray(block.targets).view(np.uint8).data)
        if joins:
            self.lengths[-1] += int(block.lengths[0])
        lengths = np.ascontiguousarray(block.lengths[int(joins) :], np.int64)
        self.lengths.frombytes(lengths.tobytes())

    def keep(self, note: dict[str, Any]) -> None:
        """Note the state, if much was written since the last time: from here it goes on."""
        if self._tokens.tell() - self._journalled < JOURNAL_BYTES:
            return
        for stream in (self._tokens, self._targets):
            _to_disk(stream)
        with self._path("lengths").open("r+b") as stream:
            # The last row may have grown since.
            stream.seek(8 * self._lengths_written)
            stream.write(self.lengths[self._lengths_written :].tobytes())
            _to_disk(stream)
        self._lengths_written = max(0, len(self.lengths) - 1)
        sizes = {name: self._path(name).stat().st_size for name in _FILES}
        sizes["lengths"] = 8 * len(self.lengths)
        write_json(self._journal, {**note, "spool": sizes})
        self._journalled = sizes["tokens"]

    def gather(self, packing: Packing, directory: Path) -> dict[str, Any]:
        """Write the arrays of a store into ``directory``; returns its counts and checksums.

        A piece's first token is never a target: nothing stands before it in its sample that it
        could be predicted from.
        """
        self.close()
        pieces = np.zeros(len(packing.rows) + 1, np.int64)
        np.cumsum(packing.stops - packing.starts, out=pieces[1:])
        samples = pieces[packing.samples]
        sources = None if packing.in_order else self._sources(packing)
        digests = {"targets.bin": hashlib.sha256()}
        if packing.in_order:
            total = int(pieces[-1])
            digests["tokens.bin"] = self._digest.of(4 * total)
            os.truncate(self._path("tokens"), 4 * total)
            os.link(self._path("tokens"), directory / "tokens.bin")
        else:
            digests["tokens.bin"] = hashlib.sha256()
            with (directory / "tokens.bin").open("wb") as stream:
                for tokens in self._pieces(
                    "tokens", np.uint32, sources, pieces, packing.samples, samples
                ):
                    stream.write(tokens.data)
                    digests["tokens.bin"].update(tokens.data)
        counts = np.zeros(len(packing), np.int64)
        sample = 0
        with (directory / "targets.bin").open("wb") as stream:
            chunks = self._pieces("targets", np.uint8, sources, pieces, packing.samples, samples)
            position = 0
            for targets in chunks:
                stop = position + len(targets)
                low, high = np.searchsorted(pieces, [position, stop])
                targets[pieces[low:high] - position] = 0
                stream.write(targets.data)
                digests["targets.bin"].update(targets.data)
                last = int(np.searchsorted(samples, stop))
                sums = np.concatenate([[0], np.cumsum(targets, dtype=np.int64)])
                counts[sample:last] = np.diff(sums[samples[sample : last + 1] - position])
                position, sample = stop, last
        arrays = (samples, pieces, packing.samples, counts)
        for name, values in zip(INDEX_FILES, arrays, strict=True):
            np.save(directory / name, values)
        return {
            "num_samples": len(packing),
            "num_rows": len(packing.rows),
            "num_tokens": int(pieces[-1]),
            "num_target_tokens": int(counts.sum()),
            "sha256": {name: digest.hexdigest() for name, digest in digests.items()},
        }

    def close(self) -> None:
        self._tokens.close()
        self._targets.close()

    def remove(self) -> None:
        """Throw the rows away."""
        for stream in (self._tokens, self._targets):
            # On a full disk the last bytes cannot be flushed, and nobody wants them.
            with contextlib.suppress(OSError):
                stream.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _journal(self) -> Path:
        return self.directory / "journal.json"

    def _path(self, name: str) -> Path:
        return self.directory / f"rows.{name}"

    def _recorded(self) -> dict[str, Any]:
        """The journal, if the files still hold what it says."""
        try:
            note: dict[str, Any] = json.loads(self._journal.read_text(encoding="utf-8"))
            sizes = {name: self._path(name).stat().st_size for name in _FILES}
        except (OSError, ValueError):
            return {}
        whole = all(sizes[name] >= note["spool"][name] for name in _FILES)
        return note if whole else {}

    def _sources(self, packing: Packing) -> np.ndarray:
        """Where each piece begins in the files, in tokens."""
        row_starts = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(np.frombuffer(self.lengths, np.int64), out=row_starts[1:])
        sources = row_starts[packing.rows]
        sources += packing.starts
        return sources

    def _pieces(
        self,
        name: str,
        dtype: type,
        sources: np.ndarray | None,
        pieces: np.ndarray,
        samples: np.ndarray,
        ends: np.ndarray,
    ) -> Iterator[np.ndarray]:
        """Values of all pieces in the order of the samples, whole samples at a time; without
        ``sources``, that is the order of the file. ``ends``: the first token of each sample, and
        the end of the last."""
        path = self._path(name)
        if not path.stat().st_size:
            return
        values = np.memmap(path, dtype=dtype, mode="r")
        first = 0
        while first < len(samples) - 1:
            wanted = ends[first] + CHUNK_TOKENS
            last = max(first + 1, int(np.searchsorted(ends, wanted, side="right")) - 1)
            if sources is None:
                yield np.array(values[ends[first] : ends[last]])
            else:
                low, high = int(samples[first]), int(samples[last])
                sizes = np.diff(pieces[low : high + 1])
                offsets = sources[low:high] - (pieces[low:high] - pieces[low])
                index = np.repeat(offsets, sizes) + np.arange(int(sizes.sum()))
                yield values[index]
            # What was read is not needed again: the process must not grow with the file.
            values._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
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


def _to_disk(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
