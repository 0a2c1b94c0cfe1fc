"""One host's shard of a preparation: units as files, and all units put together to a store.

    shards/000007.000.npz ...   tokens, targets, lengths and columns of the examples of unit 7
    shards/000007.json          what became of its rows; written last: then the unit is done

A unit's files are the same whoever makes them, so any host resumes a shard of a killed one.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.blocks import RowEncoder
from llmx.data.encode import TokenBlock, parallel_tokenizers
from llmx.data.examples import WEIGHT
from llmx.data.prepare import Counts, finalize
from llmx.data.progress import Progress
from llmx.data.rejects import Rejects
from llmx.data.spec import DatasetSpec
from llmx.data.staging import Staging
from llmx.data.store import SampleStore
from llmx.data.truncate import Truncation
from llmx.data.units import Unit
from llmx.data.workers import worker_count
from llmx.run.rundir import write_json

PROOF_BYTES = 1 << 19
"""Of the first unit, on which a faster encoder is proven."""
SEGMENT_TOKENS = 8 << 20
"""Tokens of one file."""


def write_shard(
    spec: DatasetSpec,
    units: Iterator[Unit],
    directory: Path,
    *,
    mine: Callable[[Unit], bool],
    progress: Progress,
) -> int:
    """Make those units that are ``mine`` and not there yet; returns how many units there are."""
    directory.mkdir(parents=True, exist_ok=True)
    source = spec.source
    workers = worker_count(spec.data.num_workers)
    # There is much text in all, if not in one unit.
    encoder = RowEncoder(
        source, spec.renderer, spec.encoding, workers=workers, fast_from_bytes=PROOF_BYTES
    )
    count = 0
    source.look_ahead()
    with parallel_tokenizers(workers), progress:
        for unit in units:
            count += 1
            if mine(unit) and note_of(directory, unit.number) is None:
                _write_unit(spec, unit, directory, encoder, progress)
            for group in (source.rejects, source.left_out, encoder.refused):
                group.clear()
    return count


def note_of(directory: Path, number: int) -> dict[str, Any] | None:
    """What is noted of a unit that is done; None for one that is not, or not whole."""
    try:
        note: dict[str, Any] = json.loads((directory / f"{number:06d}.json").read_text("utf-8"))
        whole = all(
            (directory / name).stat().st_size == size for name, size in note["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return None
    return note if whole else None


def assemble(spec: DatasetSpec, directory: Path, *, units: int, how: dict[str, Any]) -> SampleStore:
    """The store of all units, which are all done and in ``directory``."""
    refused = Rejects()
    counts = Counts(rejects=(spec.source.rejects, refused))
    spec.source.rejects.clear()
    columns = spec.encoding.columns
    text = 0
    ignored: set[str] = set()
    encoders: list[str] = []
    staging = Staging(spec.path.with_name(f"{spec.path.name}.assembled"), columns)
    try:
        for number in range(units):
            note = note_of(directory, number)
            if note is None:
                raise AssertionError(f"unit {number} of {directory} is not there")
            for name in note["files"]:
                with np.load(directory / name) as arrays:
                    block = TokenBlock(
                        arrays["tokens"],
                        arrays["targets"],
                        arrays["lengths"],
                        arrays.get("sizes"),
                        {column: arrays[f"column.{column.name}"] for column in columns
                         if column.name != WEIGHT},
                    )  # fmt: skip
                    staging.append(block, joins=bool(arrays["joins"]))
            counts.rows.update(note["counts"])
            counts.left_out.update(note["left_out"])
            for group, noted in zip(counts.rejects, note["rejects"], strict=True):
                group.extend(noted["counts"], noted["lines"].encode("latin-1"))
            text += note["text_bytes"]
            ignored.update(note.get("ignored_columns", ()))
            encoders.append(note["encoder"])
        nothing = not (counts.rows["rows"] or counts.left_out)
        if nothing and not any(group.counts for group in counts.rejects):
            raise spec.source.empty()
        # Each host proved its encoder on other texts: the kind is what counts.
        kinds = ", ".join(sorted({re.split(r", equal| \(", encoder)[0] for encoder in encoders}))
        counts.ignored_columns = sorted(ignored)
        how = {"encoder": encoders[0] if len(set(encoders)) == 1 else kinds, **how}
        return finalize(spec, staging, counts, how={**how, "text_bytes": text})
    finally:
        staging.remove()


def _write_unit(
    spec: DatasetSpec, unit: Unit, directory: Path, encoder: RowEncoder, progress: Progress
) -> None:
    counts: Counter[str] = Counter()
    truncation = Truncation(
        spec.data,
        counts,
        begin=spec.renderer.begin,
        state=(int(not unit.begins), spec.data.seq_len),
    )
    writer = _Segments(directory, unit.number)
    text = 0
    for encoded in encoder.blocks(unit.rows(), begins=unit.begins):
        counts.update(encoded.counts)
        block, joins = truncation(encoded.examples, encoded.block)
        writer.add(block, joins=joins)
        progress.add(size=encoded.size, tokens=len(encoded.block.tokens))
        text += encoded.size
    source = spec.source
    note = {
        "files": writer.close(),
        "counts": dict(counts),
        "left_out": dict(source.left_out),
        "ignored_columns": source.ignored_columns,
        "rejects": [
            {"counts": dict(group.counts), "lines": group.lines().decode("latin-1")}
            for group in (source.rejects, encoder.refused)
        ],
        "text_bytes": text,
        "encoder": encoder.description,
    }
    write_json(directory / f"{unit.number:06d}.json", note)


class _Segments:
    """The rows of one unit in files of bounded size."""

    def __init__(self, directory: Path, number: int) -> None:
        self._directory = directory
        self._number = number
        self._blocks: list[tuple[TokenBlock, bool]] = []
        self._tokens = 0
        self._files: dict[str, int] = {}

    def add(self, block: TokenBlock, *, joins: bool) -> None:
        if not len(block.lengths):
            return
        self._blocks.append((block, joins))
        self._tokens += len(block.tokens)
        if self._tokens >= SEGMENT_TOKENS:
            self._write()

    def close(self) -> dict[str, int]:
        """Sizes of the files by name, in order."""
        if self._blocks:
            self._write()
        return self._files

    def _write(self) -> None:
        lengths: list[np.ndarray] = []
        for block, joins in self._blocks:
            own = np.array(block.lengths, np.int64)
            if joins and lengths:
                lengths[-1][-1] += own[0]
                own = own[1:]
            if len(own):
                lengths.append(own)
        blocks = [block for block, _ in self._blocks]
        arrays = {
            f"column.{column.name}": np.concatenate([block.columns[column] for block in blocks])
            for column in blocks[0].columns
        }
        if any(block.sizes is not None for block in blocks):
            arrays["sizes"] = np.concatenate(
                [
                    np.ones(len(block.lengths), np.int64) if block.sizes is None else block.sizes
                    for block in blocks
                ]
            )
        name = f"{self._number:06d}.{len(self._files):03d}.npz"
        temporary = self._directory / f".{name}.{os.getpid()}.tmp"
        with temporary.open("wb") as stream:
            np.savez(
                stream,
                tokens=np.concatenate([block.tokens for block in blocks]),
                targets=np.concatenate([block.targets for block in blocks]),
                lengths=np.concatenate(lengths),
                joins=np.array(self._blocks[0][1]),
                **arrays,  # type: ignore[arg-type]
            )
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, self._directory / name)
        self._files[name] = (self._directory / name).stat().st_size
        self._blocks, self._tokens = [], 0
