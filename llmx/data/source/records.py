"""A record of a source on its way in: keys and values, its place, and what is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.errors import DataError
from llmx.text import printable


@dataclass(frozen=True)
class Where:
    """A place in the sources, for messages."""

    file: Path
    number: int
    unit: str
    """``line``, or ``row`` where a file has no lines (an array, a table), counted from 1."""

    def __str__(self) -> str:
        return f"{printable(str(self.file), keep='')}, {self.unit} {self.number}"


@dataclass(frozen=True)
class Record:
    """One record: the keys and values of a JSON object or of a table's line."""

    value: dict[str, Any]
    where: Where


@dataclass(frozen=True)
class PlainText:
    """A document of a text file, which has no columns."""

    text: str
    where: Where


@dataclass
class Meter:
    """How far a reading is."""

    bytes: int = 0
    """Of the files as they are on disk."""


class RecordError(DataError):
    """One record that cannot be used; the records after it may be good."""

    def __init__(self, message: str, *, where: Where, reason: str, content: str = "") -> None:
        super().__init__(message)
        self.where = where
        self.reason = reason
        """A few words, the same for every record with this fault: what is counted by."""
        self.content = content
        """What was read, as far as it is known."""


OnBad = Callable[[RecordError], None]
"""What is done with a bad record: raise it, or note it and go on."""


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


def key_twice(key: str, value: Any, where: Where) -> RecordError:
    """For a record that has a key twice."""
    return RecordError(
        f'{where}: the key "{excerpt(key)}" is there twice, and which of the two counts is not '
        "defined. Write it once.",
        where=where,
        reason="a key that is there twice",
        content=json.dumps(value, ensure_ascii=False),
    )


def excerpt(value: Any, *, limit: int = 80) -> str:
    """The beginning of a value on one line, for a message; it cannot steer a terminal."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text[: 20 * limit].encode("utf-8", "backslashreplace").decode()  # half a character
    text = printable(" ".join(text.split()), keep="")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def names(found: Iterable[Any], *, limit: int = 12) -> str:
    """Names of columns for a message, not too many: ``id, source and 3 more``."""
    shown = [excerpt(str(name), limit=40) for name in found]
    more = f" and {len(shown) - limit:,} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more


def wrong_record(record: Record, reason: str, problem: str, shown: Any = None) -> RecordError:
    """A RecordError with the record's place and content; ``shown`` is added to the message."""
    what = f" {excerpt(shown)}" if shown else ""
    return RecordError(
        f"{record.where}: {problem}{what}",
        where=record.where,
        reason=reason,
        content=json.dumps(record.value, ensure_ascii=False, default=str),
    )
