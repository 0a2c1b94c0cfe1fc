"""Meanings of records: conversations, labelled texts, preference pairs, pairs of texts.

Each is a ``Row`` (``llmx.data.source.records``), as are ``Document`` and ``Record`` themselves. A
task says which of them it takes (``Encoding.takes``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from llmx.data.source.records import Document, Where, utf8_bytes


@dataclass(frozen=True)
class Message:
    """One turn; ``role`` is system, user, assistant or tool.

    A turn that calls tools has the calls twice: in ``content`` as text, in the form that Qwen
    and Hermes use, and in ``calls`` as the JSON text of a list of ``{"name", "arguments"}`` for
    templates that write them in their own way, with ``said`` as the words beside them.
    ``thought``: the reasoning before the answer, where the data has it beside the content.
    ``call_id``: of the call whose result a tool's turn is, where the data has one.
    """

    role: str
    content: str
    calls: str = ""
    said: str = ""
    thought: str = ""
    call_id: str = ""
    weight: float = 1.0
    """The weight of each of its tokens in the loss (``Encoding.turn_weights``)."""


@dataclass(frozen=True)
class Conversation:
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
    def content(self) -> bytes:
        return json.dumps([_turns(self.messages), self.tools]).encode()

    @property
    def num_bytes(self) -> int:
        return utf8_bytes(message.thought + message.content for message in self.messages)

    @property
    def sequences(self) -> tuple[Conversation]:
        return (self,)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that a tokenizer is trained on."""
        words = (text for message in self.messages for text in (message.thought, message.content))
        return (*filter(None, words), self.tools)


class Prompted(Conversation):
    """A conversation whose last answer is a reference, and may be empty: asked for by tasks that
    draw answers of their own. Its readers give a ``Conversation``."""

    title: ClassVar[str] = "prompts (with a reference answer or without)"


@dataclass(frozen=True)
class Labelled:
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
    def content(self) -> bytes:
        return json.dumps([_turns(self.history), self.text, self.label]).encode()

    @property
    def num_bytes(self) -> int:
        return utf8_bytes((self.text, *(message.content for message in self.history)))

    @property
    def sequences(self) -> tuple[Document]:
        return (Document(self.text, self.where),)


@dataclass(frozen=True)
class Preference:
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
    def content(self) -> bytes:
        return self.chosen.content + self.rejected.content

    @property
    def num_bytes(self) -> int:
        return self.chosen.num_bytes + self.rejected.num_bytes

    @property
    def sequences(self) -> tuple[Conversation, Conversation]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class UnpairedPreference:
    """A conversation whose last answer is good or bad."""

    title: ClassVar[str] = "answers with a verdict (label: true or false)"
    conversation: Conversation
    desirable: bool

    @property
    def where(self) -> Where:
        return self.conversation.where

    @property
    def content(self) -> bytes:
        return self.conversation.content + bytes([self.desirable])

    @property
    def num_bytes(self) -> int:
        return self.conversation.num_bytes

    @property
    def sequences(self) -> tuple[Conversation]:
        return (self.conversation,)


@dataclass(frozen=True)
class TextPair:
    """A text, another that belongs to it, and texts that do not."""

    title: ClassVar[str] = "pairs of texts"
    query: str
    positive: str
    negatives: tuple[str, ...]
    where: Where

    @property
    def texts(self) -> tuple[str, ...]:
        return self.query, self.positive, *self.negatives

    @property
    def content(self) -> bytes:
        return json.dumps(self.texts).encode()

    @property
    def num_bytes(self) -> int:
        return utf8_bytes(self.texts)

    @property
    def sequences(self) -> tuple[Document, ...]:
        return tuple(Document(text, self.where) for text in self.texts)


def _turns(messages: tuple[Message, ...]) -> list[list[str]]:
    return [[m.role, m.content, *filter(None, [m.thought])] for m in messages]
