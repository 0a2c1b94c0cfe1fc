"""Conversations to token ids, and exactly which of them are targets.

``Renderer`` takes the spans from the tokenizer's own offsets. ``ConversationEncoder`` cuts a
rendering at its special tokens and encodes what lies between as documents are encoded, many
conversations in one call; where a completion begins and ends is told by the bytes of each token,
which a byte-level tokenizer knows. Its ids and targets are proven equal to the renderer's on the
user's own data before they are trusted; a conversation whose bytes do not add up goes through the
renderer.

Special tokens that stand inside a content are tokenized as the plain text they are.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import TokenSequence
from llmx.data.format.rendering import Rendering, Span, TemplateSpans
from llmx.data.format.rows import Conversation, Message
from llmx.data.format.templates import (
    choose_template,
    enclosing_tokens,
    special_tokens,
)
from llmx.data.source.records import Where
from llmx.data.tokenize.documents import TextEncoder, own_backend
from llmx.errors import ConfigError


class Renderer:
    """Renders for one tokenizer, template and ``loss_on``."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str = "auto",
        loss_on: str = "assistant",
        chats: bool = True,
        verbatim: bool = False,
    ) -> None:
        """``chats``: there will be conversations, so that a template that does not go with the
        tokenizer is an error now; else only where a conversation comes. ``verbatim``: sequences
        are exactly what the template, or the tokenizer itself, makes of a text."""
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"The tokenizer of {tokenizer.name_or_path!r} is a {type(tokenizer).__name__} "
                "without a tokenizer.json; exact spans need a fast one. Convert it: "
                "AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)."
            )
        self.tokenizer = tokenizer
        self._refused: ConfigError | None = None
        try:
            self.template_name, self.template = choose_template(tokenizer, template)
        except ConfigError as error:
            if chats:
                raise
            self._refused = error
            self.template_name, self.template = "none", ""
        self.loss_on = loss_on
        self.special = special_tokens(tokenizer)
        self.verbatim = verbatim
        self.bos, self.eos = enclosing_tokens(tokenizer, verbatim=verbatim)
        """The tokens that begin and end every document."""
        self._spans = TemplateSpans(
            tokenizer, name=self.template_name, template=self.template, special=self.special
        )
        self.special_pattern = self._spans.special_pattern
        """Finds special tokens in a text, the longest first."""

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens at which a completion ends: the EOS token, and those that close an
        assistant's turn in this template where they are others. Sorted."""
        turns = (Message("user", "a"), Message("assistant", "b"))
        (sequence,) = self.conversations([Conversation(turns, Where(Path("probe"), 1, "row"))])
        ends = {int(sequence.tokens[-1]), self.tokenizer.eos_token_id}
        ends |= {self.special[token] for token in self._spans.turn_ends}
        return sorted(end for end in ends if end is not None)

    # Conversations

    def conversations(self, conversations: list[Conversation]) -> list[TokenSequence]:
        """Token sequences of conversations, in order."""
        return self.sequences_of(self.render(conversations))

    def render(self, conversations: list[Conversation]) -> list[Rendering]:
        """Conversations as texts; raises DataError for one that the template refuses."""
        if self._refused is not None:
            raise self._refused
        return [self._spans.render(conversation) for conversation in conversations]

    def prompt(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """The tokens before the last completion and those of it, as they are trained. Not for
        ``loss_on="all"``, which tells no completion from what is before it."""
        (rendering,) = self.render([conversation])
        last = replace(rendering, completions=rendering.completions[-1:], weights=())
        (sequence,) = self.sequences_of([last])
        before = int(np.argmax(sequence.targets))
        return sequence.tokens[:before], sequence.tokens[before:]

    # Tokens

    def document(self, ids: np.ndarray) -> TokenSequence:
        """A document of this text, of which every token is a target.

        Raises ConfigError where the tokenizer has no token to end it with.
        """
        if not self.eos and not self.verbatim:
            raise ConfigError(
                f"The tokenizer of {self.tokenizer.name_or_path!r} has no EOS token to put "
                "between documents. Set eos_token in its tokenizer_config.json."
            )
        tokens = np.concatenate((self.bos, ids, self.eos), dtype=np.uint32, casting="unsafe")
        return TokenSequence(tokens, np.ones(len(tokens), np.bool_))

    def sequences_of(self, renderings: list[Rendering]) -> list[TokenSequence]:
        """Token sequences of rendered conversations, by the tokenizer's own offsets."""
        texts = [rendering.text for rendering in renderings]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return list(map(self._sequence, renderings, encodings))

    def sequence_of(
        self, tokens: np.ndarray, completions: list[Span], rendering: Rendering
    ) -> TokenSequence:
        """The tokens of a rendering as a sequence, in which each completion is tokens [first,
        last)."""
        weights, notes = rendering.weights, rendering.notes
        targets = np.zeros(len(tokens), np.float32 if weights else np.bool_)
        if self.loss_on == "all":
            targets[:] = 1
        learned = list(zip(completions, weights or [1.0] * len(completions), strict=True))
        for (first, last), weight in learned[-1:] if self.loss_on == "last" else learned:
            targets[first:last] = weight
        if self.verbatim:
            return TokenSequence(tokens, targets, notes=notes)
        if rendering.end_missing:
            tokens = np.append(tokens, np.uint32(self.tokenizer.eos_token_id))
            targets = np.append(targets, targets.dtype.type(learned[-1][1]))
        # Nothing is learned from what follows the last target (say, a line break).
        used = len(targets) - int(np.argmax(targets[::-1] != 0))
        return TokenSequence(tokens[:used], targets[:used], notes=notes)

    @functools.cached_property
    def _backend(self) -> Any:
        return own_backend(self.tokenizer, plain=False)

    @functools.cached_property
    def plain_backend(self) -> Any:
        """The tokenizer's library object, to which special tokens are the text that they are."""
        return own_backend(self.tokenizer, plain=True)

    def _sequence(self, rendering: Rendering, encoding: Any) -> TokenSequence:
        ids, offsets = list(encoding.ids), list(encoding.offsets)
        if rendering.literal:
            ids, offsets = self._without_special(rendering.text, rendering.literal)
        starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
        completions: list[Span] = []
        for start, stop in rendering.completions:
            first = bisect.bisect_right(stops, start)
            completions.append((first, bisect.bisect_left(starts, stop, lo=first)))
        return self.sequence_of(np.array(ids, np.uint32), completions, rendering)

    def _without_special(self, text: str, injected: Sequence[Span]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        offsets: list[Span] = []
        position = 0
        for start, stop in [*injected, (len(text), len(text))]:
            for base, end, backend in (
                (position, start, self._backend),
                (start, stop, self.plain_backend),
            ):
                encoding = backend.encode(text[base:end], add_special_tokens=False)
                ids += encoding.ids
                offsets += [(a + base, b + base) for a, b in encoding.offsets]
            position = stop
        return ids, offsets


PROOF_CHARS = 200_000
"""Characters of the user's own conversations on which both ways must agree."""


class ConversationEncoder:
    """Tokens of conversations. Threads may use it at the same time once ``choose`` was called."""

    def __init__(self, renderer: Renderer) -> None:
        self.description = "tokenizers"
        self._renderer = renderer
        self._texts: TextEncoder | None = None
        self._token_bytes = np.zeros(0, np.int64)
        """The bytes of each token, by its id."""

    def choose(self, conversations: Sequence[Conversation]) -> None:
        """Use the fast way if it gives the same ids and targets on these."""
        renderer = self._renderer
        if renderer.tokenizer.eos_token_id is None:
            return
        texts = TextEncoder(renderer.tokenizer)
        pairs = texts.convert()
        if pairs is None or pairs.bytes_of_ids is None:
            self.description = texts.description
            return
        self._token_bytes = pairs.bytes_of_ids
        chars = itertools.accumulate(
            sum(len(message.content) for message in chat.messages) for chat in conversations
        )
        sample = conversations[: 1 + sum(total < PROOF_CHARS for total in chars)]
        renderings = renderer.render([*sample])
        self._texts = texts
        compared = zip(self._fast(renderings), renderer.sequences_of(renderings), strict=True)
        proven = [(fast, slow) for fast, slow in compared if fast is not None]
        if proven and all(
            np.array_equal(fast.tokens, slow.tokens) and np.array_equal(fast.targets, slow.targets)
            for fast, slow in proven
        ):
            tokens = sum(len(fast.tokens) for fast, _ in proven)
            self.description = f"tiktoken, equal to tokenizers on {tokens:,} tokens of these rows"
            return
        self._texts = None
        problem = (
            "the fast way gave other tokens on this data" if proven else "no row's bytes add up"
        )
        self.description = f"tokenizers ({problem})"

    def sequences(self, conversations: list[Conversation]) -> list[TokenSequence]:
        """Token sequences of conversations, in order; raises DataError for one that the template
        refuses."""
        renderings = self._renderer.render(conversations)
        if self._texts is None:
            return self._renderer.sequences_of(renderings)
        fast_sequences = self._fast(renderings)
        pairs = zip(renderings, fast_sequences, strict=True)
        slow = iter(self._renderer.sequences_of([r for r, fast in pairs if fast is None]))
        return [next(slow) if fast is None else fast for fast in fast_sequences]

    def _fast(self, renderings: list[Rendering]) -> list[TokenSequence | None]:
        """Sequences, and None where the bytes of the tokens do not add up to the text."""
        assert self._texts is not None
        parts = [list(self._parts(rendering)) for rendering in renderings]
        texts = [part for split_text in parts for part in split_text if isinstance(part, str)]
        ids = iter(self._texts.ids(texts))
        return [
            self._of_parts(
                [
                    next(ids) if isinstance(part, str) else np.array([part], np.uint32)
                    for part in split_text
                ],
                rendering,
            )
            for split_text, rendering in zip(parts, renderings, strict=True)
        ]

    def _of_parts(self, ids: list[np.ndarray], rendering: Rendering) -> TokenSequence | None:
        """The sequence of a rendering whose parts have these ids."""
        tokens = np.concatenate(ids)
        stops = np.cumsum(self._token_bytes[tokens])
        places = _byte_places(rendering)
        if int(stops[-1]) != places[-1]:
            return None
        firsts = np.searchsorted(stops, places[:-1:2], side="right").tolist()
        # A token begins where the one before it stops.
        lasts = (np.searchsorted(stops, places[1:-1:2], side="left") + 1).tolist()
        completions = list(zip(firsts, lasts, strict=True))
        return self._renderer.sequence_of(tokens, completions, rendering)

    def _parts(self, rendering: Rendering) -> Iterator[str | int]:
        """Texts and the ids of special tokens, in order; a special token that stands in a content
        is a text of its own."""
        text, special = rendering.text, self._renderer.special
        literal = {start for start, _ in rendering.literal}
        position = 0
        for match in self._renderer.special_pattern.finditer(text):
            start, stop = match.span()
            if start > position:
                yield text[position:start]
            yield match[0] if start in literal else special[match[0]]
            position = stop
        if position < len(text):
            yield text[position:]


def _byte_places(rendering: Rendering) -> list[int]:
    """Byte offsets of the start and end of each completion, and of the text's end, in UTF-8."""
    text = rendering.text
    places = [*itertools.chain.from_iterable(rendering.completions), len(text)]
    if text.isascii():
        return places
    between = (text[start:stop] for start, stop in itertools.pairwise([0, *places]))
    sizes = (len(part.encode("utf-8", "surrogatepass")) for part in between)
    return list(itertools.accumulate(sizes))
