"""Rows of a source to tokens: what a task makes of them, tokenized in batches.

    encoder = ExampleEncoder(split, renderer, encoding, workers=2)
    for batch, examples in encoder.encoded(split.rows()): ...

A row becomes an example (``Encoding.encode``), the sequences of many examples are tokenized
together, texts by their encoder and conversations by the template, and are put back together as
examples, which are cut to ``data.seq_len``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from llmx.data.examples import (
    EncodedExample,
    Encoding,
    Example,
    ExampleSequence,
    Schema,
    Tokens,
    TokenSequence,
    encoded,
    over_long_of,
)
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document, RecordError, Row
from llmx.data.split import DatasetSplit
from llmx.data.tokenize.conversations import ConversationEncoder, Renderer
from llmx.data.tokenize.documents import TextEncoder
from llmx.data.tokenize.tokenizer import without_row
from llmx.data.tokenize.truncation import Fates, Truncation
from llmx.errors import DataError

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
"""Rows, and bytes of text, that are tokenized at once."""
WITHOUT_ANSWER = "without an answer"
LEFT_OUT = "left out by the task"
"""Reasons for which rows are dropped."""
WITHOUT_ROW = "a token that the model has no row for"
"""The reason for which such a row is rejected."""


@dataclass
class Batch:
    """Rows that are tokenized together."""

    examples: list[Example] = field(default_factory=list)
    fates: Fates = field(default_factory=Fates)
    """Rows that were read for it, and what became of those that are not as they were."""
    rejected: list[RecordError] = field(default_factory=list)
    """Rows that the task or the template refused (``data.on_bad_row=skip``)."""
    size: int = 0
    """Bytes of the text of its examples, as UTF-8."""


class ExampleEncoder:
    """Encodes the rows of one split; which encoder is decided once, on the first texts."""

    def __init__(
        self,
        split: DatasetSplit,
        renderer: Renderer,
        encoding: Encoding,
        *,
        workers: int,
        proves: bool,
    ) -> None:
        """``proves``: there may be enough text for a faster encoder to be worth its proof."""
        self._skips = split.data.on_bad_row == "skip"
        self._renderer = renderer
        self._encoding = encoding
        self._schema = Schema(encoding.columns, encoding.name)
        self._num_embeddings = encoding.num_embeddings
        self._truncation = Truncation(
            split.data, renderer, splits=over_long_of(split, encoding) == "split"
        )
        self._workers, self._proves = workers, proves
        self._texts: TextEncoder | None = None
        self._chats: ConversationEncoder | None = None

    @property
    def description(self) -> str:
        """The encoder of the rows and the proof of its ids, for the summary."""
        used = [encoder for encoder in (self._texts, self._chats) if encoder is not None]
        return "; ".join(encoder.description for encoder in used) or "tokenizers"

    def encoded(self, rows: Iterable[Row | None]) -> Iterator[tuple[Batch, list[EncodedExample]]]:
        """Batches with the tokens of the examples that are used, in order; a few batches ahead of
        the consumer.

        Raises DataError for a row that the task or the template refuses, unless it is skipped.
        """
        waiting: deque[tuple[Batch, Future[list[EncodedExample]]]] = deque()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="encode") as pool:
            try:
                for batch in self._batches(rows):
                    self._choose(batch)
                    waiting.append((batch, pool.submit(self._encode, batch)))
                    if len(waiting) > 2 * self._workers:
                        first, future = waiting.popleft()
                        yield first, future.result()
                while waiting:
                    first, future = waiting.popleft()
                    yield first, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    # Rows to examples

    def _batches(self, rows: Iterable[Row | None]) -> Iterator[Batch]:
        """Examples in batches of a bounded number and size."""
        batch = Batch()
        for row in rows:
            # Noted with the batch: what is read ahead is not yet done.
            batch.fates.rows_read += 1
            if row is None:
                batch.fates.dropped[WITHOUT_ANSWER] += 1
            elif (example := self._example(row, batch)) is not None:
                batch.examples.append(example)
                batch.size += row.num_bytes
            if batch.fates.rows_read >= BATCH_ROWS or batch.size >= BATCH_BYTES:
                yield batch
                batch = Batch()
        if batch.fates.rows_read:
            yield batch

    def _example(self, row: Row, batch: Batch) -> Example | None:
        """The task's example of a row; None if the row is left out or rejected."""
        try:
            example = encoded(self._encoding, row)
        except RecordError as error:
            if not self._skips:
                raise
            batch.rejected.append(error)
            return None
        if example is None:
            batch.fates.dropped[LEFT_OUT] += 1
            return None
        example = self._schema.checked(example)
        if isinstance(example.sequences[0], Tokens):
            example = replace(example, where=row.where)
        return example

    def _choose(self, batch: Batch) -> None:
        """Make the encoder of each kind of sequence, on the first batch that has it; where a faster
        one is worth its proof, it is proven on this batch."""
        sequences = [sequence for example in batch.examples for sequence in example.sequences]
        chats = [sequence for sequence in sequences if isinstance(sequence, Conversation)]
        if chats and self._chats is None:
            self._chats = ConversationEncoder(self._renderer)
            if self._proves:
                # What the template refuses is said when its turn comes.
                with contextlib.suppress(DataError):
                    self._chats.choose(chats)
        texts = [sequence.text for sequence in sequences if isinstance(sequence, Document)]
        if texts and self._texts is None:
            self._texts = TextEncoder(self._renderer.tokenizer)
            if self._proves:
                self._texts.choose(texts)

    # Examples to tokens, in several threads

    def _encode(self, batch: Batch) -> list[EncodedExample]:
        """The tokens of the examples of a batch, cut to ``data.seq_len``."""
        fates = batch.fates
        fitted: list[EncodedExample] = []
        for example, sequences in self._tokenized(batch.examples, batch):
            for part, sequence in zip(example.sequences, sequences, strict=True):
                if isinstance(part, Conversation):
                    fates.notes.update(sequence.notes)
                    fates.unanswered_turns += part.unanswered
            pieces = self._truncation.fitted(example, sequences, fates)
            fitted += [(example, parts) for parts in pieces]
        return fitted

    def _tokenized(self, examples: list[Example], batch: Batch) -> list[EncodedExample]:
        """The examples with their sequences, without those that are counted as dropped, or that the
        template refuses and ``data.on_bad_row`` skips."""
        fates = Fates()
        try:
            sequences = iter(self._sequences(examples))
            tokenized = [
                (example, [next(sequences) for _ in example.sequences]) for example in examples
            ]
            self._check_rows(tokenized)
            used = [
                (example, kept)
                for example, tokens in tokenized
                if (kept := self._truncation.with_shorter_prompt(example, tokens, fates))
            ]
        except DataError as error:
            if not self._skips:
                raise
            if len(examples) == 1:
                if not isinstance(error, RecordError):
                    where, reason = examples[0].place, "the template refuses it"
                    error = RecordError(str(error), where=where, reason=reason)
                batch.rejected.append(error)
                return []
        else:
            batch.fates.add(fates)
            return used
        middle = len(examples) // 2
        return [
            *self._tokenized(examples[:middle], batch),
            *self._tokenized(examples[middle:], batch),
        ]

    def _check_rows(self, examples: list[EncodedExample]) -> None:
        """Raise RecordError for a token that the embedding of the model has no row for."""
        limit = self._num_embeddings
        if limit is None:
            return
        for example, sequences in examples:
            for sequence in sequences:
                if int(sequence.tokens.max(initial=0)) < limit:
                    continue
                problem = without_row(self._renderer.tokenizer, sequence.tokens, limit)
                raise RecordError(
                    f"{example.place}: it {problem} Remove it from the row (data.on_bad_row=skip "
                    "leaves such rows out), or set model.tokenizer to a tokenizer of this model "
                    "without it.",
                    where=example.place,
                    reason=WITHOUT_ROW,
                )

    def _sequences(self, examples: list[Example]) -> list[TokenSequence]:
        """The tokens of all sequences of examples, in order."""
        sequences = [sequence for example in examples for sequence in example.sequences]
        chats = [sequence for sequence in sequences if isinstance(sequence, Conversation)]
        texts = [sequence.text for sequence in sequences if isinstance(sequence, Document)]
        by_type: dict[type[ExampleSequence], Iterator[TokenSequence]] = {}
        if chats:
            assert self._chats is not None
            by_type[Conversation] = iter(self._chats.sequences(chats))
        if texts:
            assert self._texts is not None
            by_type[Document] = map(self._renderer.document, self._texts.ids(texts))
        size = self._num_embeddings or len(self._renderer.tokenizer)
        return [
            self._schema.sequence(sequence, vocab_size=size)
            if isinstance(sequence, Tokens)
            else next(by_type[type(sequence)])
            for sequence in sequences
        ]
