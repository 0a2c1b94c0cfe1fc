"""Preference pairs: two answers to the same turns, the better and the worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmx.data.format.formats import Conversation, conversation_of
from llmx.data.format.turns import Message, pairs, turns
from llmx.data.source.records import Record, Where, excerpt, wrong_record


@dataclass(frozen=True)
class Preference:
    """Two conversations that are the same but for the last answer: the better, the worse."""

    chosen: Conversation
    rejected: Conversation

    @property
    def where(self) -> Where:
        return self.chosen.where


def to_preference(record: Record, *, columns: dict[str, str], system: str | None) -> Preference:
    """The pair in a record. Both published layouts: ``chosen`` and ``rejected`` as whole
    conversations (messages or text, with or without a ``prompt``), or ``conversations`` up to
    the answer with ``chosen`` and ``rejected`` as the answers to it.

    Raises RowError where the two do not have the same turns before the answer, or are the same.
    """

    def column(name: str) -> str:
        return columns.get(name, name)

    before = _before_the_answers(record, column)
    found: list[Conversation] = []
    for name in ("chosen", "rejected"):
        key = column(name)
        value = record.value.get(key)
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, str):
            messages = [*before, Message("assistant", value)]
        else:
            after = before if _is_answer(value) else []
            messages = turns(value, key, record.where, before=after)
        conversation = conversation_of(record, messages, columns=columns, system=system)
        if conversation is None or conversation.messages[-1] != messages[-1]:
            raise wrong_record(record, "no answer", f'"{key}" does not end with an answer.', value)
        found.append(conversation)
    chosen, rejected = found
    if len(chosen.messages) < 2 or chosen.messages[:-1] != rejected.messages[:-1]:
        raise wrong_record(
            record,
            "chosen and rejected answer different things",
            f'"{column("chosen")}" and "{column("rejected")}" must have the same turns before '
            "their last answer, and at least one.",
            record.value.get(column("rejected")),
        )
    if chosen == rejected:
        raise wrong_record(
            record, "chosen is rejected", "both answers are the same.", found[0].tools
        )
    return Preference(chosen, rejected)


def _before_the_answers(record: Record, column: Any) -> list[Message]:
    for name in ("conversations", "messages"):
        if column(name) in record.value:
            return turns(record.value[column(name)], column(name), record.where)
    prompt = record.value.get(column("prompt"), record.value.get(column("instruction")))
    if isinstance(prompt, list):
        return turns(prompt, column("prompt"), record.where)
    if not isinstance(prompt, str):
        return []
    key = column("input")
    extra = record.value.get(key)
    if extra is not None and not isinstance(extra, str):
        reason = "a value of a wrong type"
        raise wrong_record(record, reason, f'"{excerpt(key)}" is {excerpt(extra)}, not text.')
    history = pairs(record.value.get(column("history")), column("history"), record.where)
    return [*history, Message("user", f"{prompt}\n{extra}" if extra else prompt)]


def _is_answer(value: Any) -> bool:
    """Whether a list holds the answer alone, not a conversation that ends with it."""
    return isinstance(value, list) and len(value) == 1
