"""Turns of a conversation, in the spellings of the field: roles, contents, calls of tools."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

from llmx.data.format.rows import Message
from llmx.data.source.records import RecordError, Where, excerpt
from llmx.text import plural

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
CALLS = ("function_call", "tool_call")
"""Roles of turns that hold nothing but calls of tools."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Columns that hold the reasoning before an answer."""
TURN_WEIGHTS = ("weight", "loss_weight")
"""Columns that hold the weight of a turn."""
READ_OF_A_TURN = {
    "role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name",
    *THOUGHTS,
}  # fmt: skip
"""Columns of a turn that are read."""
MAX_WEIGHT = 1000
"""The largest weight that a turn may have."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of a content's parts that are text."""


def turns(
    value: Any,
    key: str,
    where: Where,
    *,
    before: list[Message] | None = None,
    weighted: bool = False,
) -> list[Message]:
    """The messages of a list of turns (``by_rows``) under ``key``, after those of ``before``.
    ``weighted``: the weight of an assistant's turn (``TURN_WEIGHTS``) is read.

    Raises RecordError for what is no list of turns, and for turns out of order.
    """
    if _is_by_columns(value):
        lengths = ", ".join(f"{excerpt(name)}: {len(cells)}" for name, cells in value.items())
        problem = (
            f'"{excerpt(key)}" has its turns by column, and the columns differ in length '
            f"({lengths}), so the role of a content is unknown."
        )
        raise _wrong(where, "columns of unequal length", problem, value)
    if not isinstance(value, list) or not value:
        problem = f'"{excerpt(key)}" is {excerpt(value)}; it must be a list with at least one turn.'
        raise _wrong(where, "no turns", problem, value)
    messages = list(before or [])
    for number, turn in enumerate(value, start=1):
        try:
            message = _turn(turn)
            if weighted and message.role == "assistant":
                message = replace(message, weight=_weight(turn))
            if problem := _out_of_order(message, messages):
                problem += f": {excerpt(message.content)}"
                raise _WrongTurn("turns out of order", problem, value)
        except _WrongTurn as error:
            problem = f'turn {number} of "{excerpt(key)}" {error}'
            raise _wrong(where, error.reason, problem, error.value) from error
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
                f'"{excerpt(key)}" holds {excerpt(turn)}; every turn must be [question, answer].',
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
                f'"{excerpt(key)}" has {plural(len(value), "text")}; questions and answers take '
                "turns, so their number must be even.",
                value,
            )
        value = [value[i : i + 2] for i in range(0, len(value), 2)]
    return "", pairs(value, key, where)


def _out_of_order(message: Message, before: list[Message]) -> str:
    if message.role == "system" and before:
        return "has the role system, which only the first turn may have"
    if message.role == "assistant" and (not before or before[-1].role == "system"):
        return "has the role assistant, and no user turn precedes it"
    if message.role == "tool" and (not before or before[-1].role not in ("assistant", "tool")):
        return "is the result of a tool, and no call of a tool precedes it"
    # One turn may call several tools; any other role speaks once.
    if before and message.role == before[-1].role != "tool":
        return f"has the role {message.role}, as the turn before it has"
    return ""


def by_rows(value: Any) -> Any:
    """A list of turns that is written by columns, as older datasets are stored, or as JSON text.
    Anything else, and columns of unequal length, stays as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if _is_by_columns(value) and len({len(column) for column in value.values()}) == 1:
        return [dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)]
    return value


def _is_by_columns(value: Any) -> bool:
    return isinstance(value, dict) and {type(column) for column in value.values()} == {list}


def _are_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _turn(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise _WrongTurn(
            "a wrong turn", f"is {excerpt(turn)}, not an object with a role and a content.", turn
        )
    name = turn["role"] if turn.get("role") is not None else turn.get("from")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise _WrongTurn(
            "an unknown role",
            f"has the role {excerpt(name)}; known roles are "
            f'{", ".join(ROLES)} (under "role" or "from").',
            turn,
        )
    content = _content(turn, role)
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):  # OpenAI's former way
        calls = [{"function": turn["function_call"]}]
    if calls:
        if role != "assistant":
            problem = f"has the role {role}, and only the assistant calls tools."
            raise _WrongTurn("wrong tool_calls", problem, turn)
        message = _calling(content if isinstance(content, str) else "", calls)
        return replace(message, thought=_thought(turn))
    if name in CALLS:
        return replace(_called(content), thought=_thought(turn))
    if role == "tool" and isinstance(content, list | dict):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise _WrongTurn(
            "a wrong content",
            f'has the content {excerpt(content)}; it must be text (under "content" or "value").',
            turn,
        )
    if role == "tool":
        return Message(role, content, call_id=str(turn.get("tool_call_id") or ""))
    return Message(role, content, thought=_thought(turn) if role == "assistant" else "")


def _thought(turn: dict[str, Any]) -> str:
    """The reasoning beside an answer; empty where there is none."""
    thought = next((turn[name] for name in THOUGHTS if turn.get(name)), "")
    if not isinstance(thought, str):
        raise _WrongTurn(
            "a wrong content", f"has a reasoning that is no text: {excerpt(thought)}", turn
        )
    return thought if thought.strip() else ""


def _weight(turn: dict[str, Any]) -> float:
    """The weight of an assistant's turn: a number from 0, true (1) or false (0); 1 by default."""
    values = [turn[name] for name in TURN_WEIGHTS if turn.get(name) is not None]
    value = values[0] if values else 1.0
    if values[1:] and values[1] != value:
        raise _WrongTurn(
            "a wrong weight",
            f'has a "weight" and another "loss_weight": {excerpt(value)} / '
            f"{excerpt(values[1])}. Keep one.",
            turn,
        )
    if isinstance(value, int | float) and 0 <= value <= MAX_WEIGHT:
        return float(value)
    raise _WrongTurn(
        "a wrong weight",
        f"has the weight {excerpt(value)}; it must be a number from 0 to {MAX_WEIGHT} "
        "(0 is not learned).",
        turn,
    )


def _content(turn: dict[str, Any], role: str) -> Any:
    """The content of a turn; a list of text parts is joined."""
    content, value = turn.get("content"), turn.get("value")
    if content in (None, "", []) and value is not None:  # a table has both, for all its records
        content = value
    elif value not in (None, "", []) and value != content:
        raise _WrongTurn(
            "a wrong content",
            f'has a "content" and another "value": {excerpt(content)} / {excerpt(value)}. '
            "Keep one.",
            turn,
        )
    parts = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        return "" if content == [] and role != "tool" else content
    kinds = [part.get("type") for part in parts]
    # OpenAI has the text under "text", LLaMA-Factory's v1 rows have it under "value".
    texts = [p["text"] if p.get("text") is not None else p.get("value") for p in parts]
    if all(kind in TEXT_PARTS for kind in kinds) and _are_text(texts):
        return "".join(texts)
    other = next((kind for kind in kinds if kind not in TEXT_PARTS), None)
    if isinstance(other, str):
        raise _WrongTurn(
            "content that is not text",
            f"has a part of the type {excerpt(other)}, and only text is trained. Filter such rows "
            "out (data.on_bad_row=skip does it, and counts them).",
            turn,
        )
    return content


def _calling(words: str, calls: Any) -> Message:
    """A turn with OpenAI ``tool_calls``."""
    try:
        functions = [_call(call.get("function", call), call.get("id")) for call in calls]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _wrong_calls(calls, error) from error
    return _message_of(functions, words)


def _called(content: Any) -> Message:
    """A turn of ShareGPT's ``function_call``: a call or a list of calls, as JSON or its text.
    Text that is no JSON is a call in a language of its own, and stays as it is."""
    value = content
    if isinstance(content, str):
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            if content.lstrip()[:1] in ("{", "["):
                raise _wrong_calls(content, error) from error
            return Message("assistant", _block(content))
    try:
        calls = value if isinstance(value, list) and value else [value]
        return _message_of([_call(call) for call in calls], "")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        # An object of other keys is a call in a form of its own.
        if isinstance(content, str) and isinstance(value, dict) and isinstance(error, KeyError):
            return Message("assistant", _block(content))
        raise _wrong_calls(content, error) from error


def _message_of(calls: list[dict[str, Any]], words: str) -> Message:
    shown = [{key: call[key] for key in ("name", "arguments")} for call in calls]
    texts = [_block(json.dumps(call, ensure_ascii=False)) for call in shown]
    text = "\n".join([words, *texts] if words else texts)
    return Message("assistant", text, calls=json.dumps(calls, ensure_ascii=False), said=words)


def _block(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def _call(function: dict[str, Any], call_id: Any = None) -> dict[str, Any]:
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name is {excerpt(name)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments are {excerpt(arguments)}, not an object")
    json.dumps(arguments, allow_nan=False)
    call = {"name": name, "arguments": arguments}
    return {"id": call_id, **call} if isinstance(call_id, str) and call_id else call


class _WrongTurn(Exception):
    """An error in a turn, without its place; ``turns`` adds the place."""

    def __init__(self, reason: str, problem: str, value: Any) -> None:
        super().__init__(problem)
        self.reason = reason
        self.value = value


def _wrong_calls(calls: Any, error: Exception) -> _WrongTurn:
    problem = str(error)
    if isinstance(error, KeyError):
        problem = f"no {error}"
    elif isinstance(error, TypeError | AttributeError):
        problem = "it is no object"
    return _WrongTurn(
        "wrong tool_calls",
        'has a wrong tool call; every tool call needs a "name" and an object "arguments" '
        f"({problem}): {excerpt(calls)}",
        calls,
    )


def _wrong(where: Where, reason: str, problem: str, value: Any) -> RecordError:
    content = json.dumps(value, ensure_ascii=False, default=str)
    return RecordError(f"{where}: {problem}", where=where, reason=reason, content=content)
