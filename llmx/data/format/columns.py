"""Judges the columns of a record that its reader did not read.

Some of them change what a record means: ``label: false`` marks a bad answer, ``images`` belong to
the text, a turn with ``weight: 0`` must not be trained on. A record with such a column is rejected,
with the reason and the fix. Every other unread column is listed in the summary ("ignored columns:
id, source").

Tried by ``python -m pytest tests/unit/test_data_columns.py``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from llmx.data.format.fields import Fields
from llmx.data.format.formats import RENAME_CALLS, VERDICTS, Format
from llmx.data.format.rows import TextPair, UnpairedPreference
from llmx.data.format.turns import READ_OF_A_TURN, TURN_WEIGHTS
from llmx.data.source.records import RecordError, excerpt

MEDIA = ("image", "images", "audio", "audios", "video", "videos")
MEDIA_WORDS = ("image", "img", "picture", "pixel", "audio", "video", "media")
PLACEHOLDERS = ("<image>", "<img>", "<|image|>", "<image_placeholder>", "<audio>", "<|audio|>",
                "<video>", "<|video|>")  # fmt: skip
WEIGHTS = ("weight", "weights", "loss_weight", "sample_weight", "loss", "mask", "loss_mask")
JUDGEMENTS = ("correct", "is_correct", "accepted")
"""Further columns that may say whether an answer is good, or hold something else."""
MATCHES = ("label", "score", "similarity", "is_duplicate", "relevance")
"""Columns that say whether two texts belong together."""


@dataclass(frozen=True)
class Fault:
    """What a column changes; ``{name}`` in the fix is its name."""

    reason: str
    means: str
    fix: str
    ignorable: bool = True
    """Whether the message offers ``data.ignore_columns``."""


_SKIP = "Filter such rows out (data.on_bad_row=skip does it, and counts them)"
_TEXT_ONLY = Fault("images, audio or video", "the row is about it, and only text is trained", _SKIP)
_PLACEHOLDER = Fault(
    _TEXT_ONLY.reason, "the text has a placeholder for it, and only text is trained", _SKIP
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
    fields: Fields, dataset_format: Format, row_type: type | None, ignore: Collection[str]
) -> Iterator[str]:
    """The names of the columns with a value that were not read, also of turns (``messages.id``).

    ``ignore``: columns that may be ignored whatever they hold (``data.ignore_columns``).

    Raises RecordError for a column that changes what the record means.
    """
    for name, value in fields.record.value.items():
        if name in fields.read or _is_empty(value):
            continue
        if name not in ignore and (fault := _fault(fields, name, value, dataset_format, row_type)):
            raise _error(fields, "", name, value, fault)
        yield name
    for column, turns, weighted in fields.turns_read:
        known = READ_OF_A_TURN | {*TURN_WEIGHTS} if weighted else READ_OF_A_TURN
        for number, turn in enumerate(turns, start=1):
            for name in turn.keys() - known:
                value = turn[name]
                if _is_empty(value):
                    continue
                if name not in ignore and (fault := _fault_of_turn(name, value, turn)):
                    place = f'turn {number} of "{excerpt(column)}": '
                    raise _error(fields, place, name, value, fault)
                yield f"{column}.{name}"


def _fault(
    fields: Fields, name: str, value: Any, dataset_format: Format, row_type: type | None
) -> Fault | None:
    lower = name.strip().lower()
    if lower in MEDIA:
        return _TEXT_ONLY
    if lower in WEIGHTS and not _is_one(value):
        return _WEIGHT
    if lower in MATCHES and row_type is TextPair and not _is_one(value):
        return _NO_MATCH
    learned_as_good = dataset_format.learned and row_type is not UnpairedPreference
    if learned_as_good and lower in (*VERDICTS, *JUDGEMENTS) and _is_negative(value):
        return _NOT_GOOD
    if learned_as_good and lower in VERDICTS and not _is_one(value):
        return _NO_VERDICT
    if lower in dataset_format.changing and value is not True:
        means = "it changes what the row means, and this dataset format does not read it"
        return Fault("a column that nothing uses", means, dataset_format.changing[lower])
    if any(word in lower for word in MEDIA_WORDS) and _has_placeholder(fields):
        return _PLACEHOLDER
    return None


def _fault_of_turn(name: str, value: Any, turn: dict[str, Any]) -> Fault | None:
    lower = str(name).strip().lower()
    if lower in MEDIA:
        return _TEXT_ONLY
    # A turn that is no target may well be out of the loss.
    if str(turn.get("role", turn.get("from"))).lower() in ("human", "user", "system", "tool"):
        return None
    if lower in (*WEIGHTS, "train") and not _is_one(value):
        return _TURN_WEIGHT
    if lower in ("function_calls", "tool_call"):
        return Fault("calls of tools that nothing uses", "it is not read", RENAME_CALLS)
    return None


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | dict | tuple) and not len(value))


def _is_one(value: Any) -> bool:
    text = value.strip().lower() if isinstance(value, str) else value
    return text in (True, 1, "true", "1", "1.0")


def _is_negative(value: Any) -> bool:
    text = value.strip().lower() if isinstance(value, str) else value
    return text in (False, 0, "false", "0", "0.0", "no", "n")


def _has_placeholder(fields: Fields) -> bool:
    """Whether a text that was read has a placeholder for an image, audio or video."""
    read = [value for name, value in fields.record.value.items() if name in fields.read]
    text = json.dumps(read, ensure_ascii=False, default=str).lower()
    return any(word in text for word in PLACEHOLDERS)


def _error(fields: Fields, place: str, name: str, value: Any, fault: Fault) -> RecordError:
    fix = fault.fix.format(name=excerpt(name))
    if fault.ignorable:
        fix += f"; or data.ignore_columns=[{excerpt(name)}] trains on the text alone"
    problem = f'{place}"{excerpt(name)}" is {excerpt(value, limit=40)}: {fault.means}. {fix}.'
    return fields.wrong(fault.reason, problem)
