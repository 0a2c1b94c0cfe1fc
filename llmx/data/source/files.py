"""From files on disk to records, one at a time, each knowing where it came from.

Text, JSON arrays, JSON Lines, TSV and CSV, each also compressed (.gz, .zst, .bz2, .xz); Parquet,
Arrow, ``save_to_disk`` directories; a file, a directory or a glob. What is wrong with a file is
said with its name, its line or row and an excerpt; a wrong record goes to ``bad``, which raises it
or takes note, and the records after it are read.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from llmx.config.build import shown
from llmx.config.file_formats import (
    COLUMNAR_SUFFIXES,
    COMPRESSED,
    DELIMITED_SUFFIXES,
    KNOWN,
    TEXT_SUFFIXES,
    files_in,
    is_saved,
    kind_of,
    name_problem,
)
from llmx.data.source.compressed import DAMAGED, opened
from llmx.data.source.json_array import array_elements
from llmx.data.source.lines import (
    json_lines,
    lines_of,
    no_object,
    paragraphs,
    table_lines,
    text_lines,
    whole_text,
)
from llmx.data.source.records import (
    Meter,
    OnBad,
    PlainText,
    Record,
    RecordError,
    Where,
    excerpt,
    refuse,
)
from llmx.data.source.tables import saved_files, table_rows
from llmx.errors import DataError

__all__ = ["PlainText", "Record", "Where", "excerpt", "read_file", "source_files"]


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
        files = sorted(files_in(place))
    else:
        files = sorted(Path(name) for name in glob.glob(str(place), recursive=True))  # noqa: PTH207
        files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(
            f"data.path={shown(path)}: no such file, or no file there ends in {', '.join(KNOWN)} "
            f"(or one of these and {', '.join(COMPRESSED)}). Relative paths start at "
            f"{Path.cwd()}."
        )
    for file in files:
        if problem := name_problem(file):
            raise DataError(f"{file}: {problem}.")
    return files


def read_file(
    file: Path,
    *,
    bad: OnBad = refuse,
    text_unit: str = "file",
    meter: Meter | None = None,
) -> Iterator[Record | PlainText]:
    """Records of one file (or documents of a text file), in order.

    ``bad`` is called with every record that is wrong; by default it raises. A file that is damaged
    or cut off is such a record too, its last: what follows it cannot be read.
    ``meter`` is kept up to date.
    """
    meter = meter or Meter()
    if kind_of(file) in COLUMNAR_SUFFIXES:
        yield from table_rows(file, bad)
        meter.bytes += file.stat().st_size
        return
    try:
        with opened(file, meter) as stream:
            yield from _records(file, stream, bad, text_unit)
    except DAMAGED as error:
        bad(_damaged(file, error))
    except OSError as error:
        if error.errno is None:  # how bz2 says that the content is damaged
            bad(_damaged(file, error))
            return
        raise DataError(f"{file}: cannot be read ({error}).") from error


def _records(
    file: Path, stream: IO[bytes], bad: OnBad, text_unit: str
) -> Iterator[Record | PlainText]:
    kind = kind_of(file)
    lines = lines_of(file, stream, bad)
    if kind in TEXT_SUFFIXES:
        if text_unit == "file":
            return whole_text(lines, file)
        return text_lines(lines) if text_unit == "line" else paragraphs(lines)
    if kind in DELIMITED_SUFFIXES:
        return table_lines(lines, file, delimiter="\t" if kind == ".tsv" else ",", bad=bad)
    if _first_character(stream) == b"[":
        return _json_array(file, stream, bad)
    return json_lines(lines, bad)


def _damaged(file: Path, error: Exception) -> RecordError:
    return RecordError(
        f"{file}: the compressed file is damaged or cut off ({error}). Download it again.",
        where=Where(file, 0, "end"),
        reason="damaged or cut off; the file ends here",
    )


def _first_character(stream: IO[bytes]) -> bytes:
    head = stream.peek(64) if hasattr(stream, "peek") else b""
    return bytes(head).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _json_array(file: Path, stream: IO[bytes], bad: OnBad) -> Iterator[Record]:
    try:
        for value, where in array_elements(file, stream, bad):
            if isinstance(value, dict):
                yield Record(value, where)
            else:
                bad(no_object(value, where))
    except RecordError as error:
        bad(error)
