"""Turns of a conversation, in the spellings of the field: roles, contents, calls of tools."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

from llmx.data.format.rows import Message
from llmx.data.source.records import Rejected, excerpt
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
    rows: list[Any], key: str, *, before: list[Message] | None = None, weighted: bool = False
) -> list[Message]:
    """The messages of a list of turns (``rows_of``) under ``key``, after those of ``before``.
    ``weighted``: the weight of an assistant's turn (``TURN_WEIGHTS``) is read.

    Raises Rejected for what is no turn, and for turns out of order.
    """
    messages = list(before or [])
    for number, turn in enumerate(rows, start=1):
        try:
            message = _turn(turn)
            if weighted and message.role == "assistant":
                message = replace(message, weight=_weight(turn))
            if problem := _out_of_order(message, messages):
                raise Rejected("turns out of order", f"{problem}: {excerpt(message.content)}")
        except Rejected as error:
            problem = f'turn {number} of "{excerpt(key)}" {error}'
            raise Rejected(error.reason, problem) from error
        messages.append(message)
    return messages


def pairs(value: Any, key: str) -> list[Message]:
    """A history of ``[question, answer]`` turns; empty where there is none."""
    messages: list[Message] = []
    if not isinstance(value, list | tuple):
        value = [] if value in (None, "") else [value]
    for turn in value:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and _are_text(turn)):
            raise Rejected(
                "a wrong history",
                f'"{excerpt(key)}" holds {excerpt(turn)}; every turn must be [question, answer].',
            )
        messages += [Message("user", turn[0]), Message("assistant", turn[1])]
    return messages


def labelled_history(value: Any, key: str) -> tuple[str, list[Message]]:
    """(text before the question, earlier turns) of a history that is either: text, a list of
    ``[question, answer]``, or a list of texts that take turns and end with an answer."""
    if isinstance(value, str):
        return value, []
    if isinstance(value, list) and value and _are_text(value):
        if len(value) % 2:
            raise Rejected(
                "a wrong history",
                f'"{excerpt(key)}" has {plural(len(value), "text")}; questions and answers take '
                "turns, so their number must be even.",
            )
        value = [value[i : i + 2] for i in range(0, len(value), 2)]
    return "", pairs(value, key)


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


def rows_of(value: Any, key: str) -> list[Any]:
    """The turns in the column ``key``: a list, also as JSON text or written by columns, as older
    datasets are stored. Raises Rejected for anything else."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, dict) and {type(cells) for cells in value.values()} == {list}:
        if len({len(cells) for cells in value.values()}) > 1:
            lengths = ", ".join(f"{excerpt(name)}: {len(cells)}" for name, cells in value.items())
            raise Rejected(
                "columns of unequal length",
                f'"{excerpt(key)}" has its turns by column, and the columns differ in length '
                f"({lengths}), so the role of a content is unknown.",
            )
        value = [
            dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)
        ]
    if not isinstance(value, list) or not value:
        problem = f'"{excerpt(key)}" is {excerpt(value)}; it must be a list with at least one turn.'
        raise Rejected("no turns", problem)
    return value


def _are_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _turn(turn: Any) -> Message:
    if not isinstance(turn, dict):
        problem = f"is {excerpt(turn)}, not an object with a role and a content."
        raise Rejected("a wrong turn", problem)
    name = turn["role"] if turn.get("role") is not None else turn.get("from")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise Rejected(
            "an unknown role",
            f"has the role {excerpt(name)}; known roles are "
            f'{", ".join(ROLES)} (under "role" or "from").',
        )
    content = _content(turn, role)
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):  # OpenAI's former way
        calls = [{"function": turn["function_call"]}]
    if calls and role != "assistant":
        problem = f"has the role {role}, and only the assistant calls tools."
        raise Rejected("wrong tool_calls", problem)
    if calls:
        message = _calling(content if isinstance(content, str) else "", calls)
    elif name in CALLS:
        message = _called(content)
    elif role == "tool" and isinstance(content, list | dict):
        message = Message(role, json.dumps(content, ensure_ascii=False))
    elif isinstance(content, str):
        message = Message(role, content)
    else:
        raise Rejected(
            "a wrong content",
            f'has the content {excerpt(content)}; it must be text (under "content" or "value").',
        )
    if role == "tool" and (call_id := turn.get("tool_call_id")):
        return replace(message, call_id=str(call_id))
    if role == "assistant" and (thought := _thought(turn)):
        return replace(message, thought=thought)
    return message


def _thought(turn: dict[str, Any]) -> str:
    """The reasoning beside an answer; empty where there is none."""
    thought = next((turn[name] for name in THOUGHTS if turn.get(name)), "")
    if not isinstance(thought, str):
        raise Rejected("a wrong content", f"has a reasoning that is no text: {excerpt(thought)}")
    return thought if thought.strip() else ""


def _weight(turn: dict[str, Any]) -> float:
    """The weight of an assistant's turn: a number from 0, true (1) or false (0); 1 by default."""
    values = [turn[name] for name in TURN_WEIGHTS if turn.get(name) is not None]
    value = values[0] if values else 1.0
    if values[1:] and values[1] != value:
        raise _two_values("a wrong weight", "weight", "loss_weight", *values)
    if isinstance(value, int | float) and 0 <= value <= MAX_WEIGHT:
        return float(value)
    raise Rejected(
        "a wrong weight",
        f"has the weight {excerpt(value)}; it must be a number from 0 to {MAX_WEIGHT} "
        "(0 is not learned).",
    )


def _two_values(reason: str, key: str, other_key: str, value: Any, other_value: Any) -> Rejected:
    values = f"{excerpt(value)} / {excerpt(other_value)}"
    return Rejected(reason, f'has a "{key}" and another "{other_key}": {values}. Keep one.')


def _content(turn: dict[str, Any], role: str) -> Any:
    """The content of a turn; a list of text parts is joined."""
    content, value = turn.get("content"), turn.get("value")
    if content in (None, "", []) and value is not None:  # a table has both, for all its records
        content = value
    elif value not in (None, "", []) and value != content:
        raise _two_values("a wrong content", "content", "value", content, value)
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
        raise Rejected(
            "content that is not text",
            f"has a part of the type {excerpt(other)}, and only text is trained. Filter such rows "
            "out (data.on_bad_row=skip does it, and counts them).",
        )
    return content


# Calls of tools


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
    return Message("assistant", text, calls=tuple(calls), said=words)


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


def _wrong_calls(calls: Any, error: Exception) -> Rejected:
    problem = str(error)
    if isinstance(error, KeyError):
        problem = f"no {error}"
    elif isinstance(error, TypeError | AttributeError):
        problem = "it is no object"
    return Rejected(
        "wrong tool_calls",
        'has a wrong tool call; every tool call needs a "name" and an object "arguments" '
        f"({problem}): {excerpt(calls)}",
    )
