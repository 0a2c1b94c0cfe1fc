"""Records and texts of text files: JSON Lines, JSON arrays, TSV and CSV, plain text."""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmx.config.file_formats import kind_of
from llmx.data.source.records import (
    CONTENT_CHARS,
    Document,
    OnBad,
    Record,
    RecordDecoder,
    RecordError,
    Rejected,
    Where,
    excerpt,
    names,
)
from llmx.errors import DataError
from llmx.text import plural

DOCUMENT_CHARS = 8_000_000
"""The largest text file that is one document: it is in memory, and tokenized, as a whole."""
ARRAY_BYTES = 1 << 30
"""The largest JSON array: its text is in memory as a whole."""
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")


def text_records(file: Path, stream: IO[bytes], bad: OnBad, text_unit: str) -> Iterator[Document]:
    """The documents of a text file, as ``data.text_unit`` divides it."""
    lines = lines_of(file, stream, bad)
    if text_unit == "file":
        yield from _whole_text(file, lines)
    elif text_unit == "line":
        for line, where in lines:
            if line.strip():
                yield Document(line.rstrip("\r\n"), where)
    else:  # paragraphs, between empty lines
        for is_text, run in itertools.groupby(lines, key=lambda line: bool(line[0].strip())):
            if is_text:
                texts, places = zip(*run, strict=True)
                yield Document("".join(texts).rstrip("\r\n"), places[0])


def json_records(file: Path, stream: IO[bytes], bad: OnBad, text_unit: str) -> Iterator[Record]:
    """The records of a JSON array, or of JSON Lines."""
    head = bytes(stream.peek(64))  # type: ignore[attr-defined]
    if head.removeprefix(_BOM).lstrip()[:1] == b"[":
        return _array_records(file, stream, bad)
    return json_lines(lines_of(file, stream, bad), bad)


def _array_records(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[Record]:
    """The objects of an array. It cannot be read beyond an element that is not JSON."""
    start = Where(file, 1, "line")
    content = stream.read(ARRAY_BYTES + 1).removeprefix(_BOM)
    if len(content) > ARRAY_BYTES:
        raise DataError(
            f"{file}: a JSON array of more than {ARRAY_BYTES >> 30} GiB, and an array is read as a "
            "whole. Convert it to JSON Lines: `jq -c '.[]' in.json > out.jsonl`."
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        bad(_not_utf8(content, start, error))
        return
    del content
    decoder, at = RecordDecoder(), _behind_space(text, text.index("[") + 1)
    for number in () if text[at : at + 1] == "]" else itertools.count(1):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            bad(_not_json(text, start, error, at, array=True))
            return
        yield from _record(value, decoder, Where(file, number, "row"), bad)
        at = _behind_space(text, at)
        if text[at : at + 1] != ",":
            break
        at = _behind_space(text, at + 1)
    problem = "Extra data"
    if text[at : at + 1] != "]":
        problem = "Expecting ',' delimiter"
    elif (at := _behind_space(text, at + 1)) == len(text):
        return
    bad(_not_json(text, start, json.JSONDecodeError(problem, text, at), array=True))


def _behind_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _record(value: Any, decoder: RecordDecoder, where: Where, bad: OnBad) -> Iterator[Record]:
    """The record of a JSON value that was just decoded."""
    twice, decoder.twice = decoder.twice, None
    if twice is not None:
        problem = (
            f'the key "{excerpt(twice)}" is there twice, and which of the two counts is not '
            "defined. Write it once."
        )
        bad(RecordError.of(Rejected("a key that is there twice", problem), where, value))
    elif isinstance(value, dict):
        yield Record(value, where)
    else:
        problem = (
            f"{excerpt(value)} is not an object. Every row must be a JSON object, e.g. "
            '{"text": "..."}.'
        )
        bad(RecordError.of(Rejected("not an object", problem), where, value))


def lines_of(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[tuple[str, Where]]:
    """Decoded lines with their line ends; a bad byte is reported with its line."""
    for number, line in enumerate(stream, start=1):
        where = Where(file, number, "line")
        if number == 1:
            line = line.removeprefix(_BOM)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            bad(_not_utf8(line, where, error))
            continue
        yield text, where


def _whole_text(file: Path, lines: Iterator[tuple[str, Where]]) -> Iterator[Document]:
    """The file as one document. Raises DataError for one of more than ``DOCUMENT_CHARS``."""
    document: list[str] = []
    size = 0
    for line, _ in lines:
        document.append(line)
        size += len(line)
        if size > DOCUMENT_CHARS:
            raise DataError(
                f"{file}: more than {DOCUMENT_CHARS:,} characters, which is the most that one "
                "document may have, and data.text_unit=file makes one of each text file. Set "
                "data.text_unit=line or data.text_unit=paragraph."
            )
    if document:
        yield Document("".join(document), Where(file, 1, "line"))


def json_lines(lines: Iterator[tuple[str, Where]], bad: OnBad) -> Iterator[Record]:
    """The object on each line that is not empty."""
    decoder = RecordDecoder()
    for line, where in lines:
        if not line.strip():
            continue
        try:
            value = decoder.decode(line.rstrip())
        except (ValueError, RecursionError) as error:
            decoder.twice = None
            bad(_not_json(line.rstrip(), where, error))
            continue
        yield from _record(value, decoder, where, bad)


def delimited_records(
    file: Path, stream: IO[bytes], bad: OnBad, text_unit: str
) -> Iterator[Record]:
    """The records of a TSV or CSV file, of which the first line names the columns."""
    delimiter = "\t" if kind_of(file) == ".tsv" else ","
    # A TSV is written without quoting, in which a quotation mark is only itself.
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    csv.field_size_limit(sys.maxsize)  # a cell may hold a whole document
    # The last line is noted here: the reader does not see a line that was refused.
    where = Where(file, 0, "line")

    def texts() -> Iterator[str]:
        nonlocal where
        for line, place in lines_of(file, stream, bad):
            where = place
            yield line

    reader = csv.reader(texts(), delimiter=delimiter, quoting=quoting, strict=True)
    columns: list[str] | None = None
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = f"{error}. A quotation mark inside of a quoted cell is written twice."
            bad(RecordError(f"{where}: {problem}", where=where, reason="not a table's row"))
            continue
        if columns is None:
            columns = cells
            if twice := [name for name in columns if columns.count(name) > 1]:
                raise DataError(
                    f'{where}: the header names the column "{excerpt(twice[0])}" twice, and which '
                    "of the two counts is not defined. Rename one."
                )
        elif len(cells) == len(columns):
            yield Record(dict(zip(columns, cells, strict=True)), where)
        elif cells:
            bad(
                RecordError(
                    f"{where}: {plural(len(cells), 'cell')}, but the header names "
                    f"{plural(len(columns), 'column')} ({names(columns)}): "
                    f"{excerpt(delimiter.join(cells))}.",
                    where=where,
                    reason="another number of cells than the header",
                    content=delimiter.join(cells),
                )
            )


def _not_utf8(content: bytes, start: Where, error: UnicodeDecodeError) -> RecordError:
    """The error for bytes that are no text. ``start``: the line with which they begin."""
    at = error.start
    where = Where(start.file, start.number + content.count(b"\n", 0, at), "line")
    line_start = content.rfind(b"\n", 0, at) + 1
    column = len(content[line_start:at].decode()) + 1
    line = content[line_start : line_start + CONTENT_CHARS].partition(b"\n")[0]
    # Chinese text has two high bytes in a row, European text rarely.
    encoding = "GB18030" if re.search(rb"[\x80-\xff]{2}", line) else "LATIN1"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "UTF-16"
    return RecordError(
        f"{where}, column {column}: not UTF-8: {content[max(0, at - 20) : at + 20]!r}. It looks "
        f"like {encoding}: convert the file, e.g. `iconv -f {encoding} -t UTF-8`.",
        where=where,
        reason="not UTF-8",
        content=line.decode("utf-8", "backslashreplace").rstrip("\r"),
    )


def _not_json(
    text: str, start: Where, error: Exception, at: int = 0, *, array: bool = False
) -> RecordError:
    """The error for text that is not JSON. ``start``: the line with which it begins; ``at``: where
    the value begins."""
    problem = "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        at, problem = error.pos, error.msg
    elif isinstance(error, ValueError):  # Python refuses to read it
        problem = "a number of more than 4,300 digits"
    where = Where(start.file, start.number + text.count("\n", 0, at), "line")
    column = at - text.rfind("\n", 0, at)
    around = excerpt(text[max(0, at - 40) : at + 40])
    return RecordError(
        f"{where}, column {column}: not JSON ({problem}): {around}. Correct the line; a file cut "
        "off in the middle must be downloaded again.",
        where=where,
        reason="not JSON; the array ends here" if array else "not JSON",
        content=around if array else text,
    )
