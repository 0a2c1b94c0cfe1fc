"""Rendered conversations to tokens by the fast encoder of documents, spans exact.

A rendering is cut at its control tokens; what lies between is encoded as the documents are, many
rows in one call. Where an answer begins and ends among the tokens is told by the bytes of each
token, which a byte-level tokenizer knows. Ids and targets are proven equal to the slow way's on
the user's own rows before they are trusted; a row that does not add up goes the slow way.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.format.formats import Conversation, Document
from llmx.data.format.skeleton import Rendering
from llmx.data.source.files import Where
from llmx.data.tokenize.conversations import Renderer, TokenRow
from llmx.data.tokenize.documents import DocumentEncoder

_NOWHERE = Where(Path(), 0, "row")
"""Of a text that is no row: what is wrong with one is said by the slow way, with its place."""
PROOF_CHARS = 200_000
"""Characters of the user's own rows on which both ways must agree."""


class ChatEncoder:
    """Tokens of conversations. Threads may use it at the same time once ``choose`` was called."""

    def __init__(self, renderer: Renderer, *, workers: int) -> None:
        self.description = "tokenizers"
        self._renderer = renderer
        self._workers = workers
        self._documents: DocumentEncoder | None = None
        self._token_bytes = _token_bytes(renderer.tokenizer)

    def choose(self, conversations: Sequence[Conversation]) -> None:
        """Use the fast way if it gives the same ids and targets on these."""
        renderer = self._renderer
        if self._token_bytes is None or renderer.tokenizer.eos_token_id is None:
            return
        sample: list[Conversation] = []
        chars = 0
        for conversation in conversations:
            sample.append(conversation)
            chars += sum(len(message.content) for message in conversation.messages)
            if chars >= PROOF_CHARS:
                break
        documents = DocumentEncoder(renderer.tokenizer, begin=[], workers=self._workers)
        # It is proven on the rows as a whole: this only decides for which encoder.
        few = sample[: 1 + len(sample) // 10]
        documents.choose(message.content for chat in few for message in chat.messages)
        if documents.description.startswith("tokenizers"):
            self.description = documents.description
            return
        renderings = renderer.render(sample)
        self._documents = documents
        fast, slow = self._fast_rows(renderings), renderer.rows_of(renderings)
        tokens = 0
        for mine, proven in zip(fast, slow, strict=True):
            if mine is None:
                continue
            same = np.array_equal(mine.tokens, proven.tokens)
            if not (same and np.array_equal(mine.targets, proven.targets)):
                self._documents = None
                self.description = "tokenizers (the fast way gave other tokens on this data)"
                return
            tokens += len(mine.tokens)
        if not tokens:
            self._documents = None
            self.description = "tokenizers (no row's bytes add up)"
            return
        kind = documents.description.partition(",")[0].partition(" (")[0]
        self.description = f"{kind}, equal to tokenizers on {tokens:,} tokens of these rows"

    def rows(self, conversations: list[Conversation]) -> list[TokenRow]:
        """Rows of conversations, in order; raises DataError for one that the template refuses."""
        renderings = self._renderer.render(conversations)
        if self._documents is None:
            return self._renderer.rows_of(renderings)
        found = self._fast_rows(renderings)
        rest = iter(
            self._renderer.rows_of(
                [r for r, row in zip(renderings, found, strict=True) if row is None]
            )
        )
        return [next(rest) if row is None else row for row in found]

    def _fast_rows(self, renderings: list[Rendering]) -> list[TokenRow | None]:
        """Rows, and None for those in which bytes and tokens do not add up."""
        assert self._documents is not None
        assert self._token_bytes is not None
        plans: list[list[int]] = []
        texts: list[Document] = []
        for rendering in renderings:
            plan: list[int] = []
            for text, control in self._parts(rendering):
                if control is None:
                    plan.append(len(texts))
                    texts.append(Document(text, _NOWHERE, last=False))
                else:
                    plan.append(-1 - control)
            plans.append(plan)
        block = self._documents.encode(texts, [False] * len(texts))
        edges = np.concatenate([[0], np.cumsum(block.lengths)]).tolist()
        rows: list[TokenRow | None] = []
        for rendering, plan in zip(renderings, plans, strict=True):
            tokens = np.concatenate(
                [
                    block.tokens[edges[part] : edges[part + 1]]
                    if part >= 0
                    else np.array([-1 - part], np.uint32)
                    for part in plan
                ]
            )
            stops = np.cumsum(self._token_bytes[tokens])
            places = _byte_places(rendering)
            if int(stops[-1]) != places[-1]:
                rows.append(None)
                continue
            firsts = np.searchsorted(stops, places[:-1:2], side="right").tolist()
            # A token begins where the one before it stops.
            lasts = (np.searchsorted(stops, places[1:-1:2], side="left") + 1).tolist()
            answers = list(zip(firsts, lasts, strict=True))
            rows.append(self._renderer.row_of(tokens, answers, end_missing=rendering.end_missing))
        return rows

    def _parts(self, rendering: Rendering) -> Iterator[tuple[str, int | None]]:
        """(text, None) and (control token, its id) in order; a control token that stands in a
        content is a text of its own."""
        text, control = rendering.text, self._renderer.control
        starts = [start for start, _ in rendering.contents]
        position = 0
        for found in self._renderer.control_pattern.finditer(text):
            start, stop = found.span()
            if start > position:
                yield text[position:start], None
            content = bisect.bisect_right(starts, start) - 1
            injected = content >= 0 and start < rendering.contents[content][1]
            yield found[0], None if injected else control[found[0]]
            position = stop
        if position < len(text):
            yield text[position:], None


def _byte_places(rendering: Rendering) -> list[int]:
    """Where answers begin and end in the UTF-8 of the text, in order, and the text's end."""
    text = rendering.text
    places = [*itertools.chain.from_iterable(rendering.answers), len(text)]
    if text.isascii():
        return places
    found: list[int] = []
    before = at = 0
    for place in places:
        at += len(text[before:place].encode("utf-8", "surrogatepass"))
        found.append(at)
        before = place
    return found


def _token_bytes(tokenizer: Any) -> np.ndarray | None:
    """int64 [ids]: bytes of each token of a byte-level BPE; None for other tokenizers, and where
    control tokens take more than themselves."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    cutting = state["pre_tokenizer"] or {}
    steps = cutting.get("pretokenizers", [cutting])
    added = state["added_tokens"]
    greedy = any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in added)
    if state["model"]["type"] != "BPE" or steps[-1].get("type") != "ByteLevel" or greedy:
        return None
    vocab: dict[str, int] = state["model"]["vocab"]
    sizes = np.zeros(1 + max([*vocab.values(), *(t["id"] for t in added)]), np.int64)
    for token, index in vocab.items():
        sizes[index] = len(token)  # each character stands for a byte
    for token in added:
        sizes[token["id"]] = len(token["content"].encode())
    return sizes
