"""The columns of one record by our names, with a note of those that were read.

A reader asks for what it needs; what it did not ask for is judged and listed by ``columns``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmx.data.format.rows import Message
from llmx.data.format.turns import by_rows, turns
from llmx.data.source.records import Record, RecordError, excerpt, names, wrong_record


@dataclass(frozen=True)
class Reading:
    """The options of ``data`` that readers of records use."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of a column -> the one in the data."""
    text_key: str = "text"
    system: str | None = None
    """A system message for records that have none."""
    label_names: Mapping[str, str] = field(default_factory=dict)
    turn_weights: bool = False
    """Whether the "weight" of an assistant's turn of a chat is read."""


class Fields:
    """One record, as a reader sees it."""

    def __init__(self, record: Record, reading: Reading) -> None:
        self.record = record
        self.where = record.where
        self.reading = reading
        self.read: set[str] = set()
        """Columns that were asked for, as they are called in the data."""
        self.turns_read: list[tuple[str, Any, bool]] = []
        """(column, its turns, whether their weights count) of columns that were read as turns."""

    def column(self, name: str) -> str:
        """Our column, as it is called in the data; TRL calls the response ``completion``."""
        if name == "text":
            return self.reading.text_key
        if name == "response" and name not in self.reading.columns:
            value = self.record.value
            return "completion" if name not in value and "completion" in value else name
        return self.reading.columns.get(name, name)

    def has(self, *our_names: str) -> bool:
        """Whether the record has all of these columns; none of them counts as read."""
        return all(self.column(name) in self.record.value for name in our_names)

    def first(self, name: str, candidates: tuple[str, ...]) -> str | None:
        """The column that is mapped to our name, else the first of the candidates, as far as the
        record has it."""
        mapped = self.reading.columns.get(name)
        keys = (mapped,) if mapped else candidates
        return next((key for key in keys if key in self.record.value), None)

    def get(self, name: str) -> Any:
        """The value of our column; None where there is none."""
        return self.at(self.column(name))

    def at(self, key: str) -> Any:
        """The value of a column by its name in the data; None where there is none."""
        self.read.add(key)
        value = self.record.value.get(key)
        return _without_nulls(value) if self.record.padded else value

    def text(self, name: str) -> str:
        """The text of our column; raises RecordError where there is none."""
        key = self.column(name)
        value = self.at(key)
        if key not in self.record.value:
            raise self.wrong(
                "a missing column",
                f'no column "{excerpt(key)}"; the row has {names(self.record.value) or "none"}. '
                "Map your names with data.columns, or set data.text_key.",
            )
        if not isinstance(value, str):
            raise self.wrong_type(key, value)
        return value

    def text_if_any(self, name: str) -> str:
        """The text of our column; empty where it is missing or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong_type(self.column(name), value)
        return value or ""

    def turns(
        self, key: str, value: Any, *, before: list[Message] | None = None, weighted: bool = False
    ) -> list[Message]:
        """The turns that a column of this name in the data holds, after those of ``before``."""
        rows = by_rows(value)
        self.turns_read.append((key, rows, weighted))
        return turns(rows, key, self.where, before=before, weighted=weighted)

    def wrong(self, reason: str, problem: str, value: Any = None) -> RecordError:
        """The error for this record; ``value`` is added to the message."""
        return wrong_record(self.record, reason, problem, value)

    def wrong_type(self, key: str, value: Any) -> RecordError:
        reason = "a value of a wrong type"
        return self.wrong(reason, f'"{excerpt(key)}" is {excerpt(value)}, not text.')

    def check_characters(self, text: str) -> None:
        """Raise RecordError for half of a surrogate pair: JSON can write it, nothing encodes it."""
        if text.isascii():
            return
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = error.start
            raise self.wrong(
                "half of a surrogate pair",
                f"character {at + 1} of a text is half of a surrogate pair "
                f"(\\u{ord(text[at]):04x}), which is no text. Repair the row, or leave it out with "
                "data.on_bad_row=skip:",
                text[max(0, at - 20) : at + 20],
            ) from error


def _without_nulls(value: Any) -> Any:
    """The value without the null values of its objects: Arrow gives every object of a column the
    keys of all of them."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return value
