"""Conversations as text by a chat template, and where the completions lie in it, by construction.

The text is the template's own rendering. The template is rendered once with markers in place
of the contents, which gives the fixed text between them; the real rendering must be that text
with the real contents put in, or the conversation is rendered turn by turn. Nothing is found by
searching for a completion.

A completion's span is what the model has to produce after the template's generation prompt: the
content and the token that ends the turn.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llmx.data.format.rows import Conversation, Message
from llmx.errors import DataError

Span = tuple[int, int]
"""Characters [start, stop) of a rendered text."""


@dataclass(frozen=True)
class Rendering:
    """A conversation as text: its completions (a span an assistant turn), and where data lies.

    ``end_missing``: the template closes the last turn with no special token, so the EOS token
    is appended. ``weights``: of the completions; empty where all are 1.
    """

    text: str
    completions: tuple[Span, ...]
    contents: tuple[Span, ...]
    end_missing: bool
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Skeleton:
    """The text that a template writes around the contents of conversations of one shape.

    ``order``: the messages in the order in which they are written; ``pieces``: the text before,
    between and after them. By message: ``lead``, characters before a completion that are targets
    too (between the generation prompt and the content), and ``tail``, those after it, up to the
    end of the turn's last token; -1 where the template has no such token.
    """

    order: tuple[int, ...]
    pieces: tuple[str, ...]
    lead: dict[int, int]
    tail: dict[int, int]


def filled(skeleton: Skeleton, messages: tuple[Message, ...], text: str) -> Rendering | None:
    """The spans of ``text`` if it is the skeleton with the contents put in, as they are or
    with the space around them stripped, as many templates do; else None."""
    position = len(skeleton.pieces[0])
    if not text.startswith(skeleton.pieces[0]):
        return None
    spans: dict[int, Span] = {}
    for i, piece in zip(skeleton.order, skeleton.pieces[1:], strict=True):
        content = messages[i].content
        for written in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(written + piece, position):
                break
        else:
            return None
        spans[i] = (position, position + len(written))
        position += len(written) + len(piece)
    if position != len(text):
        return None
    turns = sorted(skeleton.lead)
    completions = tuple(
        (spans[i][0] - skeleton.lead[i], spans[i][1] + max(0, skeleton.tail[i])) for i in turns
    )
    contents = tuple(sorted(spans.values()))
    return Rendering(text, completions, contents, end_missing=skeleton.tail[turns[-1]] < 0)


def shapes_of(conversation: Conversation, special: dict[str, int]) -> list[Conversation]:
    """The conversation as it is, and then as a template that knows less can take it: tools
    in the system message, tool results as words of the user, the system in the first turn."""
    messages = conversation.messages
    shapes = [conversation]
    plain_tools = any(token in conversation.tools for token in special)
    if conversation.tools:
        note = f"Tools that you may call, as JSON:\n{conversation.tools}"
        system = messages[0].content + "\n\n" + note if messages[0].role == "system" else note
        messages = (Message("system", system), *messages[messages[0].role == "system" :])
        shapes.append(replace(conversation, messages=messages, tools=""))
    if any(message.role == "tool" for message in messages):
        messages = tuple(
            Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
            if message.role == "tool"
            else message
            for message in messages
        )
        shapes.append(replace(conversation, messages=messages, tools=""))
    if messages[0].role == "system":
        first = Message("user", f"{messages[0].content}\n\n{messages[1].content}")
        shapes.append(replace(conversation, messages=(first, *messages[2:]), tools=""))
    return shapes[plain_tools:]


_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\ue001")


class TemplateSpans:
    """Renders conversations with one chat template. ``special``: the tokenizer's special tokens."""

    def __init__(self, tokenizer: Any, *, name: str, template: str, special: dict[str, int]):
        self._tokenizer = tokenizer
        self._name = name
        self._template = template
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._skeletons: dict[tuple[tuple[str, ...], str], Skeleton | None] = {}

    def render(self, conversation: Conversation) -> Rendering:
        """The text of a conversation, with its spans; raises DataError if the template
        refuses it."""
        rendering = self._render(conversation)
        weights = tuple(
            message.weight for message in conversation.messages if message.role == "assistant"
        )
        return rendering if set(weights) == {1.0} else replace(rendering, weights=weights)

    def _render(self, conversation: Conversation) -> Rendering:
        with_calls = self._with_own_calls(conversation)
        if with_calls is not None:
            return with_calls
        problem = ""
        for shaped in shapes_of(conversation, self._special):
            key = (tuple(message.role for message in shaped.messages), shaped.tools)
            try:
                if key not in self._skeletons:
                    if len(self._skeletons) > 1000:  # tools may differ in every record
                        self._skeletons.clear()
                    self._skeletons[key] = self._skeleton(shaped)
                text = self._apply(shaped.messages, tools=shaped.tools)
            except Exception as error:  # whatever a template raises, it refuses this shape
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            skeleton = self._skeletons[key]
            if skeleton is None:
                continue
            rendering = filled(skeleton, shaped.messages, text)
            return rendering or self._turn_by_turn(shaped, text)
        raise DataError(
            f"{conversation.where}: the chat template ({self._name}) cannot render "
            f"{' → '.join(message.role for message in conversation.messages)}"
            f"{f' ({problem})' if problem else ''}. Choose another with data.template."
        )

    def _apply(
        self,
        messages: tuple[Message, ...],
        *,
        tools: str,
        generation_prompt: bool = False,
        calls: bool = False,
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            [_as_dict(message, calls=calls) for message in messages],
            tools=json.loads(tools) if tools else None,
            chat_template=self._template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def _with_own_calls(self, conversation: Conversation) -> Rendering | None:
        """Calls of tools as the template itself writes them; None where it has no way to, or
        where it cannot be told exactly which tokens are targets: every completion has to begin
        after the generation prompt and to end with the last special token of its turn."""
        messages, tools = conversation.messages, conversation.tools
        if not any(message.calls for message in messages) or not self._writes_calls:
            return None
        spoken = [message.said if message.calls else message.content for message in messages]
        data = [*spoken, *(message.calls for message in messages), tools]
        if any(self.special_pattern.search(part) for part in data):
            return None
        completions: list[Span] = []
        try:
            text = self._apply(messages, tools=tools, calls=True)
            for i, message in enumerate(messages):
                if message.role != "assistant":
                    continue
                prompt = self._apply(messages[:i], tools=tools, generation_prompt=True, calls=True)
                turn = self._apply(messages[: i + 1], tools=tools, calls=True)
                ends = [match.end() for match in self.special_pattern.finditer(turn, len(prompt))]
                if (
                    not ends
                    or not text.startswith(turn[: ends[-1]])
                    or turn[: len(prompt)] != prompt
                ):
                    return None
                completions.append((len(prompt), ends[-1]))
        except Exception:  # whatever a template raises, it refuses this shape
            return None
        names = [call["name"] for message in messages if message.calls
                 for call in json.loads(message.calls)]  # fmt: skip
        if not all(part.strip() in text for part in [*spoken, *names]):
            return None
        if tools and text == self._apply(messages, tools="", calls=True):
            return None
        return Rendering(text, tuple(completions), (), end_missing=False)

    @cached_property
    def _writes_calls(self) -> bool:
        """Whether the template has its own way to write calls: a probe is found in its text."""
        calls = json.dumps([{"name": "probe_name", "arguments": {"probe_key": "probe_value"}}])
        probe = (Message("user", "a"), Message("assistant", "", calls=calls))
        try:
            text = self._apply(probe, tools="", calls=True)
        except Exception:  # whatever a template raises, it has no way to
            return False
        return all(word in text for word in ("probe_name", "probe_key", "probe_value"))

    def _skeleton(self, conversation: Conversation) -> Skeleton | None:
        """None if the template leaves out a message or the tools, or writes a message twice."""
        tools = conversation.tools
        marked = tuple(
            Message(message.role, _MARK.format(i))
            for i, message in enumerate(conversation.messages)
        )
        text = self._apply(marked, tools=tools)
        parts = _MARKS.split(text)
        pieces, order = parts[::2], [int(number) for number in parts[1::2]]
        if sorted(order) != list(range(len(marked))):
            return None
        if tools and text == self._apply(marked, tools=""):
            return None
        lead: dict[int, int] = {}
        tail: dict[int, int] = {}
        for i, message in enumerate(marked):
            if message.role != "assistant":
                continue
            start = text.index(message.content)
            prompt = self._apply(marked[:i], tools=tools, generation_prompt=True)
            lead[i] = (
                start - len(prompt) if start >= len(prompt) > 0 and text.startswith(prompt) else 0
            )
            # What follows the content when the conversation ends here closes this turn.
            closing = self._apply(marked[: i + 1], tools=tools).partition(message.content)[2]
            end = self.special_pattern.search(closing)
            after = pieces[order.index(i) + 1]
            closes = end is not None and after.startswith(closing[: end.end()])
            tail[i] = end.end() if end is not None and closes else -1
        return Skeleton(tuple(order), tuple(pieces), lead, tail)

    def _turn_by_turn(self, conversation: Conversation, text: str) -> Rendering:
        """For templates that rewrite contents (Qwen3 drops earlier thoughts): a completion begins
        where the prompt before it ends, and stops with the next special token. That is exact
        only if no content holds a special token, so then the record is refused."""
        messages = conversation.messages
        for message in messages:
            special_token = self.special_pattern.search(message.content)
            if special_token:
                raise DataError(
                    f"{conversation.where}: the chat template rewrites the contents, and one "
                    f"contains the special token {special_token[0]}. Remove it from the row, or "
                    "choose another data.template."
                )
        completions: list[Span] = []
        end_missing = False
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self._apply(messages[:i], tools=conversation.tools, generation_prompt=True)
            if not text.startswith(prompt):
                raise DataError(
                    f"{conversation.where}: the chat template writes turn {i + 1} differently "
                    "when more turns follow, so what is learned cannot be told. Choose another "
                    "data.template."
                )
            end = self.special_pattern.search(text, len(prompt))
            completions.append((len(prompt), end.end() if end else len(text)))
            end_missing = end is None
        return Rendering(text, tuple(completions), (), end_missing)


def _as_dict(message: Message, *, calls: bool) -> dict[str, Any]:
    """A message as templates expect it; ``calls``: with structured tool calls."""
    if not calls or not message.calls:
        return {"role": message.role, "content": message.content}
    functions = [
        {"type": "function", "function": function} for function in json.loads(message.calls)
    ]
    return {"role": message.role, "content": message.said, "tool_calls": functions}
