"""Rows of a source to blocks of tokens: documents by their encoder, conversations by a template.

tokens = RowEncoder(source, renderer, workers=2)
for encoded in tokens.blocks(source.rows()): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from llmx.data.encode import Batch, DocumentEncoder, TokenBlock
from llmx.data.fit import joined
from llmx.data.forms import Document
from llmx.data.part import Row
from llmx.data.rejects import Rejects
from llmx.data.render import Renderer, TokenRow
from llmx.data.rows import RowError
from llmx.data.source import Source
from llmx.errors import DataError

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
"""Rows, and bytes of text, that are tokenized at once."""
FAST_FROM_BYTES = 2 << 20
"""With less text, a faster encoder is not worth its proof."""


@dataclass(frozen=True)
class Encoded:
    """Rows with their tokens."""

    rows: list[Row]
    block: TokenBlock
    """Of these rows, in their order."""
    read: int
    """Rows read for it; those that are not among ``rows`` hold no answer or were refused."""
    without_answer: int
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

    @property
    def description(self) -> str:
        """By what the rows were encoded, and on what proof; for the summary."""
        return self._documents.description if self._documents else "tokenizers"

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
            yield Encoded(batch.rows, block, batch.read, 0, batch.size)

    def _rendered(self, batches: Iterator[Batch]) -> Iterator[Encoded]:
        for batch in batches:
            found = self._accepted(batch.rows)
            kept = [tokens for tokens in found if tokens is not None]
            rows = [
                row for row, tokens in zip(batch.rows, found, strict=True) if tokens is not None
            ]
            silent = batch.read - len(batch.rows)
            yield Encoded(rows, joined(kept), batch.read, silent, batch.size)

    def _accepted(self, rows: list[Row]) -> list[TokenRow | None]:
        """The tokens of conversations. One that the template refuses is rejected
        (``data.on_bad_row=skip``) and has None in its place."""
        try:
            return list(self._renderer.conversations(rows))
        except DataError as error:
            if self._source.data.on_bad_row != "skip":
                raise
            if len(rows) == 1:
                if not isinstance(error, RowError):
                    reason = "the template refuses it"
                    error = RowError(str(error), where=rows[0].where, reason=reason)
                self.refused.add(error)
                return [None]
        middle = len(rows) // 2
        return [*self._accepted(rows[:middle]), *self._accepted(rows[middle:])]


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
    # Half a surrogate pair is somebody else's error, said with its place.
    return sum(
        len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        for text in texts
    )


def _is_text(rows: list[Row]) -> bool:
    return bool(rows) and isinstance(rows[0], Document)


def _holds_documents(batch: Batch) -> bool:
    return _is_text(batch.rows)


def _chosen(
    encoder: DocumentEncoder, batches: Iterator[Batch], fast_from_bytes: int
) -> Iterator[Batch]:
    """The same batches, after the encoder was chosen on the first of them. A little text is
    sooner tokenized than a faster way is proven."""
    head: list[Batch] = []
    while sum(batch.size for batch in head) < fast_from_bytes:
        batch = next(batches, None)
        if batch is None:
            return iter(head)
        head.append(batch)
    encoder.choose(document.text for batch in head for document in batch.rows)
    return chain(head, batches)
