"""Turns of a conversation, in the spellings of the field: roles, contents, calls of tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmx.data.rows import RowError, Where, excerpt

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
    """One turn; ``role`` is system, user, assistant or tool.

    A turn that calls tools has the calls twice: in ``content`` as text, in the form that Qwen
    and Hermes use, and in ``calls`` as the JSON text of a list of ``{"name", "arguments"}`` for
    templates that write them in their own way, with ``said`` as the words beside them.
    """

    role: str
    content: str
    calls: str = ""
    said: str = ""


def turns(
    value: Any, key: str, where: Where, *, before: list[Message] | None = None
) -> list[Message]:
    """The messages under ``key``, after those of ``before``.

    Raises RowError for what is no list of turns, and for turns out of order.
    """
    if isinstance(value, dict):  # a table of turns by columns, as older data sets are stored
        value = _by_rows(value)
    if not isinstance(value, list) or not value:
        raise _wrong(
            where,
            "no turns",
            f'"{key}" is {excerpt(value)}; it must be a list of turns, none of them empty.',
            value,
        )
    messages = list(before or [])
    for number, turn in enumerate(value, start=1):
        place = f'turn {number} of "{key}"'
        message = _turn(turn, where, place)
        problem = _out_of_order(message, messages)
        if problem:
            raise _wrong(
                where,
                "turns out of order",
                f"{place} {problem}: {excerpt(message.content)}",
                value,
            )
        # One turn may call several tools; any other role speaks once.
        if messages and message.role == messages[-1].role != "tool":
            raise _wrong(
                where,
                "turns out of order",
                f'turns {number - 1} and {number} of "{key}" are both of the {message.role}: '
                f"{excerpt(message.content)}",
                value,
            )
        messages.append(message)
    return messages


def pairs(value: Any, key: str, where: Where) -> list[Message]:
    """A history of ``[question, answer]`` turns; empty where there is none."""
    messages: list[Message] = []
    if not isinstance(value, list | tuple):
        value = [] if value in (None, "") else [value]
    for turn in value:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and _are_text(turn)):
            raise _wrong(
                where,
                "a wrong history",
                f'"{key}" holds {excerpt(turn)}; every turn must be [question, answer].',
                value,
            )
        messages += [Message("user", turn[0]), Message("assistant", turn[1])]
    return messages


def labelled_history(value: Any, key: str, where: Where) -> tuple[str, list[Message]]:
    """(text before the question, earlier turns) of a history that is either: text, a list of
    ``[question, answer]``, or a list of texts that take turns and end with an answer."""
    if isinstance(value, str):
        return value, []
    if isinstance(value, list) and value and _are_text(value):
        if len(value) % 2:
            raise _wrong(
                where,
                "a wrong history",
                f'"{key}" has {len(value)} texts; questions and answers in turn are even in '
                "number.",
                value,
            )
        value = [value[i : i + 2] for i in range(0, len(value), 2)]
    return "", pairs(value, key, where)


def _out_of_order(message: Message, before: list[Message]) -> str:
    if message.role == "system" and before:
        return "is a system message; only the first turn may be one"
    if message.role == "assistant" and (not before or before[-1].role == "system"):
        return "is the assistant's, and nothing was asked before it"
    if message.role == "tool" and (not before or before[-1].role not in ("assistant", "tool")):
        return "is a tool's result, and no tool was called before it"
    return ""


def _by_rows(value: dict[str, Any]) -> Any:
    columns = list(value.values())
    if columns and all(isinstance(column, list) for column in columns):
        return [dict(zip(value, cells, strict=False)) for cells in zip(*columns, strict=False)]
    return value


def _are_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _turn(turn: Any, where: Where, place: str) -> Message:
    if not isinstance(turn, dict):
        raise _wrong(
            where,
            "a wrong turn",
            f"{place} is {excerpt(turn)}, not an object with a role and a content.",
            turn,
        )
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise _wrong(
            where,
            "an unknown role",
            f"{place} has the role {excerpt(name)}; known are {', '.join(ROLES)} (under "
            '"role" or "from").',
            turn,
        )
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    calls = turn.get("tool_calls")
    if role == "assistant" and calls:
        return _calling(content, calls, where, place)
    if not isinstance(content, str):
        raise _wrong(
            where,
            "a wrong content",
            f'{place} has the content {excerpt(content)}; it must be text (under "content" or '
            '"value").',
            turn,
        )
    if name in ("function_call", "tool_call"):
        return Message(role, f"<tool_call>\n{content}\n</tool_call>", calls=_calls_of(content))
    return Message(role, content)


def _calling(content: Any, calls: Any, where: Where, place: str) -> Message:
    """A turn with OpenAI ``tool_calls``."""
    said = content if isinstance(content, str) else ""
    try:
        found = [_call(call.get("function", call)) for call in calls]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _wrong(
            where,
            "wrong tool_calls",
            f'{place}: tool_calls {excerpt(calls)} need "function" with "name" and '
            f'"arguments" ({type(error).__name__}: {error}).',
            calls,
        ) from error
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in found]
    text = "\n".join([said, *texts] if said else texts)
    return Message("assistant", text, calls=json.dumps(found, ensure_ascii=False), said=said)


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def _calls_of(content: str) -> str:
    """The calls in the text of a ShareGPT ``function_call``; empty where it is none."""
    try:
        value = json.loads(content)
        found = [_call(call) for call in (value if isinstance(value, list) else [value])]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""
    return json.dumps(found, ensure_ascii=False)


def _wrong(where: Where, reason: str, problem: str, value: Any) -> RowError:
    content = json.dumps(value, ensure_ascii=False, default=str)
    return RowError(f"{where}: {problem}", where=where, reason=reason, content=content)
