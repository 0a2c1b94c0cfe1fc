"""A conversation as text with its spans, and what a template writes around the contents."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmx.data.format.formats import Conversation, Message

Span = tuple[int, int]
"""Characters [start, stop) of a rendered text."""


@dataclass(frozen=True)
class Rendering:
    """A conversation as text: what is learned (a span an assistant turn), and where data lies.

    ``end_missing``: the template closes the last turn with no control token, so the end token
    is appended.
    """

    text: str
    answers: tuple[Span, ...]
    contents: tuple[Span, ...]
    end_missing: bool


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the contents of conversations of one shape.

    ``order``: the messages in the order in which they are written; ``pieces``: the text before,
    between and after them. By message: ``lead``, characters before an answer that are learned
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
    answers = tuple(
        (spans[i][0] - skeleton.lead[i], spans[i][1] + max(0, skeleton.tail[i])) for i in turns
    )
    contents = tuple(sorted(spans.values()))
    return Rendering(text, answers, contents, end_missing=skeleton.tail[turns[-1]] < 0)


def shapes_of(conversation: Conversation, control: dict[str, int]) -> list[Conversation]:
    """The conversation as it is, and then as a template that knows less can take it: tools
    in the system message, tool results as words of the user, the system in the first turn."""
    messages = conversation.messages
    shapes = [conversation]
    plain_tools = any(token in conversation.tools for token in control)
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
