"""Rows of a source to blocks of tokens: what a task makes of them, tokenized in batches.

    encoder = ExampleEncoder(split, renderer, encoding, workers=2)
    for batch, block in encoder.blocks(split.rows()): ...

A row becomes an example (``Encoding.encode``), the sequences of many examples are tokenized
together, documents by their encoder and conversations by the template, and are put back together
as examples.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from llmx.data.examples import (
    Encoding,
    Example,
    ExampleSequence,
    Schema,
    Tokens,
    encoded,
)
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document, RecordError, Row
from llmx.data.split import DatasetSplit
from llmx.data.tokenize.conversations import ConversationEncoder, Renderer, TokenSequence
from llmx.data.tokenize.documents import DocumentEncoder, TokenBlock
from llmx.data.tokenize.tokenizer import without_row
from llmx.data.tokenize.truncation import (
    ANSWER_TOO_LONG,
    COMPLETIONS_TOO_LONG,
    Fates,
    PromptCutter,
    sharing_their_prompt,
)
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
    """Its examples; once they are tokenized, those that are used."""
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
        self._data = split.data
        self._renderer = renderer
        self._encoding = encoding
        self._schema = Schema(encoding.columns, encoding.name)
        self._num_embeddings = encoding.num_embeddings
        self._workers, self._proves = workers, proves
        self._documents: DocumentEncoder | None = None
        self._chats: ConversationEncoder | None = None

    @property
    def description(self) -> str:
        """The encoder of the rows and the proof of its ids, for the summary."""
        used = [encoder for encoder in (self._documents, self._chats) if encoder is not None]
        return "; ".join(encoder.description for encoder in used) or "tokenizers"

    def blocks(self, rows: Iterable[Row | None]) -> Iterator[tuple[Batch, TokenBlock]]:
        """Batches with the tokens of their examples, in order; a few batches ahead of the consumer.

        Raises DataError for a row that the task or the template refuses, unless it is skipped.
        """
        waiting: deque[tuple[Batch, Future[TokenBlock]]] = deque()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="encode") as pool:
            try:
                for batch in self._batches(rows):
                    self._choose(batch)
                    waiting.append((batch, pool.submit(self._encode, batch)))
                    if len(waiting) > 2 * self._workers:
                        first, block = waiting.popleft()
                        yield first, block.result()
                while waiting:
                    first, block = waiting.popleft()
                    yield first, block.result()
            finally:
                for _, block in waiting:
                    block.cancel()

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
            if self._data.on_bad_row != "skip":
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
        sequences = _sequences(batch)
        chats = [sequence for sequence in sequences if isinstance(sequence, Conversation)]
        if chats and self._chats is None:
            self._chats = ConversationEncoder(self._renderer)
            if self._proves:
                # What the template refuses is said when its turn comes.
                with contextlib.suppress(DataError):
                    self._chats.choose(chats)
        texts = [sequence.text for sequence in sequences if isinstance(sequence, Document)]
        if texts and self._documents is None:
            renderer = self._renderer
            self._documents = DocumentEncoder(
                renderer.tokenizer, bos=renderer.bos, eos=renderer.eos
            )
            if self._proves:
                self._documents.choose(texts)

    # Examples to tokens, in several threads

    def _encode(self, batch: Batch) -> TokenBlock:
        """The tokens of the examples of a batch; those that are not used are taken out of it."""
        block: TokenBlock | None = None
        sequences: list[TokenSequence] = []
        parts = _sequences(batch)
        texts = [text for text in parts if isinstance(text, Document)]
        if texts and len(texts) == len(parts) == len(batch.examples):
            assert self._documents is not None
            block = self._documents.encode(texts)
        if block is None or not self._all_have_rows(block.tokens):
            pairs = zip(batch.examples, self._tokenized(batch.examples, batch), strict=True)
            used = [(example, tokens) for example, tokens in pairs if tokens is not None]
            batch.examples = [example for example, _ in used]
            sequences = [sequence for _, tokens in used for sequence in tokens]
            block = TokenBlock(
                np.concatenate([np.zeros(0, np.uint32), *(s.tokens for s in sequences)]),
                np.concatenate([np.zeros(0, np.bool_), *(s.targets for s in sequences)]),
                np.array([len(sequence.tokens) for sequence in sequences], np.int64),
            )
            if len(sequences) != len(used):
                block = replace(block, sizes=np.array([len(tokens) for _, tokens in used]))
            batch.fates.unanswered_turns = sum(
                chat.unanswered for chat in _sequences(batch) if isinstance(chat, Conversation)
            )
            for sequence in sequences:
                batch.fates.notes.update(sequence.notes)
        if not self._schema.columns:
            return block
        by_token = [sequence.columns for sequence in sequences] or [{}] * len(block.lengths)
        columns = self._schema.values(batch.examples, block.lengths, by_token)
        targets = block.targets.astype(np.float32) if self._schema.weighted else block.targets
        return replace(block, targets=targets, columns=columns)

    def _tokenized(self, examples: list[Example], batch: Batch) -> list[list[TokenSequence] | None]:
        """The sequences of each example; None for one that is counted as dropped, or that the
        template refuses and ``data.on_bad_row`` skips."""
        try:
            return self._fitted(examples, batch)
        except DataError as error:
            if self._data.on_bad_row != "skip":
                raise
            if len(examples) == 1:
                if not isinstance(error, RecordError):
                    where, reason = examples[0].place, "the template refuses it"
                    error = RecordError(str(error), where=where, reason=reason)
                batch.rejected.append(error)
                return [None]
        middle = len(examples) // 2
        return [
            *self._tokenized(examples[:middle], batch),
            *self._tokenized(examples[middle:], batch),
        ]

    def _fitted(self, examples: list[Example], batch: Batch) -> list[list[TokenSequence] | None]:
        """The sequences of examples; where an example is too long and its completions must not be
        cut, with a shorter prompt."""
        data = self._data
        sequences = self._tokens([s for example in examples for s in example.sequences])
        tokens = iter(sequences)
        fitted: list[list[TokenSequence] | None] = []
        for example in examples:
            fitted.append([next(tokens) for _ in example.sequences])
        if not all(self._all_have_rows(sequence.tokens) for sequence in sequences):
            for example, parts in zip(examples, fitted, strict=True):
                for part in parts or ():
                    self._check_rows(part.tokens, example)
        if data.over_long in ("drop", "error") or data.packing == "concat":
            return fitted
        fates = Fates()
        for number, example in enumerate(examples):
            length = sum(len(sequence.tokens) for sequence in fitted[number] or ())
            if length <= data.seq_len or set(example.cuts) != {"prompt"}:
                continue
            chats = sharing_their_prompt(example.sequences)
            if not chats:
                continue
            fates.overflows(length)
            shortened = self._shortener.shortened(*chats)
            if shortened is None:
                is_one = len(example.sequences) == 1
                fates.dropped[ANSWER_TOO_LONG if is_one else COMPLETIONS_TOO_LONG] += 1
                fitted[number] = None
            else:
                fitted[number] = shortened[1]
                fates.cut(length - sum(len(tokens.tokens) for tokens in shortened[1]))
        batch.fates.add(fates)
        return fitted

    def _all_have_rows(self, tokens: np.ndarray) -> bool:
        """Whether the embedding of the model has a row for each of these tokens."""
        return self._num_embeddings is None or int(tokens.max(initial=0)) < self._num_embeddings

    def _check_rows(self, tokens: np.ndarray, example: Example) -> None:
        """Raise RecordError for a token that the embedding of the model has no row for."""
        problem = without_row(self._renderer.tokenizer, tokens, self._num_embeddings or 0)
        if not problem:
            return
        raise RecordError(
            f"{example.place}: it {problem} Remove it from the row (data.on_bad_row=skip leaves "
            "such rows out), or set model.tokenizer to a tokenizer of this model without it.",
            where=example.place,
            reason=WITHOUT_ROW,
        )

    def _tokens(self, sequences: list[ExampleSequence]) -> list[TokenSequence]:
        """The tokens of sequences of any kind, in order."""
        chats = [sequence for sequence in sequences if isinstance(sequence, Conversation)]
        texts = [sequence for sequence in sequences if isinstance(sequence, Document)]
        by_type: dict[type, Iterator[TokenSequence]] = {}
        if chats:
            assert self._chats is not None
            by_type[Conversation] = iter(self._chats.sequences(chats))
        if texts:
            assert self._documents is not None
            block = self._documents.encode(texts)
            edges = np.cumsum(block.lengths)[:-1]
            cut = (np.split(block.tokens, edges), np.split(block.targets, edges))
            by_type[Document] = map(TokenSequence, *cut)
        size = self._num_embeddings or len(self._renderer.tokenizer)
        return [
            TokenSequence(*self._schema.arrays(sequence, vocab_size=size))
            if isinstance(sequence, Tokens)
            else next(by_type[type(sequence)])
            for sequence in sequences
        ]

    @cached_property
    def _shortener(self) -> PromptCutter:
        data = self._data
        return PromptCutter(self._renderer, limit=data.seq_len, side=data.truncate_prompt)


def _sequences(batch: Batch) -> list[ExampleSequence]:
    return [sequence for example in batch.examples for sequence in example.sequences]
