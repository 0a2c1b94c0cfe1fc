"""One host's shard of a preparation: a run of the sources' bytes, staged as examples.

The shards of all hosts, in order, are the records of the split; so their staged files, one after
the other, are those of a single host. A shard that was killed resumes as any staging does, as long
as the hosts and their cores are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from llmx.data.examples import TypedRecord
from llmx.data.source.files import can_be_split
from llmx.data.source.progress import PreparationProgress
from llmx.data.source.records import ByteRange
from llmx.data.source.rejected import RejectedRecords
from llmx.data.source.source import Source
from llmx.data.source.split import DatasetSplit
from llmx.data.store.build import Counts, finalize, stage, staging_in
from llmx.data.store.samples import SampleStore
from llmx.data.store.spec import DatasetSpec
from llmx.data.store.staging import Staging
from llmx.data.tokenize.workers import worker_count


@dataclass(frozen=True)
class Piece:
    """A file of a source, or some of its lines; ``copy``: which reading of it, from 0."""

    source: Source
    copy: int
    file: Path
    byte_range: ByteRange

    @property
    def size(self) -> int:
        """Bytes on disk."""
        stop = self.byte_range.stop
        return (self.file.stat().st_size if stop is None else stop) - self.byte_range.start


def shard_of(split: DatasetSplit, cores: Sequence[int], host: int) -> list[Piece]:
    """What ``host`` (from 0) prepares, in proportion to its ``cores``. The pieces of all hosts, in
    order, are the records of a split that is ``divisible``. A file whose lines are no records of
    their own (compressed, a JSON array, a table) is never divided, so a host may get nothing."""
    files = [
        (source, copy, file)
        for source in split.sources
        for copy in range(split.copies(source))
        for file in source.files
    ]
    ends = list(accumulate(file.stat().st_size for _, _, file in files))

    def boundary(hosts: int) -> tuple[int, int]:
        """(number of the file, byte in it) where the shard of the first ``hosts`` hosts ends."""
        if not hosts:
            return 0, 0
        at, start = ends[-1] * sum(cores[:hosts]) // sum(cores), 0
        for number, (stop, (source, _, file)) in enumerate(zip(ends, files, strict=True)):
            if at < stop:
                if not can_be_split(file, text_unit=source.text_unit):
                    return (number, 0) if at - start < stop - at else (number + 1, 0)
                byte = _line_start(file, at - start)
                return (number + 1, 0) if byte >= stop - start else (number, byte)
            start = stop
        return len(files), 0

    (first, low), (last, high) = boundary(host), boundary(host + 1)
    pieces = []
    for number in range(first, min(last + 1, len(files))):
        start, stop = low if number == first else 0, high if number == last else None
        if start != stop:
            source, copy, file = files[number]
            line = 1 + _lines_before(file, start)
            pieces.append(Piece(source, copy, file, ByteRange(start, stop, line)))
    return pieces


def records_of(split: DatasetSplit, pieces: Sequence[Piece]) -> Iterator[TypedRecord | None]:
    """The records of pieces, in their dataset format."""
    return chain.from_iterable(
        split.records_of(piece.source, piece.file, piece.byte_range, first=piece.copy == 0)
        for piece in pieces
    )


def stage_shard(
    spec: DatasetSpec, pieces: Sequence[Piece], directory: Path, *, number: int, title: str
) -> str:
    """Stage the examples of shard ``number`` in a folder of ``directory``; returns its name, which
    tells shards of other pieces apart."""
    identity = [[str(p.file), p.copy, p.byte_range.start, p.byte_range.stop] for p in pieces]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    name = f"{number:04d}-{digest[:16]}"
    split, place = spec.split, directory / name
    split.rejects.clear()
    split.left_out.clear()
    size = sum(piece.size for piece in pieces)
    progress = PreparationProgress(title, total_bytes=size, read=lambda: split.meter.bytes)
    with staging_in(spec, place, progress) as staging:
        if "encoder" not in staging.state:
            workers = worker_count(spec.data.num_workers)
            rows = records_of(split, pieces)
            counts, encoder = stage(spec, staging, rows, progress, workers=workers)
            refused = counts.rejects[1]
            with (place / "rejected.jsonl").open("wb") as stream:
                split.rejects.copy_to(stream)
            done = {
                "counts": dict(counts.rows),
                "refused": refused.state,
                "left_out": dict(split.left_out),
                "rejected": dict(split.rejects.counts),
                "ignored_columns": list(counts.ignored_columns),
                "text_bytes": progress.bytes,
                "encoder": encoder,
            }
            staging.record(done, now=True)
            refused.close()
        staging.close()
    return name


def assemble(spec: DatasetSpec, directories: Sequence[Path], *, how: dict[str, Any]) -> SampleStore:
    """The store of all shards, which are complete. ``how``: for its meta.json."""
    split, refused = spec.split, RejectedRecords()
    split.rejects.clear()
    counts = Counts(rejects=(split.rejects, refused))
    ignored: set[str] = set()
    encoders: list[str] = []
    text_bytes = 0
    staging = Staging(spec.path.with_name(f"{spec.path.name}.assembled"), spec.encoding.columns)
    try:
        for directory in directories:
            shard = staging.extend(directory)
            counts.rows.update(shard["counts"])
            counts.left_out.update(shard["left_out"])
            rejected = (directory / "rejected.jsonl").read_bytes()
            split.rejects.extend(shard["rejected"], rejected)
            refused.extend(shard["refused"]["counts"], (directory / "refused.jsonl").read_bytes())
            ignored.update(shard["ignored_columns"])
            text_bytes += shard["text_bytes"]
            if shard["text_bytes"]:
                encoders.append(shard["encoder"])
        counts.ignored_columns = sorted(ignored)
        # Each host proved its encoder on other texts: the kind is what counts.
        kinds = sorted({re.split(r", equal| \(", encoder)[0] for encoder in encoders})
        encoder = encoders[0] if len(set(encoders)) == 1 else ", ".join(kinds)
        how = {"encoder": encoder, **how, "text_bytes": text_bytes}
        return finalize(spec, staging, counts, how=how)
    finally:
        staging.remove()
        refused.close()


def _line_start(file: Path, at: int) -> int:
    """The first byte at or behind ``at`` where a line begins, or the end of the file."""
    with file.open("rb") as stream:
        stream.seek(max(0, at - 1))
        if at:
            stream.readline()
        return stream.tell()


def _lines_before(file: Path, at: int) -> int:
    lines = 0
    with file.open("rb") as stream:
        while at and (block := stream.read(min(1 << 20, at))):
            lines += block.count(b"\n")
            at -= len(block)
    return lines
