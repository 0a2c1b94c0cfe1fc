"""From a record in the form it has to what is trained on: a conversation or a document.

Alpaca (``instruction``, ``input``, ``output``), ShareGPT (``conversations``), OpenAI
``messages``, ``prompt``/``response`` and plain ``text``; other column names by
``data.columns``, which maps our name to the one in the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmx.data.read import Record, Where, excerpt
from llmx.errors import DataError

KEYS = {
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt_response": ("prompt", "response"),
    "text": ("text",),
}
"""The keys by which a form is recognised, in the order in which they are tried."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
}


@dataclass(frozen=True)
class Message:
    """One turn; ``role`` is system, user, assistant or tool."""

    role: str
    content: str


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
    if len(found) == 1:
        return found[0]
    keys = ", ".join(record.value)
    if found:
        raise DataError(
            f"{record.where}: the keys ({keys}) fit {' and '.join(found)}. "
            f"Say which with data.form={found[0]}."
        )
    known = "; ".join(f"{form}: {', '.join(names)}" for form, names in KEYS.items())
    raise DataError(
        f"{record.where}: the keys ({keys}) fit none of the known forms ({known}). Map your "
        "names, e.g. data.form=alpaca +data.columns.instruction=question "
        "+data.columns.output=answer, or for text data.form=text data.text_key=body."
    )


def to_document(record: Record, *, text_key: str) -> Document:
    """The text under ``text_key``."""
    return Document(_text(record, text_key), record.where)


def to_conversation(
    record: Record, form: str, *, columns: dict[str, str], system: str | None
) -> Conversation | None:
    """The conversation in a record, or None if it has nothing to learn: no word of the
    assistant. ``system`` is used where the record has no system message of its own.

    Turns after the last of the assistant are left out. Raises DataError for a key that is
    missing or has a wrong type, an unknown role, or turns that make no conversation.
    """

    def column(name: str) -> str:
        return columns.get(name, name)

    if form in ("alpaca", "prompt_response"):
        messages = _single(record, form, column)
    else:
        key = column("conversations" if form == "sharegpt" else "messages")
        messages = _turns(record, key)
    own_system = record.value.get(column("system"))
    if messages and messages[0].role != "system":
        if isinstance(own_system, str) and own_system.strip():
            messages.insert(0, Message("system", own_system))
        elif system:
            messages.insert(0, Message("system", system))
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not any(message.role == "assistant" and message.content.strip() for message in messages):
        return None
    tools = record.value.get(column("tools")) or ""
    if not isinstance(tools, str):
        tools = json.dumps(tools, ensure_ascii=False)
    return Conversation(tuple(messages), record.where, tools if tools.strip() != "[]" else "")


def _has(record: Record, keys: tuple[str, ...], text_key: str, columns: dict[str, str]) -> bool:
    names = (text_key if key == "text" else columns.get(key, key) for key in keys)
    return all(name in record.value for name in names)


def _text(record: Record, key: str) -> str:
    if key not in record.value:
        raise DataError(
            f'{record.where}: no key "{key}"; there is {", ".join(record.value) or "nothing"}. '
            "Map your names with data.columns, or set data.text_key."
        )
    value = record.value[key]
    if not isinstance(value, str):
        raise DataError(
            f'{record.where}: "{key}" is {type(value).__name__} ({excerpt(value)}), not text.'
        )
    return value


def _single(record: Record, form: str, column: Any) -> list[Message]:
    if form == "prompt_response":
        prompt = _text(record, column("prompt"))
        answer = _text(record, column("response"))
    else:
        prompt = _text(record, column("instruction"))
        answer = _text(record, column("output"))
        if record.value.get(column("input")):
            prompt = f"{prompt}\n{_text(record, column('input'))}"
    messages = []
    for turn in record.value.get(column("history")) or []:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and _are_text(turn)):
            raise DataError(
                f'{record.where}: "{column("history")}" holds {excerpt(turn)}; every turn must '
                "be [question, answer]."
            )
        messages += [Message("user", turn[0]), Message("assistant", turn[1])]
    return [*messages, Message("user", prompt), Message("assistant", answer)]


def _are_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _turns(record: Record, key: str) -> list[Message]:
    turns = record.value.get(key)
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f'{record.where}: "{key}" is {excerpt(turns)}; it must be a list of turns, none of '
            "them empty."
        )
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        message = _turn(turn, f'{record.where}: turn {number} of "{key}"')
        if message.role == "system" and messages:
            raise DataError(
                f'{record.where}: turn {number} of "{key}" is a system message; only the first '
                f"turn may be one: {excerpt(message.content)}"
            )
        if message.role == "assistant" and (not messages or messages[-1].role == "system"):
            raise DataError(
                f'{record.where}: turn {number} of "{key}" is the assistant\'s, and nothing was '
                f"asked before it: {excerpt(message.content)}"
            )
        if messages and message.role == messages[-1].role:
            raise DataError(
                f'{record.where}: turns {number - 1} and {number} of "{key}" are both of the '
                f"{message.role}: {excerpt(message.content)}"
            )
        messages.append(message)
    return messages


def _turn(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{place} is {excerpt(turn)}, not an object with a role and a content.")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise DataError(
            f"{place} has the role {excerpt(name)}; known are {', '.join(ROLES)} (under "
            '"role" or "from").'
        )
    content = turn.get("content", turn.get("value"))
    calls = turn.get("tool_calls")
    if role == "assistant" and calls:
        content = _tool_calls(content, calls, place)
    elif name in ("function_call", "tool_call") and isinstance(content, str):
        content = f"<tool_call>\n{content}\n</tool_call>"
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(
            f'{place} has the content {excerpt(content)}; it must be text (under "content" or '
            '"value").'
        )
    return Message(role, content)


def _tool_calls(content: Any, calls: Any, place: str) -> str:
    """A content with OpenAI ``tool_calls``, as text in the form that Qwen and Hermes use."""
    parts = [content] if content else []
    try:
        for call in calls:
            function = call.get("function", call)
            arguments = function["arguments"]
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            value = {"name": function["name"], "arguments": arguments}
            parts.append(f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'{place}: tool_calls {excerpt(calls)} need "function" with "name" and '
            f'"arguments" ({type(error).__name__}: {error}).'
        ) from error
    return "\n".join(parts)
