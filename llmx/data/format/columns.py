"""Checks the columns that a dataset format does not read.

Some of them change what a record means: ``label: false`` marks a bad answer, ``images`` belong to
the text, a turn with ``weight: 0`` must not be trained on. A record with such a column is rejected,
with the reason and the fix. Every other unread column is listed in the summary ("ignored columns:
id, source").

Tried by ``python -m pytest tests/unit/test_data_columns.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from llmx.data.format.formats import Format, Reading
from llmx.data.format.turns import THOUGHTS, TURN_WEIGHTS, by_rows
from llmx.data.source.records import Record, excerpt, wrong_record

READ_OF_A_TURN = {
    "role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name",
    *THOUGHTS,
}  # fmt: skip
HOLD_TURNS = ("conversations", "messages", "chosen", "rejected", "prompt", "response")
"""Columns (by our names) that may hold turns."""
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
MEDIA_WORDS = ("image", "img", "picture", "pixel", "audio", "video", "media")
PLACEHOLDERS = ("<image>", "<img>", "<|image|>", "<image_placeholder>", "<audio>", "<|audio|>",
                "<video>", "<|video|>")  # fmt: skip
WEIGHTS = ("weight", "weights", "loss_weight", "sample_weight", "loss", "mask", "loss_mask")
REMEMBERED = 1000
"""Layouts of records, and names of columns, that are kept in memory."""


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | dict | tuple) and not len(value))


def _says(value: Any, truth: bool, *spellings: str) -> bool:
    """Whether a value is this truth value, or one of its spellings as text."""
    return value is truth or (isinstance(value, str) and value.strip().lower() in spellings)


def _is_true(value: Any) -> bool:
    return _says(value, True, "true")


def _is_false(value: Any) -> bool:
    return _says(value, False, "false")


def _is_negative_verdict(value: Any) -> bool:
    return value in (False, 0) or _says(value, False, "false", "0", "0.0", "no", "n")


def _is_neutral_weight(value: Any) -> bool:
    return value in (True, 1) or _says(value, True, "true", "1", "1.0")


@dataclass(frozen=True)
class Rule:
    """A column whose values, but for the harmless ones, change what a record means."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    """Formats, or ``Format.groups``, for which it holds; ``every`` of them."""
    harmless: Callable[[Any], bool]
    """Whether a value that is not empty changes nothing."""
    reason: str
    means: str
    """The meaning of the value, for the message."""
    fix: str
    """``{name}`` is the column's name."""
    ignorable: bool = True
    """Whether the message offers ``data.ignore_columns``."""


def _never(value: Any) -> bool:
    return False


_FILTER = "Filter such rows out (data.on_bad_row=skip does it, and counts them)"
_TEXT_ONLY = Rule(
    MEDIA, ("every",), _never, "images, audio or video",
    "the row is about it, and only text is trained", f"{_FILTER}",
)  # fmt: skip
_NOT_GOOD = Rule(
    ("label",), ("learned",), lambda value: not _is_false(value), "an answer that is marked as bad",
    "the answer is marked as a bad one, and this task learns every answer as a good one",
    "task=dpo task.options.loss=kto data.columns.desirable={name} learns from good and bad "
    "answers; data.on_bad_row=skip keeps the good ones alone and counts the rest",
    ignorable=False,
)  # fmt: skip
_NOT_RIGHT = replace(
    _NOT_GOOD,
    names=("kto_tag", "desirable", "is_desirable", "correct", "is_correct", "accepted"),
    harmless=lambda value: not _is_negative_verdict(value),
)
_LABEL = Rule(
    ("label",), ("learned",), lambda value: _is_true(value) or _is_false(value),
    "a label that nothing uses",
    "it labels the row, and this dataset format has no use for it",
    "To learn the label itself: data.form=labelled data.data_map.label={name}",
)  # fmt: skip
_WEIGHT = Rule(
    WEIGHTS, ("every",), _is_neutral_weight, "a weight or a mask of the loss",
    "it weights or masks the loss, and every row counts alike here",
    "Remove the rows that are not to be learned",
)  # fmt: skip
_SCORE = Rule(
    ("score", "rating", "reward"), ("learned",), _never, "a score that nothing uses",
    "it says how good the answer is, and every answer is learned alike",
    "Filter the rows by it first",
)  # fmt: skip
_CHOSEN = Rule(
    ("chosen", "chosen_response"), ("learned",), _is_true, "one of a preference pair",
    "it belongs to a preference pair", "data.form=preference learns the chosen answers",
)  # fmt: skip
_REJECTED = Rule(
    ("rejected", "rejected_response"), ("learned",), _is_false, "one of a preference pair",
    "it belongs to a preference pair",
    "data.form=preference data.columns.rejected={name} learns the chosen answers "
    "(data.columns.chosen=COLUMN names them)",
)  # fmt: skip
_HISTORY = Rule(
    ("history",), ("chat", "preference"), _never, "earlier turns that nothing uses",
    "it holds earlier turns, which this dataset format does not read",
    "Put them into the turns of the row",
)  # fmt: skip
_CONTEXT = Rule(
    ("context",), ("alpaca",), _never, "a context that nothing uses",
    "the answer is about it, and this dataset format reads it as the input",
    "data.columns.input={name}",
)  # fmt: skip
_INPUT = Rule(
    ("context", "input"), ("prompt_response",), _never, "a context that nothing uses",
    "the answer is about it, and this dataset format does not read it",
    "data.form=alpaca data.columns.instruction=prompt data.columns.input={name} "
    "data.columns.output=response",
)  # fmt: skip
_LABELLED_CONTEXT = Rule(
    ("context", "input"), ("labelled",), _never, "a context that nothing uses",
    "the label is about it, and this dataset format does not read it",
    "data.data_map.history={name} puts it before the prompt",
)  # fmt: skip
_SYSTEM = Rule(
    ("system_prompt", "system_message"), ("answered",), _never,
    "a system message that nothing uses",
    "it is a system message, which is read from the column \"system\"",
    "data.columns.system={name}",
)  # fmt: skip
_TOOLS = Rule(
    ("functions", "available_tools"), ("answered",), _never, "tools that nothing uses",
    "it defines tools, which are read from the column \"tools\"", "data.columns.tools={name}",
)  # fmt: skip
_CALLS = Rule(
    ("function_calls", "tool_call"), ("answered",), _never, "calls of tools that nothing uses",
    "calls of tools are read from \"tool_calls\" of the turn that calls",
    "Rename it, or move the calls there",
)  # fmt: skip
_NO_MATCH = Rule(
    ("label", "score", "similarity", "is_duplicate", "relevance"), ("pair",), _is_neutral_weight,
    "a pair that may not belong together",
    "it says how well the two texts belong together, and every pair is learned as one that does",
    "Filter the rows by it first (data.on_bad_row=skip leaves out all but those with 1 or true)",
)  # fmt: skip
RULES = (
    _TEXT_ONLY, _NOT_GOOD, _NOT_RIGHT, _LABEL, _WEIGHT, _SCORE, _CHOSEN, _REJECTED, _HISTORY,
    _CONTEXT, _INPUT, _LABELLED_CONTEXT, _SYSTEM, _TOOLS, _CALLS, _NO_MATCH,
)  # fmt: skip

_TURN_RULES = (
    _TEXT_ONLY,
    Rule(
        (*WEIGHTS, "train"), ("answered",), _is_neutral_weight, "a turn that is not to be learned",
        "it takes the turn out of the loss, and every answer is learned here",
        "To learn each turn with its weight, call the column \"weight\" and set task=sft "
        "task.options.turn_weights=true; to learn the last answers alone, set data.loss_on=last",
    ),
    _CALLS,
)  # fmt: skip


class ColumnCheck:
    """Checks the records of one source; ``ignored`` collects the names of unread columns."""

    def __init__(
        self,
        dataset_format: Format,
        reading: Reading,
        *,
        ignore: Collection[str],
        ignored: set[str],
        verdicts: Collection[str] = (),
    ) -> None:
        """``ignore``: columns that may be ignored whatever they hold (``data.ignore_columns``).
        ``verdicts``: columns that say whether an answer is good, where that is read."""
        self._format = dataset_format
        self._reading = reading
        self._groups = {"every", dataset_format.name, *dataset_format.groups}
        self._reads = frozenset({*map(reading.column, dataset_format.reads), *verdicts})
        self._read_of_a_turn = READ_OF_A_TURN
        if reading.turn_weights and "chat" in self._groups:
            self._read_of_a_turn = READ_OF_A_TURN | {*TURN_WEIGHTS}
        self._ignore = frozenset(ignore)
        self._ignored = ignored
        read_turns = [name for name in HOLD_TURNS if name in dataset_format.reads]
        self._chats = {*map(reading.column, ("conversations", "messages"))}
        self._turn_columns = [*map(reading.column, read_turns), "completion"]
        self._layouts: dict[tuple[str, ...], _Layout] = {}

    def __call__(self, record: Record) -> None:
        """Raise RecordError for a column that changes what the record means."""
        value = record.value
        names = tuple(value)
        if names not in self._layouts:
            if len(self._layouts) >= REMEMBERED:
                self._layouts.clear()
            self._layouts[names] = self._layout(names)
        layout = self._layouts[names]
        for name, rules in layout.unread:
            if _is_empty(value[name]):
                continue
            if name not in self._ignore:
                for rule in rules:
                    if rule is _PLACEHOLDER and not _has_placeholder(record, layout.used):
                        continue
                    if not rule.harmless(value[name]):
                        raise _changes(record, "", name, value[name], rule)
            self._note(name)
        for name in layout.turn_columns:
            turns = by_rows(value[name], json_text=name in self._chats)
            # A pair's answer may be one turn without a list.
            turns = [turns] if isinstance(turns, dict) else turns
            for number, turn in enumerate(turns if isinstance(turns, list) else [], start=1):
                if isinstance(turn, dict) and turn.keys() - self._read_of_a_turn:
                    self._check_turn(record, name, number, turn)

    def _note(self, name: str) -> None:
        if name not in self._ignored and len(self._ignored) < REMEMBERED:
            self._ignored.add(name)

    def _layout(self, names: tuple[str, ...]) -> _Layout:
        used = self._reads
        if self._format.used:
            used = self._format.used(used, frozenset(names), self._reading)
        unread = []
        for name in names:
            if name in used:
                continue
            lower = name.strip().lower()
            rules = [r for r in RULES if lower in r.names and not self._groups.isdisjoint(r.groups)]
            # Both would say the same of a system message, or of tools, that is read already.
            if lower in used and any(rule in (_SYSTEM, _TOOLS) for rule in rules):
                rules = []
            if not rules and any(word in lower for word in MEDIA_WORDS):
                rules = [_PLACEHOLDER]
            unread.append((name, rules))
        turn_columns = [name for name in self._turn_columns if name in names]
        if "completion" not in used:
            turn_columns = [name for name in turn_columns if name != "completion"]
        return _Layout(used, unread, turn_columns)

    def _check_turn(self, record: Record, column: str, number: int, turn: dict[str, Any]) -> None:
        place = f'turn {number} of "{excerpt(column)}": '
        role = str(turn.get("role", turn.get("from"))).lower()
        for name, value in turn.items():
            if name in self._read_of_a_turn or _is_empty(value):
                continue
            self._note(f"{column}.{name}")
            if name in self._ignore:
                continue
            lower = str(name).strip().lower()
            for rule in _TURN_RULES:
                # A turn that is no target may well be out of the loss.
                is_prompt = rule is not _TEXT_ONLY and role in ("human", "user", "system", "tool")
                if lower in rule.names and not is_prompt and not rule.harmless(value):
                    raise _changes(record, place, name, value, rule)


@dataclass(frozen=True)
class _Layout:
    """How the columns of a record are used: the same for all records with these columns."""

    used: frozenset[str]
    """The columns that are read."""
    unread: list[tuple[str, list[Rule]]]
    """The others, with the rules for them."""
    turn_columns: list[str]
    """The columns that hold turns."""


def _has_placeholder(record: Record, used: frozenset[str]) -> bool:
    """Whether a text that is read has a placeholder for an image, audio or video."""
    read = [record.value[name] for name in used if name in record.value]
    text = json.dumps(read, ensure_ascii=False, default=str).lower()
    return any(word in text for word in PLACEHOLDERS)


_PLACEHOLDER = Rule(
    (), ("every",), _never, _TEXT_ONLY.reason,
    "the text has a placeholder for it, and only text is trained", _TEXT_ONLY.fix,
)  # fmt: skip


def _changes(record: Record, place: str, name: str, value: Any, rule: Rule) -> Any:
    fix = rule.fix.format(name=excerpt(name))
    if rule.ignorable:
        fix += f"; or data.ignore_columns=[{excerpt(name)}] trains on the text alone"
    return wrong_record(
        record,
        rule.reason,
        f'{place}"{excerpt(name)}" is {excerpt(value, limit=40)}: {rule.means}. {fix}.',
    )
