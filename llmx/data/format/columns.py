"""Columns that no dataset format reads: those that change what a record means are never ignored.

A record with ``label: false`` is a bad answer, one with ``images`` is about pictures, a turn with
``weight: 0`` is not to be learned. Training on its text alone would be training on something else,
so such a record is rejected, with the reason and the way out. Every other column that is not used
is noted by name, for the summary ("ignored columns: id, source").

Tried by ``python -m pytest tests/unit/test_data_columns.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmx.data.format.turns import TURN_WEIGHTS, by_rows
from llmx.data.source.records import Record, excerpt, wrong_record

RANKED = ("output", "response", "responses", "answers")
"""Columns that may hold a list of answers, the best one first."""
CHATS = ("sharegpt", "messages")
SINGLE = ("alpaca", "prompt_response")
LEARNED = (*CHATS, *SINGLE)
"""Formats whose answers are learned as they stand."""
ANSWERED = (*LEARNED, "labelled", "preference")
EVERY = (*ANSWERED, "text", "pair")

READ = {
    "text": ("title", "content"),
    "alpaca": ("instruction", "input", "output", "history", "system", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "messages": ("messages", "system", "tools"),
    "prompt_response": ("prompt", "response", "history", "system", "tools"),
    "labelled": ("prompt", "label", "history", "system", "tools"),
    "preference": (
        "chosen", "rejected", "conversations", "messages", "prompt", "instruction", "input",
        "history", "system", "tools", "margin", *RANKED,
    ),
    "pair": (
        "query", "positive", "anchor", "question", "answer", "sentence1", "sentence2", "passage",
        "negative", "negatives",
    ),
}  # fmt: skip
"""Our names of the columns that a format reads."""
PAIRS = (
    ("query", "positive"),
    ("anchor", "positive"),
    ("question", "answer"),
    ("sentence1", "sentence2"),
    ("query", "passage"),
)
"""Columns of a text and the one that belongs to it, in the order in which they are tried."""
NEGATIVE = re.compile(r"negatives?(_\d+)?")
"""Columns of texts that do not belong to the first of a pair."""
READ_OF_A_TURN = {
    "role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name",
}  # fmt: skip
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


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.strip().lower() == "true")


def _is_false(value: Any) -> bool:
    return value is False or (isinstance(value, str) and value.strip().lower() == "false")


def _is_no(value: Any) -> bool:
    """False in the spellings that a column of verdicts has: ``false``, 0, ``no``."""
    return value in (False, 0) or (
        isinstance(value, str) and value.strip().lower() in ("false", "0", "0.0", "no", "n")
    )


def _is_neutral_weight(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in ("1", "1.0") or _is_true(value)
    return value is True or (isinstance(value, int | float) and value == 1)


@dataclass(frozen=True)
class Rule:
    """A column whose values, but for the harmless ones, change what a record means."""

    names: tuple[str, ...]
    forms: tuple[str, ...]
    harmless: Callable[[Any], bool]
    """Of a value that is not empty."""
    reason: str
    means: str
    """What the value says."""
    fix: str
    """``{name}`` is the column's name."""
    ignorable: bool = True
    """Whether the message offers ``data.ignore_columns``."""


def _never(value: Any) -> bool:
    return False


_FILTER = "Filter such rows out (data.on_bad_row=skip does it, and counts them)"
_TEXT_ONLY = Rule(
    MEDIA, EVERY, _never, "images, audio or video",
    "the row is about it, and only text is trained", f"{_FILTER}",
)  # fmt: skip
_NOT_GOOD = Rule(
    ("label",), LEARNED, lambda value: not _is_false(value), "an answer that is marked as bad",
    "the answer is marked as a bad one, and this task learns every answer as a good one",
    "task=dpo task.options.loss=kto data.columns.desirable={name} learns from good and bad "
    "answers; data.on_bad_row=skip keeps the good ones alone and counts the rest",
    ignorable=False,
)  # fmt: skip
_NOT_RIGHT = replace(
    _NOT_GOOD,
    names=("kto_tag", "desirable", "is_desirable", "correct", "is_correct", "accepted"),
    harmless=lambda value: not _is_no(value),
)
_LABEL = Rule(
    ("label",), LEARNED, lambda value: _is_true(value) or _is_false(value),
    "a label that nothing uses",
    "it labels the row, and this dataset format has no use for it",
    "To learn the label itself: data.form=labelled data.data_map.label={name}",
)  # fmt: skip
_WEIGHT = Rule(
    WEIGHTS, EVERY, _is_neutral_weight, "a weight or a mask of the loss",
    "it weights or masks the loss, and every row counts alike here",
    "Remove the rows that are not to be learned",
)  # fmt: skip
_SCORE = Rule(
    ("score", "rating", "reward"), LEARNED, _never, "a score that nothing uses",
    "it says how good the answer is, and every answer is learned alike",
    "Filter the rows by it first",
)  # fmt: skip
_CHOSEN = Rule(
    ("chosen",), LEARNED, _is_true, "one of a preference pair",
    "it belongs to a preference pair", "data.form=preference learns the chosen answers",
)  # fmt: skip
_REJECTED = Rule(
    ("rejected",), LEARNED, _is_false, "one of a preference pair",
    "it belongs to a preference pair",
    "data.form=preference learns the chosen answers (data.columns.chosen=COLUMN names them)",
)  # fmt: skip
_HISTORY = Rule(
    ("history",), (*CHATS, "preference"), _never, "earlier turns that nothing uses",
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
    ("system_prompt", "system_message"), ANSWERED, _never, "a system message that nothing uses",
    "it is a system message, which is read from the column \"system\"",
    "data.columns.system={name}",
)  # fmt: skip
_TOOLS = Rule(
    ("functions", "available_tools"), ANSWERED, _never, "tools that nothing uses",
    "it defines tools, which are read from the column \"tools\"", "data.columns.tools={name}",
)  # fmt: skip
_NO_MATCH = Rule(
    ("label", "score", "similarity", "is_duplicate", "relevance"), ("pair",), _is_neutral_weight,
    "a pair that may not belong together",
    "it says how well the two texts belong together, and every pair is learned as one that does",
    "Filter the rows by it first (data.on_bad_row=skip leaves out all but those with 1 or true)",
)  # fmt: skip
RULES = (
    _TEXT_ONLY, _NOT_GOOD, _NOT_RIGHT, _LABEL, _WEIGHT, _SCORE, _CHOSEN, _REJECTED, _HISTORY,
    _CONTEXT, _INPUT, _LABELLED_CONTEXT, _SYSTEM, _TOOLS, _NO_MATCH,
)  # fmt: skip

_TURN_RULES = (
    _TEXT_ONLY,
    Rule(
        (*WEIGHTS, "train"), ANSWERED, _is_neutral_weight, "a turn that is not to be learned",
        "it takes the turn out of the loss, and every answer is learned here",
        "To learn each turn with its weight, call the column \"weight\" and set task=sft "
        "task.options.turn_weights=true; to learn the last answers alone, set data.loss_on=last",
    ),
    Rule(
        ("reasoning_content", "reasoning", "thinking"), ANSWERED, _never,
        "reasoning beside an answer",
        "it is the reasoning before the answer, and nothing reads it there",
        "Write it into the content as the model does, e.g. <think>...</think>",
    ),
)  # fmt: skip


class ColumnCheck:
    """Checks records of one source; ``ignored`` collects the names of unused columns."""

    def __init__(
        self,
        form: str,
        *,
        text_key: str,
        columns: dict[str, str],
        ignore: Collection[str],
        ignored: set[str],
        turn_weights: bool = False,
        verdicts: Collection[str] = (),
    ) -> None:
        """``ignore``: columns that may be ignored whatever they hold (``data.ignore_columns``).
        ``turn_weights``: the "weight" of a turn of a chat is used. ``verdicts``: columns that say
        whether an answer is good, where that is read."""
        self._read_of_a_turn = READ_OF_A_TURN
        if turn_weights and form in CHATS:
            self._read_of_a_turn = READ_OF_A_TURN | {*TURN_WEIGHTS}
        self._form = form
        self._ignore = frozenset(ignore)
        self._ignored = ignored
        names = {columns.get(name, name) for name in READ[form]} | {*verdicts}
        if form == "prompt_response" and "response" not in columns:
            names.add("completion")
        self._text_key = text_key
        self._used = frozenset(names | ({text_key} if form == "text" else set()))
        turns = ("conversations", "messages", "chosen", "rejected", "prompt", "response")
        self._turns = [columns.get(name, name) for name in turns if name in READ[form]]
        self._turns += ["completion"] * ("completion" in names)
        self._chats = {columns.get(name, name) for name in ("conversations", "messages")}
        asked = ("prompt", "instruction", "input", "history")
        self._answers = {columns.get(name, name) for name in ("chosen", "rejected")}
        self._ranked = {columns.get(name, name) for name in RANKED}
        self._asked = {columns.get(name, name) for name in asked}
        self._layouts: dict[tuple[str, ...], list[tuple[str, list[Rule]]]] = {}

    def __call__(self, record: Record) -> None:
        """Raise RecordError for a column that changes what the record means."""
        value = record.value
        layout = tuple(value)
        if layout not in self._layouts:
            if len(self._layouts) >= REMEMBERED:
                self._layouts.clear()
            self._layouts[layout] = list(self._rules(layout))
        for name, rules in self._layouts[layout]:
            found = value[name]
            if _is_empty(found):
                continue
            if rules and name not in self._ignore:
                self._check(record, name, found, rules)
            self._note(name)
        for name in self._turns:
            turns = by_rows(value.get(name))
            # A pair's answer may be one turn without a list.
            turns = [turns] if isinstance(turns, dict) else turns
            for number, turn in enumerate(turns if isinstance(turns, list) else [], start=1):
                if isinstance(turn, dict) and turn.keys() - self._read_of_a_turn:
                    self._check_turn(record, name, number, turn)

    def _note(self, name: str) -> None:
        if name not in self._ignored and len(self._ignored) < REMEMBERED:
            self._ignored.add(name)

    def _rules(self, layout: tuple[str, ...]) -> Iterator[tuple[str, list[Rule]]]:
        used = self._used
        if "completion" in used and "response" in layout:
            used = used - {"completion"}
        if self._form == "text" and (self._text_key in layout or self._text_key != "text"):
            used = frozenset({self._text_key})  # title and content stand in its place
        if self._form == "preference" and self._chats.intersection(layout):
            used = used - self._asked  # the turns of the chat stand in their place
        if self._form == "preference" and self._answers <= {*layout}:
            used = used - self._ranked
        for name in layout:
            if name in used or (self._form == "pair" and NEGATIVE.fullmatch(name)):
                continue
            lower = name.strip().lower()
            rules = [rule for rule in RULES if lower in rule.names and self._form in rule.forms]
            # Both would say the same of a system message, or of tools, that is read already.
            if any(rule in (_SYSTEM, _TOOLS) for rule in rules) and lower in self._used:
                rules = []
            if not rules and any(word in lower for word in MEDIA_WORDS):
                rules = [_PLACEHOLDER]
            yield name, rules

    def _check(self, record: Record, name: str, value: Any, rules: list[Rule]) -> None:
        for rule in rules:
            if rule is _PLACEHOLDER and not self._has_placeholder(record):
                continue
            if not rule.harmless(value):
                raise _changes(record, "", name, value, rule)

    def _has_placeholder(self, record: Record) -> bool:
        read = [record.value[name] for name in self._used if name in record.value]
        text = json.dumps(read, ensure_ascii=False, default=str).lower()
        return any(word in text for word in PLACEHOLDERS)

    def _check_turn(self, record: Record, column: str, number: int, turn: dict[str, Any]) -> None:
        place = f'turn {number} of "{excerpt(column)}": '
        speaks = str(turn.get("role", turn.get("from"))).lower()
        for name, value in turn.items():
            if name in self._read_of_a_turn or _is_empty(value):
                continue
            self._note(f"{column}.{name}")
            if name in self._ignore:
                continue
            lower = str(name).strip().lower()
            for rule in _TURN_RULES:
                # What nobody learns from may well be out of the loss.
                asks = rule is not _TEXT_ONLY and speaks in ("human", "user", "system", "tool")
                if lower in rule.names and not asks and not rule.harmless(value):
                    raise _changes(record, place, name, value, rule)


_PLACEHOLDER = Rule(
    (), EVERY, _never, _TEXT_ONLY.reason,
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
