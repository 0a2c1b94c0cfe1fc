"""From conversations and documents to tokens, and exactly which of them are learned.

Control tokens that stand inside a content are tokenized as the plain text they are.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import Column
from llmx.data.format.formats import Conversation, Message
from llmx.data.format.rendering import TemplateSpans
from llmx.data.format.skeleton import Rendering, Span
from llmx.data.format.templates import adds_begin_token, choose_template, control_tokens
from llmx.data.source.files import Where
from llmx.errors import ConfigError


@dataclass(frozen=True)
class TokenRow:
    """Tokens of one sequence. ``targets`` is True where the token is to be predicted; or float32,
    its weight."""

    tokens: np.ndarray
    targets: np.ndarray
    columns: Mapping[Column, np.ndarray] = field(default_factory=dict)
    """By token, of a sequence that a task gave as tokens."""


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
        self.begin = [tokenizer.bos_token_id] if adds_begin_token(tokenizer) else []
        """The tokens that begin every text: the begin token where the tokenizer uses one."""
        self._spans = TemplateSpans(
            tokenizer, name=self.template_name, template=self.template, control=self.control
        )
        self.control_pattern = self._spans.control_pattern
        """Finds control tokens in a text, the longest first."""
        self._backends: dict[bool, Any] = {}

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

    # Conversations

    def conversations(self, conversations: list[Conversation]) -> list[TokenRow]:
        """Rows of conversations, in order."""
        return self.rows_of(self.render(conversations))

    def render(self, conversations: list[Conversation]) -> list[Rendering]:
        """Conversations as texts; raises DataError for one that the template refuses."""
        return [self._spans.render(conversation) for conversation in conversations]

    def prompt(self, conversation: Conversation) -> tuple[np.ndarray, str]:
        """(tokens before the last answer, the last answer): a question as it is trained."""
        (row,) = self.rows_of(self.render([conversation]), loss_on="last")
        return row.tokens[: int(np.argmax(row.targets))], conversation.messages[-1].content

    # Tokens

    def rows_of(self, renderings: list[Rendering], *, loss_on: str | None = None) -> list[TokenRow]:
        """Rows of rendered conversations, by the tokenizer's own offsets."""
        encodings = self._encode([rendering.text for rendering in renderings])
        return [
            self._row(rendering, encoding, loss_on=loss_on)
            for rendering, encoding in zip(renderings, encodings, strict=True)
        ]

    def row_of(
        self,
        tokens: np.ndarray,
        answers: list[Span],
        *,
        end_missing: bool,
        loss_on: str | None = None,
    ) -> TokenRow:
        """A row of these tokens, in which each answer is tokens [first, last)."""
        loss_on = loss_on or self.loss_on
        targets = np.zeros(len(tokens), np.bool_)
        if loss_on == "all":
            targets[:] = True
        for first, last in answers[-1:] if loss_on == "last" else answers:
            targets[first:last] = True
        if end_missing:
            tokens = np.append(tokens, np.uint32(self.tokenizer.eos_token_id))
            targets = np.append(targets, True)
        # Nothing is learned from what follows the last target (say, a line break).
        used = len(targets) - int(np.argmax(targets[::-1]))
        return TokenRow(tokens[:used], targets[:used])

    def _encode(self, texts: list[str], *, plain: bool = False) -> list[Any]:
        """``plain``: control tokens are the text that they are."""
        if plain not in self._backends:
            self._backends[plain] = own_backend(self.tokenizer, plain=plain)
        return list(self._backends[plain].encode_batch(texts, add_special_tokens=False))

    def _row(self, rendering: Rendering, encoding: Any, *, loss_on: str | None) -> TokenRow:
        ids, offsets = list(encoding.ids), list(encoding.offsets)
        injected = self._injected(ids, offsets, rendering.contents)
        if injected:
            ids, offsets = self._without_control(rendering.text, injected)
        starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
        answers: list[Span] = []
        for start, stop in rendering.answers:
            first = bisect.bisect_right(stops, start)
            answers.append((first, bisect.bisect_left(starts, stop, lo=first)))
        tokens = np.array(ids, np.uint32)
        return self.row_of(tokens, answers, end_missing=rendering.end_missing, loss_on=loss_on)

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


def own_backend(tokenizer: Any, *, plain: bool) -> Any:
    """A copy of the tokenizer's library object, whose settings are neither the caller's nor
    changed by others. Offsets are those of all characters of a token, spaces too."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    processor = state["post_processor"] or {}
    for step in (processor, *processor.get("processors", [])):
        if "trim_offsets" in step:
            step["trim_offsets"] = False
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = plain
    return backend
