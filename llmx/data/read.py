"""From files on disk to records, one at a time, each knowing where it came from.

Text, JSON arrays, JSON Lines, TSV and CSV, each also compressed (.gz, .zst, .bz2, .xz); a
file, a directory or a glob. What is wrong with a file is said with its name, its line or row
and an excerpt.
"""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llmx.data.compressed import DAMAGED, SUFFIXES, opened
from llmx.errors import DataError

TEXT_SUFFIXES = (".txt", ".text")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (".tsv", ".csv")
_DAMAGED = "{file}: the compressed file is damaged or cut off ({error}). Fetch it again."
PIECE_CHARS = 4 << 20
"""A text file is tokenized in pieces of about this many characters."""


@dataclass(frozen=True)
class Where:
    """A place in the sources, for messages."""

    file: Path
    number: int
    unit: str
    """``line`` or ``row`` (of a JSON array), counted from 1."""

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@dataclass(frozen=True)
class Record:
    """One row: the keys and values of a JSON object or of a table's line."""

    value: dict[str, Any]
    where: Where


@dataclass(frozen=True)
class TextPiece:
    """A piece of a text file, which is one document: its pieces joined are the file."""

    text: str
    where: Where
    last: bool


def source_files(path: str) -> list[Path]:
    """The files that ``path`` (a file, a directory or a glob) names, sorted by name.

    Raises DataError when there are none, or when one has a suffix that is not read.
    """
    known = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *TABLE_SUFFIXES)
    place = Path(path).expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(
            file for file in place.rglob("*") if file.is_file() and kind_of(file) in known
        )
    else:
        files = sorted(Path(name) for name in glob.glob(str(place), recursive=True))  # noqa: PTH207
        files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(
            f"data.path={path!r}: no such file, or no file there ends in {', '.join(known)} "
            f"(or one of these and {', '.join(SUFFIXES)}). Relative paths start at "
            f"{Path.cwd()}."
        )
    for file in files:
        if kind_of(file) not in known:
            raise DataError(
                f"{file}: {kind_of(file) or 'no'} suffix; files that end in {', '.join(known)} "
                "are read. Rename it, or convert it to JSON Lines."
            )
    return files


def kind_of(file: Path) -> str:
    """The suffix that tells the form, in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_file(file: Path) -> Iterator[Record | TextPiece]:
    """Records of one file (or the pieces of one text), in order."""
    kind = kind_of(file)
    try:
        with opened(file) as stream:
            if kind in TEXT_SUFFIXES:
                yield from _text(file, stream)
            elif kind in TABLE_SUFFIXES:
                yield from _table(file, stream, delimiter="\t" if kind == ".tsv" else ",")
            elif _first_character(stream) == b"[":
                yield from _json_array(file, stream)
            else:
                yield from _json_lines(file, stream)
    except DAMAGED as error:
        raise DataError(_DAMAGED.format(file=file, error=error)) from error
    except OSError as error:
        if error.errno is None:  # how bz2 says that the content is damaged
            raise DataError(_DAMAGED.format(file=file, error=error)) from error
        raise DataError(f"{file}: cannot be read ({error}).") from error


def excerpt(value: Any, *, limit: int = 80) -> str:
    """The beginning of a value on one line, for a message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _first_character(stream: IO[bytes]) -> bytes:
    head = stream.peek(64) if hasattr(stream, "peek") else b""
    return bytes(head).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _lines(file: Path, stream: IO[bytes]) -> Iterator[tuple[str, Where]]:
    """Decoded lines with their line ends; a bad byte is reported with its line."""
    for number, line in enumerate(stream, start=1):
        where = Where(file, number, "line")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield line.decode("utf-8"), where
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: byte {error.start + 1} is not UTF-8: "
                f"{line[max(0, error.start - 20) : error.start + 20]!r}. Convert the file, e.g. "
                f"`iconv -f GB18030 -t UTF-8`."
            ) from error


def _text(file: Path, stream: IO[bytes]) -> Iterator[TextPiece]:
    """The file as one document, in pieces cut where a line begins with a word: there, no
    byte-level BPE has a token that reaches across, so the tokens are those of the whole."""
    piece: list[str] = []
    size = 0
    start = Where(file, 1, "line")
    for line, where in _lines(file, stream):
        if size >= PIECE_CHARS and not line[:1].isspace():
            yield TextPiece("".join(piece), start, last=False)
            piece, size, start = [], 0, where
        piece.append(line)
        size += len(line)
    if piece:
        yield TextPiece("".join(piece), start, last=True)


def _json_lines(file: Path, stream: IO[bytes]) -> Iterator[Record]:
    for line, where in _lines(file, stream):
        if line.strip():
            yield Record(_object(_parsed(line.rstrip(), file, where), where), where)


def _json_array(file: Path, stream: IO[bytes]) -> Iterator[Record]:
    text = "".join(line for line, _ in _lines(file, stream))
    for number, value in enumerate(_parsed(text, file, None), start=1):
        where = Where(file, number, "row")
        yield Record(_object(value, where), where)


def _parsed(text: str, file: Path, where: Where | None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = where or Where(file, error.lineno, "line")
        around = excerpt(text[max(0, error.pos - 40) : error.pos + 40])
        raise DataError(
            f"{place}, column {error.colno}: not JSON ({error.msg}): {around}. Correct the line; "
            "a file cut off in the middle must be fetched again."
        ) from error


def _object(value: Any, where: Where) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise DataError(
        f"{where}: {excerpt(value)} is not an object. Every row must be a JSON object with "
        'keys, e.g. {"text": "..."}.'
    )


def _table(file: Path, stream: IO[bytes], *, delimiter: str) -> Iterator[Record]:
    lines = _lines(file, stream)
    # A TSV is written without quoting, in which a quotation mark is only itself.
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader((line for line, _ in lines), delimiter=delimiter, quoting=quoting)
    names: list[str] | None = None
    try:
        for cells in reader:
            where = Where(file, reader.line_num, "line")
            if names is None:
                names = cells
            elif len(cells) == len(names):
                yield Record(dict(zip(names, cells, strict=True)), where)
            elif cells:
                raise DataError(
                    f"{where}: {len(cells)} cells, the header names {len(names)} "
                    f"({', '.join(names)}): {excerpt(delimiter.join(cells))}."
                )
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: {error}.") from error
