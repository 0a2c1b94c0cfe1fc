"""From a record in the form it has to what is trained on: a conversation or a document.

Alpaca (``instruction``, ``input``, ``output``, ``history``), ShareGPT (``conversations``), OpenAI
``messages``, ``prompt``/``response``, rows with a ``label``, preference pairs (``chosen``,
``rejected``) and plain ``text`` (or ``title`` and ``content``); other column names by
``data.columns``, which maps our name to the one in the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmx.data.rows import Record, RowError, Where, excerpt
from llmx.data.turns import Message, labelled_history, pairs, turns
from llmx.errors import DataError

__all__ = [
    "Conversation",
    "Document",
    "Message",
    "conversation_of",
    "detect_form",
    "to_conversation",
    "to_document",
    "wrong_record",
]

KEYS = {
    "preference": ("chosen", "rejected"),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt_response": ("prompt", "response"),
    "text": ("text",),
}
"""The keys by which a form is recognised, in the order in which they are tried."""


@dataclass(frozen=True)
class Conversation:
    """Turns that end with an assistant's. ``tools`` is the JSON text of a list of tool
    definitions, empty where there are none."""

    messages: tuple[Message, ...]
    where: Where
    tools: str = ""


@dataclass(frozen=True)
class Document:
    """Text to pretrain on; a long file comes in pieces, the last of which is marked."""

    text: str
    where: Where
    last: bool = True


def detect_form(record: Record, *, text_key: str, columns: dict[str, str]) -> str:
    """The form of a record, by its keys; raises DataError when none or several fit."""
    found = [form for form, keys in KEYS.items() if _has(record, keys, text_key, columns)]
    if "label" in columns and _has(record, ("prompt", "label"), text_key, columns):
        return "labelled"
    if found and (len(found) == 1 or found[0] == "preference"):
        return found[0]  # a pair has its prompt beside it, which is a form of its own
    keys = ", ".join(record.value)
    if found:
        raise DataError(
            f"{record.where}: the keys ({keys}) fit {' and '.join(found)}. "
            f"Say which with data.form={found[0]}."
        )
    if text_key == "text" and columns.get("content", "content") in record.value:
        return "text"
    known = "; ".join(f"{form}: {', '.join(names)}" for form, names in KEYS.items())
    raise DataError(
        f"{record.where}: the keys ({keys}) fit none of the known forms ({known}). Map your "
        "names, e.g. data.form=alpaca data.columns.instruction=question "
        "data.columns.output=answer, or for text data.form=text data.text_key=body."
    )


def to_document(
    record: Record, *, text_key: str, columns: dict[str, str] | None = None
) -> Document:
    """The text under ``text_key``; where there is none, ``title`` and ``content``."""
    columns = columns or {}
    content = columns.get("content", "content")
    if text_key == "text" and "text" not in record.value and content in record.value:
        title = record.value.get(columns.get("title", "title"))
        text = _text(record, content)
        if isinstance(title, str) and title.strip():
            text = f"{title}\n\n{text}"
    else:
        text = _text(record, text_key)
    _check_characters(record, text)
    return Document(text, record.where)


def to_conversation(
    record: Record,
    form: str,
    *,
    columns: dict[str, str],
    system: str | None,
    label_names: dict[str, str] | None = None,
) -> Conversation | None:
    """The conversation in a record, or None if it has nothing to learn: no word of the
    assistant. ``system`` is used where the record has no system message of its own. (Pairs
    have a reader of their own, ``llmx.data.preferences``.)

    Turns after the last of the assistant are left out. Raises RowError for a key that is
    missing or has a wrong type, an unknown role, or turns that make no conversation.
    """

    def column(name: str) -> str:
        return columns.get(name, name)

    if form == "labelled":
        messages = _labelled(record, column, label_names or {})
    elif form in ("alpaca", "prompt_response"):
        messages = _single(record, form, column)
    else:
        key = column("conversations" if form == "sharegpt" else "messages")
        messages = turns(record.value.get(key), key, record.where)
    return conversation_of(record, messages, columns=columns, system=system)


def conversation_of(
    record: Record, messages: list[Message], *, columns: dict[str, str], system: str | None
) -> Conversation | None:
    """Messages with the record's system message and tools, up to the last answer; None where
    there is none."""
    own_system = record.value.get(columns.get("system", "system"))
    if messages and messages[0].role != "system":
        if isinstance(own_system, str) and own_system.strip():
            messages = [Message("system", own_system), *messages]
        elif system:
            messages = [Message("system", system), *messages]
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not any(message.role == "assistant" and message.content.strip() for message in messages):
        return None
    for message in messages:
        _check_characters(record, message.content)
    tools = record.value.get(columns.get("tools", "tools")) or ""
    if isinstance(tools, str) and tools.strip():
        try:
            json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise wrong_record(
                record, "wrong tools", f"tools are not JSON ({error}).", tools
            ) from error
    if not isinstance(tools, str):
        tools = json.dumps(tools, ensure_ascii=False)
    _check_characters(record, tools)
    return Conversation(tuple(messages), record.where, tools if tools.strip() != "[]" else "")


def _has(record: Record, keys: tuple[str, ...], text_key: str, columns: dict[str, str]) -> bool:
    names = (text_key if key == "text" else columns.get(key, key) for key in keys)
    return all(name in record.value for name in names)


def _text(record: Record, key: str) -> str:
    if key not in record.value:
        raise wrong_record(
            record,
            "a missing key",
            f'no key "{key}"; there is {", ".join(record.value) or "nothing"}. '
            "Map your names with data.columns, or set data.text_key.",
        )
    value = record.value[key]
    if not isinstance(value, str):
        what = "null" if value is None else f"{type(value).__name__} ({excerpt(value)})"
        raise wrong_record(record, "a value of a wrong type", f'"{key}" is {what}, not text.')
    return value


def _check_characters(record: Record, text: str) -> None:
    """Raise RowError for half of a surrogate pair, which JSON can write and no encoder takes."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise wrong_record(
            record,
            "half of a surrogate pair",
            f"character {at + 1} of a text is half of a surrogate pair "
            f"(\\u{ord(text[at]):04x}), which is no text. Repair the row, or leave it out with "
            "data.on_bad_row=skip:",
            text[max(0, at - 20) : at + 20],
        ) from error


def wrong_record(record: Record, reason: str, problem: str, shown: Any = None) -> RowError:
    """A RowError with the record's place and content."""
    what = f" {excerpt(shown)}" if shown else ""
    return RowError(
        f"{record.where}: {problem}{what}",
        where=record.where,
        reason=reason,
        content=json.dumps(record.value, ensure_ascii=False, default=str),
    )


def _single(record: Record, form: str, column: Any) -> list[Message]:
    if form == "prompt_response":
        prompt = _text(record, column("prompt"))
        answer = _text(record, column("response"))
    else:
        prompt = _text(record, column("instruction"))
        answer = _text(record, column("output"))
        if record.value.get(column("input")):
            prompt = f"{prompt}\n{_text(record, column('input'))}"
    history = pairs(record.value.get(column("history")), column("history"), record.where)
    return [*history, Message("user", prompt), Message("assistant", answer)]


def _labelled(record: Record, column: Any, names: dict[str, str]) -> list[Message]:
    """The label is the answer, by its name where it has one."""
    key = column("label")
    label = record.value.get(key)
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise wrong_record(
            record,
            "a missing label",
            f'"{key}" is {type(label).__name__} ({excerpt(label)}); a label is text or a whole '
            "number. Map it with data.data_map.",
        )
    if names and str(label) not in names:
        raise wrong_record(
            record,
            "a label without a name",
            f"the label {label} has no name; data.label_names has {', '.join(names)}.",
        )
    history_key = column("history")
    context, history = labelled_history(record.value.get(history_key), history_key, record.where)
    prompt = _text(record, column("prompt"))
    question = f"{context}\n{prompt}" if context else prompt
    answer = names.get(str(label), str(label))
    return [*history, Message("user", question), Message("assistant", answer)]
