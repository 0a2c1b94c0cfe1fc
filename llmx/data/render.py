"""From conversations and documents to tokens, and exactly which of them are learned.

Control tokens that stand inside a content are tokenized as the plain text they are.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.forms import Conversation, Message
from llmx.data.read import Where
from llmx.data.spans import Rendering, Span, TemplateSpans
from llmx.data.templates import adds_begin_token, choose_template, control_tokens
from llmx.errors import ConfigError


@dataclass(frozen=True)
class TokenRow:
    """Tokens of one row. ``targets`` is True where the token is to be predicted."""

    tokens: np.ndarray
    targets: np.ndarray


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
        return self._rows(conversations, loss_on=self.loss_on)

    def prompt(self, conversation: Conversation) -> tuple[np.ndarray, str]:
        """(tokens before the last answer, the last answer): a question as it is trained."""
        (row,) = self._rows([conversation], loss_on="last")
        return row.tokens[: int(np.argmax(row.targets))], conversation.messages[-1].content

    # Tokens

    def _rows(self, conversations: list[Conversation], *, loss_on: str) -> list[TokenRow]:
        renderings = [self._spans.render(conversation) for conversation in conversations]
        encodings = self._encode([rendering.text for rendering in renderings])
        return [
            self._row(rendering, encoding, loss_on=loss_on)
            for rendering, encoding in zip(renderings, encodings, strict=True)
        ]

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

    def _row(self, rendering: Rendering, encoding: Any, *, loss_on: str) -> TokenRow:
        ids, offsets = list(encoding.ids), list(encoding.offsets)
        injected = self._injected(ids, offsets, rendering.contents)
        if injected:
            ids, offsets = self._without_control(rendering.text, injected)
        tokens = np.array(ids, np.uint32)
        targets = np.zeros(len(tokens), np.bool_)
        answers = rendering.answers[-1:] if loss_on == "last" else rendering.answers
        if loss_on == "all":
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
