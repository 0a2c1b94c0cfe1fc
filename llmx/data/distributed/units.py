"""Parts of a source that several hosts prepare apart: all of them, one after the other, are it.

Where each row stands for itself, a unit is some files, or some lines of one, and nobody reads
what is another's. Where a row's number counts (held-out rows, limits, draws by weight), or where
there are fewer files than hosts could share, everybody reads all rows and a unit is a run of them.
Which units there are does not depend on the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from llmx.data.examples import Row
from llmx.data.format.formats import Document
from llmx.data.source.files import can_be_split
from llmx.data.source.records import ByteRange
from llmx.data.source.source import Source
from llmx.data.source.split import DatasetSplit
from llmx.data.tokenize.encoder import text_bytes

LEAST_BYTES, MOST_BYTES = 1 << 20, 128 << 20
"""Bytes of a unit, at least and at most; a file that cannot be divided may be more."""
UNITS = 256
"""Units of a source that is neither small nor huge."""
UNITS_A_HOST = 4
"""With fewer, some hosts would wait long for others."""
BY_FILES, BY_ROWS = "files", "rows"
WHOLE_FILE = ByteRange(0, None, 1)


@dataclass(frozen=True)
class Unit:
    """Some rows of a source, in their order."""

    number: int
    size: int
    """Bytes: of the files on disk, or of the rows' text."""
    begins: bool
    """The first row is not the rest of a document."""
    rows: Callable[[], Iterator[Row | None]]
    """Reads them; what is wrong goes to the source's rejects meanwhile."""


@dataclass(frozen=True)
class _Stretch:
    part: Source
    copy: int
    file: Path
    stretch: ByteRange
    size: int


def units_of(
    source: DatasetSplit, *, hosts: int, whole_documents: bool
) -> tuple[str, Iterator[Unit]]:
    """(``BY_FILES`` or ``BY_ROWS``, the units in order). ``whole_documents``: no unit begins
    with the rest of a document."""
    size = min(max(source.source_bytes // UNITS, LEAST_BYTES), MOST_BYTES)
    if source.divisible:
        units = list(_by_files(source, size))
        if len(units) >= UNITS_A_HOST * hosts:
            return BY_FILES, iter(units)
    return BY_ROWS, _by_rows(source, size, whole_documents=whole_documents)


class Owners:
    """Which host prepares which unit: the one that has the least to do for its cores."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._taken = [0] * len(cores)

    def take(self, size: int) -> int:
        """The host of the next unit; everybody asks in the order of the units."""
        load = [
            (taken + size) / cores for taken, cores in zip(self._taken, self._cores, strict=True)
        ]
        host = load.index(min(load))
        self._taken[host] += size
        return host


def _by_files(source: DatasetSplit, unit_bytes: int) -> Iterator[Unit]:
    number = size = 0
    found: list[_Stretch] = []
    for piece in _stretches(source, unit_bytes):
        found.append(piece)
        size += piece.size
        if size >= unit_bytes:
            yield _unit_of(source, number, size, found)
            number, size, found = number + 1, 0, []
    if found:
        yield _unit_of(source, number, size, found)


def _unit_of(source: DatasetSplit, number: int, size: int, pieces: list[_Stretch]) -> Unit:
    return Unit(number, size, True, partial(_rows_of, source, pieces))


def _rows_of(source: DatasetSplit, pieces: list[_Stretch]) -> Iterator[Row | None]:
    return chain.from_iterable(
        source.rows_of(piece.part, piece.file, piece.stretch, first=piece.copy == 0)
        for piece in pieces
    )


def _stretches(source: DatasetSplit, unit_bytes: int) -> Iterator[_Stretch]:
    for part in source.sources:
        for copy in range(source.copies(part)):
            for file in part.files:
                size = file.stat().st_size
                long = size > 2 * unit_bytes
                if long and can_be_split(file, text_unit=part.text_unit):
                    for stretch in _cut(file, size, unit_bytes):
                        yield _Stretch(
                            part, copy, file, stretch, (stretch.stop or size) - stretch.start
                        )
                else:
                    yield _Stretch(part, copy, file, WHOLE_FILE, size)


def _cut(file: Path, size: int, unit_bytes: int) -> Iterator[ByteRange]:
    """A file in stretches of whole lines of about ``unit_bytes``."""
    start, first_line = 0, 1
    with file.open("rb") as stream:
        while start < size:
            lines, stop = 0, start
            while stop < min(start + unit_bytes, size):
                block = stream.read(min(1 << 20, start + unit_bytes - stop))
                if not block:
                    break
                lines += block.count(b"\n")
                stop += len(block)
                whole = block.endswith(b"\n")
            if stop < size and not whole:
                rest = stream.readline()
                stop += len(rest)
                lines += rest.endswith(b"\n")
            yield ByteRange(start, stop, first_line)
            start, first_line = stop, first_line + lines


def _by_rows(source: DatasetSplit, unit_bytes: int, *, whole_documents: bool) -> Iterator[Unit]:
    number = size = 0
    begins = True
    rows: list[Row | None] = []
    for row in source.rows():
        rows.append(row)
        size += 0 if row is None else text_bytes(row)
        ends = not isinstance(row, Document) or row.last
        if (size >= unit_bytes or len(rows) >= unit_bytes // 64) and (ends or not whole_documents):
            yield Unit(number, size, begins, partial(iter, rows))
            number, size, rows, begins = number + 1, 0, [], ends
    # What was rejected behind the last row belongs to a unit as well.
    yield Unit(number, size, begins, partial(iter, rows))
