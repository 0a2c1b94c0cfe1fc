"""Records and documents of a source, where they stand, and those that are rejected."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from llmx.errors import DataError
from llmx.run.rundir import replacing
from llmx.text import one_line, printable


@dataclass(frozen=True)
class Where:
    """A place in the sources, for messages."""

    file: Path
    number: int
    unit: str
    """``line``, or ``row`` where a file has no lines (an array, a table), counted from 1."""

    def __str__(self) -> str:
        return f"{printable(str(self.file), keep='')}, {self.unit} {self.number}"


class Row:
    """The meaning of a record, in a form that a task may take (``Encoding.takes``)."""

    title: ClassVar[str]
    """The plural of its kind, for messages."""
    if TYPE_CHECKING:  # a field of most rows, and a property of those that hold other rows

        @property
        def where(self) -> Where:
            """Its place in the sources."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts, which a tokenizer is trained on."""
        raise NotImplementedError

    @property
    def content(self) -> bytes:
        """Bytes that are equal for rows of which ``data.deduplicate`` keeps one."""
        return json.dumps(self.texts).encode()

    @property
    def num_bytes(self) -> int:
        """Bytes of its texts as UTF-8."""
        return sum(len(text) if text.isascii() else len(text.encode()) for text in self.texts)


@dataclass(frozen=True)
class Record(Row):
    """One record: the keys and values of a JSON object or of a table's line."""

    title: ClassVar[str] = "records"
    value: dict[str, Any]
    where: Where
    padded: bool = False
    """Whether its objects have the keys of all records' objects, with null where they had none, as
    the columns of Arrow do."""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(value for value in self.value.values() if isinstance(value, str))

    @property
    def content(self) -> bytes:
        return json.dumps(self.value, default=str).encode()


@dataclass(frozen=True)
class Document(Row):
    """Text to pretrain on: of a text file, or of a record with a text."""

    title: ClassVar[str] = "text"
    text: str
    where: Where

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)


@dataclass
class Meter:
    """Counts the bytes that were read."""

    bytes: int = 0
    """Bytes of the files as they are on disk."""


class Rejected(Exception):
    """Raised for a record that is wrong, by its reader or by a task's ``encode``
    (``data.on_bad_row`` says what happens then)."""

    def __init__(self, reason: str, message: str = "", value: Any = None) -> None:
        """``reason``: a few words, the same for every record with this fault. ``value`` is added to
        the message."""
        super().__init__(f"{message or reason} {excerpt(value)}" if value else message or reason)
        self.reason = reason


class RecordError(DataError):
    """One record that cannot be used; the records after it may be good."""

    def __init__(self, message: str, *, where: Where, reason: str, content: str = "") -> None:
        super().__init__(message)
        self.where = where
        self.reason = reason
        """A few words, the same for every record with this fault: what is counted by."""
        self.content = content
        """The record as it was read, as far as it is known."""

    @classmethod
    def of(cls, problem: Rejected, where: Where, content: Any = None) -> RecordError:
        """The error for a record at this place."""
        text = "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
        return cls(f"{where}: {problem}", where=where, reason=problem.reason, content=text)


OnBad = Callable[[RecordError], None]
"""Handles a bad record: raises it, or records it and goes on."""


def refuse(error: RecordError) -> None:
    """Stop at the first bad record."""
    raise error


class RecordDecoder(json.JSONDecoder):
    """Python's decoder, which also reports a key that an object has twice: it keeps the last
    value, where another reader would keep the first."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object)
        self.twice: str | None = None
        """Such a key of what was decoded since this was set to None."""

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            self.twice = next(key for key, count in counts.items() if count > 1)
        return value


def excerpt(value: Any, *, limit: int = 80) -> str:
    """The beginning of a value on one line, for a message; it cannot steer a terminal."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text[: 20 * limit].encode("utf-8", "backslashreplace").decode()  # half a character
    return one_line(text, limit=limit)


def first_line(error: Exception) -> str:
    """The type and the first line of an error of another library, as a sentence."""
    lines = str(error).strip().splitlines()
    text = f": {printable(lines[0]).rstrip('.: ')}" if lines else ""
    return f"{type(error).__name__}{text}."


def names(columns: Iterable[Any], *, limit: int = 12) -> str:
    """Names of columns for a message, not too many: ``id, source and 3 more``."""
    excerpts = [excerpt(str(name), limit=40) for name in columns]
    remainder = f" and {len(excerpts) - limit:,} more" if len(excerpts) > limit else ""
    return ", ".join(excerpts[:limit]) + remainder


# Rejected records (data.on_bad_row=skip)

MEMORY_BYTES = 1 << 20
CONTENT_CHARS = 100_000
"""The length to which the content of a rejected record is cut."""


class RejectedUnwritten(DataError):
    """The reject file cannot be written; the records themselves are all prepared."""


class RejectedRecords:
    """Takes note of bad records (``data.on_bad_row=skip``). Memory stays flat: beyond a MiB they
    wait in a temporary file."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """The number of records by reason."""
        self.first = ""
        """The message of the first one."""
        lines = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115
        self._lines: IO[bytes] = lines
        weakref.finalize(self, lines.close)

    def add(self, error: RecordError) -> None:
        """Count a record, and write it with its message."""
        self.counts[error.reason] += 1
        self.first = self.first or str(error)
        line = {
            "file": str(error.where.file),
            error.where.unit: error.where.number,
            "reason": error.reason,
            "message": str(error),
            "content": error.content[:CONTENT_CHARS],
        }
        self._lines.write(json_line(line))

    def clear(self) -> None:
        """Drop all records, for another reading of the same source."""
        self.counts.clear()
        self.first = ""
        self._lines.seek(0)
        self._lines.truncate()

    def write(self, path: Path) -> Path | None:
        """Write one JSON line a record, whole or not at all; None where there is none."""
        if not self.counts:
            return None
        self._lines.seek(0)
        try:
            with replacing(path) as stream:
                shutil.copyfileobj(self._lines, stream)
        except OSError as error:
            raise RejectedUnwritten(
                f"Cannot write the rejected rows to {printable(str(path))}: {error}. Free some "
                "space, or set data.cache_dir to another disk."
            ) from error
        return path


def json_line(value: Any) -> bytes:
    """A value as a line of JSON in UTF-8."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, default=str).encode() + b"\n"


def counted(reasons: Mapping[str, int]) -> str:
    """``no turns (2), not JSON (1,200)``: how many records by the reason."""
    return ", ".join(f"{reason} ({count:,})" for reason, count in reasons.items())
