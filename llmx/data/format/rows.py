"""Meanings of records: conversations, labelled texts, preference pairs, pairs of texts.

Each is a ``Row`` (``llmx.data.source.records``), as are ``Document`` and ``Record`` themselves. A
task says which of them it takes (``Encoding.takes``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from llmx.data.source.records import Row, Where


@dataclass(frozen=True)
class Message:
    """One turn; ``role`` is system, user, assistant or tool.

    A turn that calls tools has the calls twice: in ``content`` as text, in the form that Qwen
    and Hermes use, and in ``calls`` as ``{"name", "arguments"}`` (and ``"id"``) for templates that
    write them in their own way, with ``said`` as the words beside them.
    ``thought``: the reasoning before the answer, where the data has it beside the content.
    ``call_id``: of the call whose result a tool's turn is, where the data has one.
    """

    role: str
    content: str
    calls: tuple[dict[str, Any], ...] = ()
    said: str = ""
    thought: str = ""
    call_id: str = ""
    weight: float = 1.0
    """The weight of each of its tokens in the loss (``Encoding.turn_weights``)."""


@dataclass(frozen=True)
class Conversation(Row):
    """Turns that end with an assistant's. ``tools`` is the JSON text of a list of tool
    definitions, empty where there are none.

    ``keeps_completion``: where the record is too long its prompt is cut, never the answer (a
    label).
    ``unanswered``: turns after the last answer, which were left out.
    """

    title: ClassVar[str] = "conversations"
    messages: tuple[Message, ...]
    where: Where
    tools: str = ""
    keeps_completion: bool = False
    unanswered: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        texts = [text for turn in self.messages for text in (turn.thought, turn.content) if text]
        return (*texts, self.tools) if self.tools else tuple(texts)

    @property
    def content(self) -> bytes:
        turns = [[m.role, m.content, *filter(None, [m.thought])] for m in self.messages]
        return json.dumps([turns, self.tools]).encode()


class Prompted(Conversation):
    """A conversation whose last answer is a reference, and may be empty: asked for by tasks that
    draw answers of their own. Its readers give a ``Conversation``."""

    title: ClassVar[str] = "prompts (with a reference answer or without)"


@dataclass(frozen=True)
class Labelled(Row):
    """A text and its label, for tasks that learn the label itself."""

    title: ClassVar[str] = "labelled rows"
    text: str
    label: Any
    """The value in the data: a name, a number, or a list of names."""
    name: str
    """Its name in ``data.label_names``, else the label as text."""
    where: Where
    history: tuple[Message, ...] = ()
    """Earlier turns, where the data has them."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, *(message.content for message in self.history))

    @property
    def content(self) -> bytes:
        return json.dumps([self.texts, self.label]).encode()


@dataclass(frozen=True)
class Preference(Row):
    """Two conversations that are the same but for the last answer: the better, the worse."""

    title: ClassVar[str] = "preference pairs"
    chosen: Conversation
    rejected: Conversation
    margin: Any = None
    """The value of the column ``margin``, if there is one: how much better ``chosen`` is."""

    @property
    def where(self) -> Where:
        return self.chosen.where

    @property
    def texts(self) -> tuple[str, ...]:
        return self.chosen.texts + self.rejected.texts

    @property
    def content(self) -> bytes:
        return self.chosen.content + self.rejected.content


@dataclass(frozen=True)
class UnpairedPreference(Row):
    """A conversation whose last answer is good or bad."""

    title: ClassVar[str] = "answers with a verdict (label: true or false)"
    conversation: Conversation
    desirable: bool

    @property
    def where(self) -> Where:
        return self.conversation.where

    @property
    def texts(self) -> tuple[str, ...]:
        return self.conversation.texts

    @property
    def content(self) -> bytes:
        return self.conversation.content + bytes([self.desirable])


@dataclass(frozen=True)
class TextPair(Row):
    """A text, another that belongs to it, and texts that do not."""

    title: ClassVar[str] = "pairs of texts"
    query: str
    positive: str
    negatives: tuple[str, ...]
    where: Where

    @property
    def texts(self) -> tuple[str, ...]:
        return self.query, self.positive, *self.negatives
