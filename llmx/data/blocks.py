"""Rows of a source to blocks of tokens: documents by their encoder, conversations by a template.

tokens = RowEncoder(source, renderer, workers=2)
for encoded in tokens.blocks(source.rows()): ...
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import Any

from llmx.data.encode import Batch, DocumentEncoder, TokenBlock
from llmx.data.fit import CUT_OFF, joined
from llmx.data.forms import Conversation, Document
from llmx.data.part import Row
from llmx.data.prompts import PromptCutter
from llmx.data.rejects import Rejects
from llmx.data.render import Renderer, TokenRow
from llmx.data.rows import RowError
from llmx.data.segments import ChatEncoder
from llmx.data.source import Source
from llmx.errors import DataError

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
"""Rows, and bytes of text, that are tokenized at once."""
WITHOUT_ANSWER = "without an answer"
ANSWER_TOO_LONG = "answer longer than seq_len"
"""Reasons for which rows are dropped."""
UNANSWERED = "turns after the last answer"
"""Of rows that are used: so many turns were left out."""
FAST_FROM_BYTES = 2 << 20
"""With less text, a faster encoder is not worth its proof."""


@dataclass(frozen=True)
class Fitted:
    """The tokens of conversations, None in the place of those that are not used, and how many
    were cut or dropped."""

    rows: list[TokenRow | None]
    counts: Counter[str]


@dataclass(frozen=True)
class Encoded:
    """Rows with their tokens."""

    rows: list[Row]
    block: TokenBlock
    """Of these rows, in their order."""
    counts: Counter[str]
    """``rows`` that were read for it, and what became of those that are not as they were."""
    size: int
    """Bytes of the text that was read, as UTF-8."""


class RowEncoder:
    """Encodes the rows of one source; which encoder is decided once, on the first texts."""

    def __init__(
        self,
        source: Source,
        renderer: Renderer,
        *,
        workers: int,
        refused: Rejects | None = None,
        fast_from_bytes: int = FAST_FROM_BYTES,
    ) -> None:
        """``fast_from_bytes``: of text at the beginning, from which a faster encoder is worth
        its proof."""
        self.refused = refused or Rejects()
        """Rows that the template refused (``data.on_bad_row=skip``)."""
        self._source = source
        self._renderer = renderer
        self._workers = workers
        self._fast_from_bytes = fast_from_bytes
        self._documents: DocumentEncoder | None = None
        self._chats: ChatEncoder | None = None

    @property
    def description(self) -> str:
        """By what the rows were encoded, and on what proof; for the summary."""
        used = [encoder for encoder in (self._documents, self._chats) if encoder is not None]
        return "; ".join(encoder.description for encoder in used) or "tokenizers"

    def blocks(self, rows: Iterable[Row | None], *, begins: bool = True) -> Iterator[Encoded]:
        """Rows with their tokens, in order. Those that a template refuses are rejected.
        ``begins``: the first row is not the rest of a document."""
        for is_text, batches in groupby(batches_of(rows), key=_holds_documents):
            if is_text:
                yield from self._encoded(batches, begins=begins)
            else:
                yield from self._rendered(batches)
            begins = True

    def _encoded(self, batches: Iterator[Batch], *, begins: bool) -> Iterator[Encoded]:
        if self._documents is None:
            renderer = self._renderer
            documents = DocumentEncoder(
                renderer.tokenizer, begin=renderer.begin, workers=self._workers
            )
            batches = _chosen(documents, batches, self._fast_from_bytes)
            self._documents = documents
        for batch, block in self._documents.blocks(batches, begins=begins):
            yield Encoded(batch.rows, block, Counter(rows=batch.read), batch.size)

    def _rendered(self, batches: Iterator[Batch]) -> Iterator[Encoded]:
        if self._chats is None:
            self._chats = chats = ChatEncoder(self._renderer, workers=self._workers)
            head, batches = _head(batches, self._fast_from_bytes)
            if sum(batch.size for batch in head) >= self._fast_from_bytes:
                self._prove(chats, head)
        waiting: deque[tuple[Batch, Future[Fitted]]] = deque()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="render") as pool:
            try:
                for batch in batches:
                    waiting.append((batch, pool.submit(self._fitted, batch.rows)))
                    if len(waiting) > 2 * self._workers:
                        yield self._taken(*waiting.popleft())
                while waiting:
                    yield self._taken(*waiting.popleft())
            finally:
                for _, rows in waiting:
                    rows.cancel()

    def _prove(self, chats: ChatEncoder, head: list[Batch]) -> None:
        rows = [row for batch in head for row in batch.rows]
        # What the template refuses is said when its turn comes.
        with contextlib.suppress(DataError):
            chats.choose(rows)

    def _fitted(self, rows: list[Any]) -> Fitted:
        """The tokens of conversations; where one of them is too long and its answer must not be
        cut, of a shorter prompt. For several threads."""
        assert self._chats is not None
        data = self._source.data
        found, counts = self._chats.rows(rows), Counter[str]()
        if data.over_long != "truncate" or data.packing == "concat":
            return Fitted([*found], counts)
        fitted: list[TokenRow | None] = []
        for row, tokens in zip(rows, found, strict=True):
            if not row.keeps_answer or len(tokens.tokens) <= data.seq_len:
                fitted.append(tokens)
                continue
            short = self._shortener.shortened(row)
            if short is None:
                counts[ANSWER_TOO_LONG] += 1
            else:
                counts["truncated"] += 1
                counts[CUT_OFF] += len(tokens.tokens) - len(short.tokens)
            fitted.append(short)
        return Fitted(fitted, counts)

    @cached_property
    def _shortener(self) -> PromptCutter:
        data = self._source.data
        return PromptCutter(self._renderer, limit=data.seq_len, side=data.truncate_prompt)

    def _taken(self, batch: Batch, future: Future[Fitted]) -> Encoded:
        """A batch's rows; where the template refuses one, they are taken one by one."""
        try:
            fitted = future.result()
        except DataError:
            fitted = self._accepted(batch.rows)
        kept = [tokens for tokens in fitted.rows if tokens is not None]
        pairs = zip(batch.rows, fitted.rows, strict=True)
        rows = [row for row, tokens in pairs if tokens is not None]
        counts = Counter({"rows": batch.read, WITHOUT_ANSWER: batch.read - len(batch.rows)})
        counts[UNANSWERED] = sum(row.unanswered for row in rows if isinstance(row, Conversation))
        counts.update(fitted.counts)
        return Encoded(rows, joined(kept), counts, batch.size)

    def _accepted(self, rows: list[Any]) -> Fitted:
        """The tokens of conversations. One that the template refuses is rejected
        (``data.on_bad_row=skip``) and has None in its place."""
        try:
            return self._fitted(rows)
        except DataError as error:
            if self._source.data.on_bad_row != "skip":
                raise
            if len(rows) == 1:
                if not isinstance(error, RowError):
                    reason = "the template refuses it"
                    error = RowError(str(error), where=rows[0].where, reason=reason)
                self.refused.add(error)
                return Fitted([None], Counter())
        middle = len(rows) // 2
        first, second = self._accepted(rows[:middle]), self._accepted(rows[middle:])
        return Fitted([*first.rows, *second.rows], first.counts + second.counts)


def batches_of(rows: Iterable[Row | None]) -> Iterator[Batch]:
    """Rows in batches of a bounded number and size, of documents or of conversations."""
    found: list[Row] = []
    read = size = 0
    for row in rows:
        if row is not None and found and isinstance(row, Document) != _is_text(found):
            yield Batch(found, read, size)
            found, read, size = [], 0, 0
        read += 1
        if row is not None:
            found.append(row)
            size += text_bytes(row)
        if read >= BATCH_ROWS or size >= BATCH_BYTES:
            yield Batch(found, read, size)
            found, read, size = [], 0, 0
    if read:
        yield Batch(found, read, size)


def text_bytes(row: Row) -> int:
    """Bytes of a row's text as UTF-8."""
    texts = (row.text,) if isinstance(row, Document) else (m.content for m in row.messages)
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def _is_text(rows: list[Row]) -> bool:
    return bool(rows) and isinstance(rows[0], Document)


def _holds_documents(batch: Batch) -> bool:
    return _is_text(batch.rows)


def _chosen(
    encoder: DocumentEncoder, batches: Iterator[Batch], fast_from_bytes: int
) -> Iterator[Batch]:
    """The same batches, after the encoder was chosen on the first of them. A little text is
    sooner tokenized than a faster way is proven."""
    head, batches = _head(batches, fast_from_bytes)
    if sum(batch.size for batch in head) >= fast_from_bytes:
        encoder.choose(document.text for batch in head for document in batch.rows)
    return batches


def _head(batches: Iterator[Batch], size: int) -> tuple[list[Batch], Iterator[Batch]]:
    """The first batches up to this size of text, and all batches."""
    head: list[Batch] = []
    while sum(batch.size for batch in head) < size:
        batch = next(batches, None)
        if batch is None:
            break
        head.append(batch)
    return head, chain(head, batches)
