"""The columns of one record: read by our names, and judged where its reader left them unread.

Some unread columns change what a record means: ``label: false`` marks a bad answer, ``images``
belong to the text, a turn with ``weight: 0`` must not be trained on. A record with such a column is
rejected, with the reason and the fix. Every other unread column is listed in the summary ("ignored
columns: id, source").

Tried by ``python -m pytest tests/unit/test_data_columns.py``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmx.data.format.rows import Message
from llmx.data.format.turns import READ_OF_A_TURN, TURN_WEIGHTS, rows_of, turns
from llmx.data.source.records import Record, Rejected, excerpt, names


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
    """One record, as a reader sees it. It notes what was read."""

    def __init__(self, record: Record, reading: Reading) -> None:
        self.record = record
        self.where = record.where
        self.reading = reading
        self.read: set[str] = set()
        """Columns that were asked for, as they are called in the data."""
        self.turns_read: list[tuple[str, list[Any], bool]] = []
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

    def text(self, name: str, *, optional: bool = False) -> str:
        """The text of our column; Rejected where there is none. ``optional``: it may be missing or
        null, which is the empty text."""
        key = self.column(name)
        value = self.at(key)
        if value is None and optional:
            return ""
        if key not in self.record.value:
            raise Rejected(
                "a missing column",
                f'no column "{excerpt(key)}"; the row has {names(self.record.value) or "none"}. '
                "Map your names with data.columns, or set data.text_key.",
            )
        return checked_text(key, value)

    def turns(
        self,
        name: str,
        value: Any = None,
        *,
        before: list[Message] | None = None,
        weighted: bool = False,
    ) -> list[Message]:
        """The turns that our column (or ``value``, taken from it) holds, after those of
        ``before``."""
        key = self.column(name)
        rows = rows_of(self.at(key) if value is None else value, key)
        self.turns_read.append((key, rows, weighted))
        return turns(rows, key, before=before, weighted=weighted)


def checked_text(key: str, value: Any) -> str:
    """The value of a column, which must be text."""
    if not isinstance(value, str):
        problem = f'"{excerpt(key)}" is {excerpt(value)}, not text.'
        raise Rejected("a value of a wrong type", problem)
    return value


def _without_nulls(value: Any) -> Any:
    """The value without the null values of its objects: Arrow gives every object of a column the
    keys of all of them."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return value


# Columns that were not read

MEDIA = ("image", "images", "audio", "audios", "video", "videos")
MEDIA_WORDS = ("image", "img", "picture", "pixel", "audio", "video", "media")
PLACEHOLDERS = ("<image>", "<img>", "<|image|>", "<image_placeholder>", "<audio>", "<|audio|>",
                "<video>", "<|video|>")  # fmt: skip
WEIGHTS = ("weight", "weights", "loss_weight", "sample_weight", "loss", "mask", "loss_mask")
VERDICTS = ("label", "kto_tag", "desirable", "is_desirable")
"""Columns that say whether an answer is good: the first that a record has is read."""
JUDGEMENTS = (*VERDICTS, "correct", "is_correct", "accepted")
"""Columns that say whether an answer is good, the last ones or something else."""
MATCHES = ("label", "score", "similarity", "is_duplicate", "relevance")
"""Columns that say whether two texts belong together."""
GOOD = (True, 1, "true", "1", "1.0")
BAD = (False, 0, "false", "0", "0.0", "no", "n")
RENAME_CALLS = 'Rename it to "tool_calls", and put it into the turn that calls'


@dataclass(frozen=True)
class Fault:
    """What a column changes; ``{name}`` in the fix is its name."""

    reason: str
    means: str
    fix: str
    ignorable: bool = True
    """Whether the message offers ``data.ignore_columns``."""


_TEXT_ONLY = Fault(
    "images, audio or video",
    "the row is about it, and only text is trained",
    "Filter such rows out (data.on_bad_row=skip does it, and counts them)",
)
_NOT_GOOD = Fault(
    "an answer that is marked as bad",
    "the answer is marked as a bad one, and this task learns every answer as a good one",
    "task=dpo task.options.loss=kto data.columns.desirable={name} learns from good and bad "
    "answers; data.on_bad_row=skip keeps the good ones alone and counts the rest; "
    "data.form=labelled data.data_map.label={name} learns the value itself",
    ignorable=False,
)
_NO_VERDICT = Fault(
    "a label that nothing uses",
    "it labels the row, and this dataset format does not read it",
    "data.form=labelled data.data_map.label={name} learns the label itself",
)
_WEIGHT = Fault(
    "a weight or a mask of the loss",
    "it weights or masks the loss, and every row counts alike here",
    "Remove the rows that are not to be learned",
)
_TURN_WEIGHT = Fault(
    "a turn that is not to be learned",
    "it takes the turn out of the loss, and every answer is learned here",
    'To learn each turn with its weight, call the column "weight" and set task=sft '
    "task.options.turn_weights=true; to learn the last answers alone, set data.loss_on=last",
)
_NO_MATCH = Fault(
    "a pair that may not belong together",
    "it says how well the two texts belong together, and every pair is learned as one that does",
    "Filter the rows by it first (data.on_bad_row=skip leaves out all but those with 1 or true)",
)


def unread_columns(
    fields: Fields,
    *,
    ignore: Collection[str],
    changing: Mapping[str, str],
    learned: bool,
    is_pair: bool,
) -> Iterator[str]:
    """The names of the columns with a value that were not read, also of turns (``messages.id``).

    ``ignore``: columns that may be ignored whatever they hold (``data.ignore_columns``).
    ``changing``: of the format. ``learned``: each answer is learned as a good one. ``is_pair``: the
    record is learned as a pair of texts.

    Raises Rejected for a column that changes what the record means.
    """

    def fault_of(name: str, value: Any) -> Fault | None:
        if name in MEDIA or (
            any(word in name for word in MEDIA_WORDS) and _has_placeholder(fields)
        ):
            return _TEXT_ONLY
        if name in WEIGHTS and value not in GOOD:
            return _WEIGHT
        if name in MATCHES and is_pair and value not in GOOD:
            return _NO_MATCH
        if name in JUDGEMENTS and learned and value in BAD:
            return _NOT_GOOD
        if name in VERDICTS and learned and value not in GOOD:
            return _NO_VERDICT
        if name in changing and value is not True:
            means = "it changes what the row means, and this dataset format does not read it"
            return Fault("a column that nothing uses", means, changing[name])
        return None

    for name, value in fields.record.value.items():
        if name in fields.read or _is_empty(value):
            continue
        if name not in ignore and (fault := fault_of(_plain(name), _plain(value))):
            raise _rejected("", name, value, fault)
        yield name
    for column, rows, weighted in fields.turns_read:
        known = READ_OF_A_TURN | {*TURN_WEIGHTS} if weighted else READ_OF_A_TURN
        for number, turn in enumerate(rows, start=1):
            for name in turn.keys() - known:
                value = turn[name]
                if _is_empty(value):
                    continue
                if name not in ignore and (fault := _fault_of_turn(name, value, turn)):
                    place = f'turn {number} of "{excerpt(column)}": '
                    raise _rejected(place, name, value, fault)
                yield f"{column}.{name}"


def _fault_of_turn(name: str, value: Any, turn: dict[str, Any]) -> Fault | None:
    name = _plain(str(name))
    if name in MEDIA:
        return _TEXT_ONLY
    # A turn that is no target may well be out of the loss.
    if str(turn.get("role", turn.get("from"))).lower() in ("human", "user", "system", "tool"):
        return None
    if name in (*WEIGHTS, "train") and _plain(value) not in GOOD:
        return _TURN_WEIGHT
    if name in ("function_calls", "tool_call"):
        return Fault("calls of tools that nothing uses", "it is not read", RENAME_CALLS)
    return None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict | tuple) and not _plain(value))


def _plain(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _has_placeholder(fields: Fields) -> bool:
    """Whether a text that was read has a placeholder for an image, audio or video."""
    read = [value for name, value in fields.record.value.items() if name in fields.read]
    text = json.dumps(read, ensure_ascii=False, default=str).lower()
    return any(word in text for word in PLACEHOLDERS)


def _rejected(place: str, name: str, value: Any, fault: Fault) -> Rejected:
    fix = fault.fix.format(name=excerpt(name))
    if fault.ignorable:
        fix += f"; or data.ignore_columns=[{excerpt(name)}] trains on the text alone"
    problem = f'{place}"{excerpt(name)}" is {excerpt(value, limit=40)}: {fault.means}. {fix}.'
    return Rejected(fault.reason, problem)
