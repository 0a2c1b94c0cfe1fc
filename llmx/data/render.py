"""From conversations and documents to tokens, and exactly which of them are learned.

The text is the chat template's own rendering. Where every message lies in it is known by
construction: the template is rendered once with markers in place of the contents, which gives
the fixed text between them, and the real rendering must be that text with the real contents
put in, or the row is looked at turn by turn. Nothing is found by searching for answers.

Learned is what the model has to produce after the template's generation prompt: the answer
and the token that ends the turn. Control tokens that stand inside a content are tokenized as
the plain text they are.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.forms import Conversation, Document, Message
from llmx.data.read import Where
from llmx.data.templates import adds_begin_token, choose_template, control_tokens
from llmx.errors import ConfigError, DataError

Span = tuple[int, int]
"""Characters [start, stop) of a rendered text."""
_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True)
class TokenRow:
    """Tokens of one row. ``targets`` is True where the token is to be predicted."""

    tokens: np.ndarray
    targets: np.ndarray


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
class _Skeleton:
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


class Renderer:
    """Renders for one tokenizer, template and ``loss_on``."""

    def __init__(self, tokenizer: Any, *, template: str = "auto", loss_on: str = "assistant"):
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"The tokenizer of {tokenizer.name_or_path!r} is a {type(tokenizer).__name__} "
                "without a tokenizer.json; exact spans need a fast one. Convert it: "
                "AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)."
            )
        self.tokenizer = tokenizer
        self.template_name, self.template = choose_template(tokenizer, template)
        self.loss_on = loss_on
        self.control = control_tokens(tokenizer)
        self._control_ids = np.array(sorted(set(self.control.values())), dtype=np.int64)
        longest_first = sorted(self.control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._begin = [tokenizer.bos_token_id] if adds_begin_token(tokenizer) else []
        self._skeletons: dict[tuple[tuple[str, ...], str], _Skeleton | None] = {}

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens at which an answer ends: the end token, and the one that closes an
        assistant's turn in this template where that is another. Sorted."""
        question = Conversation(
            (Message("user", "a"), Message("assistant", "b")), Where(Path("probe"), 1, "row")
        )
        (row,) = self.conversations([question])
        ends = {int(row.tokens[-1]), self.tokenizer.eos_token_id}
        return sorted(end for end in ends if end is not None)

    # Documents

    def documents(self, documents: list[Document], *, first: list[bool]) -> list[TokenRow]:
        """Rows of whole documents or pieces: begin token (where the tokenizer uses one),
        text, end token. Every token is a target."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ConfigError(
                f"The tokenizer of {self.tokenizer.name_or_path!r} has no end token to put "
                "between documents. Set eos_token in its tokenizer_config.json."
            )
        encodings = self._encode([document.text for document in documents], plain=True)
        rows = []
        for document, is_first, encoding in zip(documents, first, encodings, strict=True):
            begin = self._begin if is_first else []
            tokens = [*begin, *encoding.ids, *([end] if document.last else [])]
            rows.append(TokenRow(np.array(tokens, np.uint32), np.ones(len(tokens), np.bool_)))
        return rows

    # Conversations

    def conversations(self, conversations: list[Conversation]) -> list[TokenRow]:
        """Rows of conversations, in order."""
        renderings = [self.render(conversation) for conversation in conversations]
        encodings = self._encode([rendering.text for rendering in renderings])
        return [
            self._row(rendering, encoding)
            for rendering, encoding in zip(renderings, encodings, strict=True)
        ]

    def render(self, conversation: Conversation) -> Rendering:
        """The text of a conversation, with its spans; raises DataError if the template
        refuses it."""
        problem = ""
        for shaped in _shapes(conversation, self.control):
            key = (tuple(message.role for message in shaped.messages), shaped.tools)
            try:
                if key not in self._skeletons:
                    if len(self._skeletons) > 1000:  # tools may differ in every row
                        self._skeletons.clear()
                    self._skeletons[key] = self._skeleton(shaped)
                text = self._apply(shaped.messages, tools=shaped.tools)
            except Exception as error:  # whatever a template raises, it refuses this shape
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            skeleton = self._skeletons[key]
            if skeleton is None:
                continue
            rendering = _fill(skeleton, shaped.messages, text)
            return rendering or self._turn_by_turn(shaped, text)
        raise DataError(
            f"{conversation.where}: the chat template ({self.template_name}) cannot render "
            f"{' → '.join(message.role for message in conversation.messages)}"
            f"{f' ({problem})' if problem else ''}. Choose another with data.template."
        )

    def prompt(self, conversation: Conversation) -> tuple[np.ndarray, str]:
        """(tokens before the last answer, the last answer): a question as it is trained."""
        last_only = Renderer.__new__(Renderer)
        last_only.__dict__.update(self.__dict__, loss_on="last")
        (row,) = last_only.conversations([conversation])
        return row.tokens[: int(np.argmax(row.targets))], conversation.messages[-1].content

    def _apply(
        self, messages: tuple[Message, ...], *, tools: str, generation_prompt: bool = False
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            tools=json.loads(tools) if tools else None,
            chat_template=self.template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def _skeleton(self, conversation: Conversation) -> _Skeleton | None:
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
            end = self._control_pattern.search(closing)
            after = pieces[order.index(i) + 1]
            closes = end is not None and after.startswith(closing[: end.end()])
            tail[i] = end.end() if end is not None and closes else -1
        return _Skeleton(tuple(order), tuple(pieces), lead, tail)

    def _turn_by_turn(self, conversation: Conversation, text: str) -> Rendering:
        """For templates that rewrite contents (Qwen3 drops earlier thoughts): an answer begins
        where the prompt before it ends, and stops with the next control token. That is exact
        only if no content holds a control token, so then the row is refused."""
        messages = conversation.messages
        for message in messages:
            found = self._control_pattern.search(message.content)
            if found:
                raise DataError(
                    f"{conversation.where}: the chat template rewrites the contents, and one "
                    f"contains the control token {found[0]}. Remove it from the row, or choose "
                    "another data.template."
                )
        answers: list[Span] = []
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
            end = self._control_pattern.search(text, len(prompt))
            answers.append((len(prompt), end.end() if end else len(text)))
            end_missing = end is None
        return Rendering(text, tuple(answers), (), end_missing)

    # Tokens

    def _encode(self, texts: list[str], *, plain: bool = False) -> list[Any]:
        backend = self.tokenizer.backend_tokenizer
        before = (backend.encode_special_tokens, backend.truncation, backend.padding)
        backend.encode_special_tokens = plain
        backend.no_truncation()
        backend.no_padding()
        try:
            return list(backend.encode_batch(texts, add_special_tokens=False))
        finally:
            backend.encode_special_tokens = before[0]
            if before[1]:
                backend.enable_truncation(**before[1])
            if before[2]:
                backend.enable_padding(**before[2])

    def _row(self, rendering: Rendering, encoding: Any) -> TokenRow:
        ids, offsets = list(encoding.ids), list(encoding.offsets)
        injected = self._injected(ids, offsets, rendering.contents)
        if injected:
            ids, offsets = self._without_control(rendering.text, injected)
        tokens = np.array(ids, np.uint32)
        targets = np.zeros(len(tokens), np.bool_)
        answers = rendering.answers[-1:] if self.loss_on == "last" else rendering.answers
        if self.loss_on == "all":
            targets[:] = True
        starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
        for start, stop in answers:
            first = bisect.bisect_right(stops, start)
            targets[first : bisect.bisect_left(starts, stop, lo=first)] = True
        if rendering.end_missing:
            tokens = np.append(tokens, np.uint32(self.tokenizer.eos_token_id))
            targets = np.append(targets, True)
        # Nothing is learned from what follows the last target (say, a line break).
        used = int(np.flatnonzero(targets)[-1]) + 1
        return TokenRow(tokens[:used], targets[:used])

    def _injected(
        self, ids: list[int], offsets: list[Span], contents: tuple[Span, ...]
    ) -> list[Span]:
        """Where control tokens came out of data."""
        places = np.flatnonzero(np.isin(np.array(ids, np.int64), self._control_ids))
        content_starts = [start for start, _ in contents]
        injected = []
        for place in places.tolist():
            start, stop = offsets[place]
            index = bisect.bisect_right(content_starts, start) - 1
            if index >= 0 and start < contents[index][1] and start < stop:
                injected.append((start, stop))
        return injected

    def _without_control(self, text: str, injected: list[Span]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        offsets: list[Span] = []
        position = 0
        for start, stop in [*injected, (len(text), len(text))]:
            for part, base, plain in ((text[position:start], position, False),
                                      (text[start:stop], start, True)):  # fmt: skip
                (encoding,) = self._encode([part], plain=plain)
                ids += encoding.ids
                offsets += [(a + base, b + base) for a, b in encoding.offsets]
            position = stop
        return ids, offsets


def _fill(skeleton: _Skeleton, messages: tuple[Message, ...], text: str) -> Rendering | None:
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


def _shapes(conversation: Conversation, control: dict[str, int]) -> list[Conversation]:
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
