"""From files on disk to records, one at a time, each knowing where it came from.

Text, JSON arrays, JSON Lines, TSV and CSV, each also compressed (.gz, .zst, .bz2, .xz); Parquet,
Arrow, ``save_to_disk`` directories; a file, a directory or a glob. What is wrong with a file is
said with its name, its line or row and an excerpt; a wrong row goes to ``bad``, which raises it
or takes note, and the rows after it are read.
"""

from __future__ import annotations

import csv
import glob
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmx.data.compressed import DAMAGED, SUFFIXES, opened
from llmx.data.json_array import array_elements
from llmx.data.rows import OnBad, Record, RowError, TextPiece, Where, excerpt, refuse
from llmx.data.tables import is_saved, saved_files, table_rows
from llmx.errors import DataError

__all__ = ["Record", "TextPiece", "Where", "excerpt", "kind_of", "read_file", "source_files"]

TEXT_SUFFIXES = (".txt", ".text")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
DELIMITED_SUFFIXES = (".tsv", ".csv")
COLUMNAR_SUFFIXES = (".parquet", ".arrow")
KNOWN = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *DELIMITED_SUFFIXES, *COLUMNAR_SUFFIXES)
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
"""Files that describe a data set and lie beside it."""
PIECE_CHARS = 4 << 20
"""A text file is tokenized in pieces of about this many characters."""


def source_files(path: str, *, split: str | None = None) -> list[Path]:
    """The files that ``path`` (a file, a directory or a glob) names, sorted by name.

    ``split`` chooses from a ``save_to_disk`` directory with several. Raises DataError when there
    are no files, or when one has a suffix that is not read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        if is_saved(place):
            return saved_files(place, split=split)
        files = sorted(file for file in place.rglob("*") if file.is_file() and _is_data(file))
    else:
        files = sorted(Path(name) for name in glob.glob(str(place), recursive=True))  # noqa: PTH207
        files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(
            f"data.path={path!r}: no such file, or no file there ends in {', '.join(KNOWN)} "
            f"(or one of these and {', '.join(SUFFIXES)}). Relative paths start at "
            f"{Path.cwd()}."
        )
    for file in files:
        if kind_of(file) not in KNOWN:
            raise DataError(
                f"{file}: {kind_of(file) or 'no'} suffix; files that end in {', '.join(KNOWN)} "
                "are read. Rename it, or convert it to JSON Lines."
            )
        if kind_of(file) in COLUMNAR_SUFFIXES and file.suffix.lower() in SUFFIXES:
            raise DataError(
                f"{file}: a {kind_of(file)} file is compressed inside and cannot be read through "
                f"another compression. Decompress it ({file.suffix} off)."
            )
    return files


def kind_of(file: Path) -> str:
    """The suffix that tells the form, in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_file(file: Path, *, bad: OnBad = refuse) -> Iterator[Record | TextPiece]:
    """Records of one file (or the pieces of one text), in order.

    ``bad`` is called with every row that is wrong; by default it raises. A file that is damaged
    or cut off is such a row too, its last: what follows it cannot be read.
    """
    if kind_of(file) in COLUMNAR_SUFFIXES:
        yield from table_rows(file)
        return
    try:
        with opened(file) as stream:
            yield from _records(file, stream, bad)
    except DAMAGED as error:
        bad(_damaged(file, error))
    except OSError as error:
        if error.errno is None:  # how bz2 says that the content is damaged
            bad(_damaged(file, error))
            return
        raise DataError(f"{file}: cannot be read ({error}).") from error


def _records(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[Record | TextPiece]:
    kind = kind_of(file)
    if kind in TEXT_SUFFIXES:
        return _text(file, stream, bad)
    if kind in DELIMITED_SUFFIXES:
        return _table(file, stream, "\t" if kind == ".tsv" else ",", bad)
    if _first_character(stream) == b"[":
        return _json_array(file, stream, bad)
    return _json_lines(file, stream, bad)


def _is_data(file: Path) -> bool:
    return kind_of(file) in KNOWN and file.name not in NOT_DATA


def _damaged(file: Path, error: Exception) -> RowError:
    return RowError(
        f"{file}: the compressed file is damaged or cut off ({error}). Fetch it again.",
        where=Where(file, 0, "end"),
        reason="damaged or cut off; the file ends here",
    )


def _first_character(stream: IO[bytes]) -> bytes:
    head = stream.peek(64) if hasattr(stream, "peek") else b""
    return bytes(head).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _lines(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[tuple[str, Where]]:
    """Decoded lines with their line ends; a bad byte is reported with its line."""
    for number, line in enumerate(stream, start=1):
        where = Where(file, number, "line")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            around = line[max(0, error.start - 20) : error.start + 20]
            bad(
                RowError(
                    f"{where}: byte {error.start + 1} is not UTF-8: {around!r}. Convert the file, "
                    "e.g. `iconv -f GB18030 -t UTF-8`.",
                    where=where,
                    reason="not UTF-8",
                    content=line.decode("utf-8", "backslashreplace").rstrip("\r\n"),
                )
            )
            continue
        yield text, where


def _text(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[TextPiece]:
    """The file as one document, in pieces cut where a line begins with a word: there, no
    byte-level BPE has a token that reaches across, so the tokens are those of the whole."""
    piece: list[str] = []
    size = 0
    start = Where(file, 1, "line")
    for line, where in _lines(file, stream, bad):
        if size >= PIECE_CHARS and not line[:1].isspace():
            yield TextPiece("".join(piece), start, last=False)
            piece, size, start = [], 0, where
        piece.append(line)
        size += len(line)
    if piece:
        yield TextPiece("".join(piece), start, last=True)


def _json_lines(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[Record]:
    for line, where in _lines(file, stream, bad):
        if not line.strip():
            continue
        try:
            value = json.loads(line.rstrip())
        except (json.JSONDecodeError, RecursionError) as error:
            bad(_not_json(line.rstrip(), where, error))
            continue
        if isinstance(value, dict):
            yield Record(value, where)
        else:
            bad(_no_object(value, where))


def _json_array(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[Record]:
    try:
        for value, where in array_elements(file, stream):
            if isinstance(value, dict):
                yield Record(value, where)
            else:
                bad(_no_object(value, where))
    except RowError as error:
        bad(error)


def _not_json(line: str, where: Where, error: Exception) -> RowError:
    column, problem = 1, "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        column, problem = error.colno, error.msg
    around = excerpt(line[max(0, column - 41) : column + 39])
    return RowError(
        f"{where}, column {column}: not JSON ({problem}): {around}. Correct the line; a file cut "
        "off in the middle must be fetched again.",
        where=where,
        reason="not JSON",
        content=line,
    )


def _no_object(value: Any, where: Where) -> RowError:
    return RowError(
        f"{where}: {excerpt(value)} is not an object. Every row must be a JSON object with "
        'keys, e.g. {"text": "..."}.',
        where=where,
        reason="not an object",
        content=json.dumps(value, ensure_ascii=False),
    )


def _table(file: Path, stream: IO[bytes], delimiter: str, bad: OnBad) -> Iterator[Record]:
    # A TSV is written without quoting, in which a quotation mark is only itself.
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    csv.field_size_limit(sys.maxsize)  # a cell may hold a whole document
    # The line of the file is counted here: the reader does not see a line that was refused.
    line_number = 0

    def lines() -> Iterator[str]:
        nonlocal line_number
        for line, where in _lines(file, stream, bad):
            line_number = where.number
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, quoting=quoting, strict=True)
    names: list[str] | None = None
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            where = Where(file, line_number, "line")
            problem = f"{error}. A quotation mark inside of a quoted cell is written twice."
            bad(RowError(f"{where}: {problem}", where=where, reason="not a table's row"))
            continue
        where = Where(file, line_number, "line")
        if names is None:
            names = cells
        elif len(cells) == len(names):
            yield Record(dict(zip(names, cells, strict=True)), where)
        elif cells:
            bad(
                RowError(
                    f"{where}: {len(cells)} cells, the header names {len(names)} "
                    f"({', '.join(names)}): {excerpt(delimiter.join(cells))}.",
                    where=where,
                    reason="another number of cells than the header",
                    content=delimiter.join(cells),
                )
            )
