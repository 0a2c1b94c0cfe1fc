"""Rows of a source to blocks of tokens: what a task makes of them, tokenized in batches.

    encoder = ExampleEncoder(source, renderer, encoding, workers=2)
    for encoded in encoder.blocks(source.records()): ...

A row becomes an example (``Encoding.encode``), the sequences of many examples are tokenized
together, documents by their encoder and conversations by the template, and are put back together
as examples.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any

import numpy as np

from llmx.data.examples import (
    Column,
    Encoding,
    Example,
    Schema,
    Tokens,
    checked,
    encoded,
    values_of,
    values_of_tokens,
)
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document, RecordError, RejectedRecords, Row
from llmx.data.split import DatasetSplit
from llmx.data.tokenize.conversations import ConversationEncoder, Renderer, TokenSequence
from llmx.data.tokenize.documents import Batch, DocumentEncoder, TokenBlock
from llmx.data.tokenize.truncation import (
    CUT_OFF,
    TRUNCATED,
    PromptCutter,
    overflow_key,
    sharing_their_prompt,
    too_long_to_cut,
)
from llmx.errors import ConfigError, DataError

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
"""Rows, and bytes of text, that are tokenized at once."""
WITHOUT_ANSWER = "without an answer"
LEFT_OUT = "left out by the task"
"""Reasons for which rows are dropped."""
UNANSWERED = "turns after the last answer"
"""Of rows that are used: so many turns were left out."""
FAST_FROM_BYTES = 2 << 20
"""With less text, a faster encoder is not worth its proof."""


@dataclass(frozen=True)
class Tokenized:
    """The sequences of each example, None in the place of those that are not used, and how many
    were cut or dropped."""

    examples: list[list[TokenSequence] | None]
    counts: Counter[str]


@dataclass(frozen=True)
class Encoded:
    """Examples with their tokens."""

    examples: list[Example]
    block: TokenBlock
    """Of these examples, in their order."""
    counts: Counter[str]
    """``rows`` that were read for it, and what became of those that are not as they were."""
    size: int
    """Bytes of the text that was read, as UTF-8."""


class ExampleEncoder:
    """Encodes the rows of one source; which encoder is decided once, on the first texts."""

    def __init__(
        self,
        split: DatasetSplit,
        renderer: Renderer,
        encoding: Encoding,
        *,
        workers: int,
        refused: RejectedRecords | None = None,
    ) -> None:
        self.refused = refused or RejectedRecords()
        """Rows that the task or the template refused (``data.on_bad_row=skip``)."""
        self._split = split
        self._renderer = renderer
        self._encoding = encoding
        self._schema = Schema(encoding.columns)
        self._workers = workers
        self._documents: DocumentEncoder | None = None
        self._chats: ConversationEncoder | None = None

    @property
    def description(self) -> str:
        """By what the rows were encoded, and on what proof; for the summary."""
        used = [encoder for encoder in (self._documents, self._chats) if encoder is not None]
        return "; ".join(encoder.description for encoder in used) or "tokenizers"

    def blocks(self, records: Iterable[Row | None]) -> Iterator[Encoded]:
        """Examples with their tokens, in order. Those that a template refuses are rejected."""
        for is_text, batches in groupby(self._batches(records), key=_holds_documents):
            if is_text:
                yield from self._encoded(batches)
            else:
                yield from self._rendered(batches)

    # Rows to examples

    def _batches(self, records: Iterable[Row | None]) -> Iterator[Batch]:
        """Examples in batches of a bounded number and size, of documents alone or of others."""
        batch, read, size = Batch([], 0, 0), 0, 0
        holds_text = False
        for record in records:
            # Noted with the batch: what is read ahead is not yet done.
            example = self._example(record, batch.left_out, batch.rejected)
            if example is not None and _is_text(example) != holds_text:
                if batch.examples:
                    yield replace(batch, read=read, size=size)
                    batch, read, size = Batch([], 0, 0), 0, 0
                holds_text = not holds_text
            read += 1
            if record is not None and example is not None:
                batch.examples.append(example)
                batch.sequences.extend(example.sequences)
                size += record.num_bytes
            if read >= BATCH_ROWS or size >= BATCH_BYTES:
                yield replace(batch, read=read, size=size)
                batch, read, size = Batch([], 0, 0), 0, 0
        if read:
            yield replace(batch, read=read, size=size)

    def _example(
        self, record: Row | None, left_out: Counter[str], rejected: list[RecordError]
    ) -> Example | None:
        """What the task makes of a row; None is counted, or noted as rejected."""
        if record is None:
            left_out[WITHOUT_ANSWER] += 1
            return None
        try:
            example = encoded(self._encoding, record)
        except RecordError as error:
            if self._split.data.on_bad_row != "skip":
                raise
            rejected.append(error)
            return None
        if example is None:
            left_out[LEFT_OUT] += 1
            return None
        if type(example) is not Example or not self._is_plain(example):
            example = checked(example, self._schema, task=self._encoding.name)
            if isinstance(example.sequences[0], Tokens):
                example = replace(example, where=record.where)
        return example

    def _is_plain(self, example: Example) -> bool:
        """Whether it is a conversation or a document without columns, as of most tasks: there is
        nothing to check."""
        return (
            len(example.sequences) == 1
            and type(example.sequences[0]) in (Conversation, Document)
            and not (example.columns or self._schema.columns)
            and example.cut == "auto"
        )

    # Examples to tokens

    def _encoded(self, batches: Iterator[Batch]) -> Iterator[Encoded]:
        """Examples of one document each."""
        if self._documents is None:
            batches = self._with_documents(batches)
        assert self._documents is not None
        for batch, block in self._documents.blocks(batches):
            if self._schema.columns:
                columns = self._columns(batch.examples, None, len(block.tokens))
                if self._schema.weighted:
                    block = replace(block, targets=block.targets.astype(np.float32))
                block = replace(block, columns=columns)
            yield Encoded(batch.examples, block, self._counts(batch), batch.size)

    def _rendered(self, batches: Iterator[Batch]) -> Iterator[Encoded]:
        """Examples of conversations, of tokens, or of several sequences."""
        batches = self._with_encoders(batches)
        waiting: deque[tuple[Batch, Future[Tokenized]]] = deque()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="render") as pool:
            try:
                for batch in batches:
                    waiting.append((batch, pool.submit(self._tokenized, batch.examples)))
                    if len(waiting) > 2 * self._workers:
                        yield self._taken(*waiting.popleft())
                while waiting:
                    yield self._taken(*waiting.popleft())
            finally:
                for _, sequences in waiting:
                    sequences.cancel()

    def _with_documents(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, after the encoder was chosen on the first of them. A little text is
        sooner tokenized than a faster way is proven."""
        renderer = self._renderer
        documents = DocumentEncoder(
            renderer.tokenizer, bos=renderer.bos, eos=renderer.eos, workers=self._workers
        )
        head, batches = _head(batches, FAST_FROM_BYTES)
        if sum(batch.size for batch in head) >= FAST_FROM_BYTES:
            documents.choose(text.text for text in _of_type(head, Document))
        self._documents = documents
        return batches

    def _with_encoders(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, with an encoder for each kind of sequence that is in them."""
        while (batch := next(batches, None)) is not None:
            if self._chats is None and any(isinstance(s, Conversation) for s in batch.sequences):
                self._chats = chats = ConversationEncoder(self._renderer, workers=self._workers)
                head, batches = _head(chain([batch], batches), FAST_FROM_BYTES)
                if sum(head_batch.size for head_batch in head) >= FAST_FROM_BYTES:
                    # What the template refuses is said when its turn comes.
                    with contextlib.suppress(DataError):
                        chats.choose(list(_of_type(head, Conversation)))
                batch = next(batches)
            if self._documents is None and any(isinstance(s, Document) for s in batch.sequences):
                batches = self._with_documents(chain([batch], batches))
                batch = next(batches)
            yield batch

    def _tokenized(self, examples: list[Example]) -> Tokenized:
        """The sequences of examples; where an example is too long and its completions must not be
        cut, with a shorter prompt. For several threads."""
        data = self._split.data
        parts = [sequence for example in examples for sequence in example.sequences]
        sequences = iter(self._sequences_of(parts))
        sequences_by_example = [
            [next(sequences) for _ in example.sequences] for example in examples
        ]
        counts = Counter[str]()
        if data.over_long in ("drop", "error") or data.packing == "concat":
            return Tokenized([*sequences_by_example], counts)
        fitted: list[list[TokenSequence] | None] = []
        for example, example_sequences in zip(examples, sequences_by_example, strict=True):
            over = sum(len(sequence.tokens) for sequence in example_sequences) - data.seq_len
            if over <= 0 or set(example.cuts) != {"prompt"}:
                fitted.append(example_sequences)
                continue
            chats = sharing_their_prompt(example.sequences)
            if not chats:
                fitted.append(example_sequences)  # cut by token
                continue
            counts[overflow_key(data.seq_len + over)] += 1
            short = self._shortener.shortened(*chats)
            if short is None:
                counts[too_long_to_cut(example)] += 1
            else:
                short = [self._weighted(sequence) for sequence in short]
                counts[TRUNCATED] += 1
                counts[CUT_OFF] += (
                    data.seq_len + over - sum(len(sequence.tokens) for sequence in short)
                )
            fitted.append(short)
        return Tokenized(fitted, counts)

    def _sequences_of(self, parts: list[Any]) -> list[TokenSequence]:
        """The tokens of sequences of any kind, in order."""
        chats = [part for part in parts if isinstance(part, Conversation)]
        texts = [part for part in parts if isinstance(part, Document)]
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
        return [
            self._ready(part)
            if isinstance(part, Tokens)
            else self._weighted(next(by_type[type(part)]))
            for part in parts
        ]

    def _weighted(self, sequence: TokenSequence) -> TokenSequence:
        """Weights in the place of targets, and zeros in the task's columns by token, where there
        are such: only a task that gives tokens knows their values."""
        schema = self._schema
        if not schema.columns:
            return sequence
        targets = sequence.targets.astype(np.float32) if schema.weighted else sequence.targets
        columns = {
            column: np.zeros((len(sequence.tokens), *column.shape), column.numpy_dtype)
            for column in schema.per("token")
        }
        return TokenSequence(sequence.tokens, targets, columns)

    def _ready(self, part: Tokens) -> TokenSequence:
        """Tokens that a task gave."""
        return TokenSequence(
            *values_of_tokens(
                part,
                self._schema,
                task=self._encoding.name,
                vocab_size=len(self._renderer.tokenizer),
            )
        )

    @cached_property
    def _shortener(self) -> PromptCutter:
        data = self._split.data
        return PromptCutter(self._renderer, limit=data.seq_len, side=data.truncate_prompt)

    # Tokens to blocks

    def _counts(self, batch: Batch) -> Counter[str]:
        for error in batch.rejected:
            self.refused.add(error)
        return Counter({"rows": batch.read, **batch.left_out})

    def _taken(self, batch: Batch, future: Future[Tokenized]) -> Encoded:
        """A batch's examples; where the template refuses one, they are taken one by one."""
        counts = self._counts(batch)
        try:
            tokenized = future.result()
        except DataError:
            tokenized = self._accepted(batch.examples)
        pairs = zip(batch.examples, tokenized.examples, strict=True)
        used = [(example, sequences) for example, sequences in pairs if sequences is not None]
        examples = [example for example, _ in used]
        counts.update(tokenized.counts)
        chats = (s for e in examples for s in e.sequences if isinstance(s, Conversation))
        counts[UNANSWERED] = sum(chat.unanswered for chat in chats)
        return Encoded(
            examples,
            self._block(examples, [sequences for _, sequences in used]),
            counts,
            batch.size,
        )

    def _block(
        self, examples: list[Example], sequences_by_example: list[list[TokenSequence]]
    ) -> TokenBlock:
        sequences = [
            sequence for example_sequences in sequences_by_example for sequence in example_sequences
        ]
        sizes = np.array(
            [len(example_sequences) for example_sequences in sequences_by_example], np.int64
        )
        group_sizes = sizes if len(sequences) != len(sequences_by_example) else None
        block = joined(sequences, np.float32 if self._schema.weighted else np.bool_)
        columns = self._columns(examples, sequences, len(block.tokens))
        return replace(block, sizes=group_sizes, columns=columns)

    def _columns(
        self, examples: list[Example], sequences: list[TokenSequence] | None, tokens: int
    ) -> Mapping[Column, np.ndarray]:
        """The task's columns of a block."""
        schema, task = self._schema, self._encoding.name
        if not schema.columns:
            return {}
        arrays: dict[Column, np.ndarray] = {}
        for column in schema.per("token"):
            values = [sequence.columns[column] for sequence in sequences or ()]
            empty = np.zeros(
                (0 if sequences is not None else tokens, *column.shape), column.numpy_dtype
            )
            arrays[column] = np.concatenate([empty, *values])
        for column in schema.per("sequence"):
            column_values: list[Any] = []
            for example in examples:
                example_values, count = example.columns[column.name], len(example.sequences)
                if not hasattr(example_values, "__len__") or len(example_values) != count:
                    raise ConfigError(
                        f"task={task}: the column {column.name} has a value for each sequence of "
                        f"an example, here {count}; encode() gave {example_values!r}."
                    )
                column_values.extend(example_values)
            arrays[column] = values_of(column_values, column, count=len(column_values), task=task)
        for column in schema.per("example"):
            column_values = [example.columns[column.name] for example in examples]
            arrays[column] = values_of(column_values, column, count=len(column_values), task=task)
        return arrays

    def _accepted(self, examples: list[Example]) -> Tokenized:
        """The tokens of examples. One that the template refuses is rejected
        (``data.on_bad_row=skip``) and has None in its place."""
        try:
            return self._tokenized(examples)
        except DataError as error:
            if self._split.data.on_bad_row != "skip":
                raise
            if len(examples) == 1:
                if not isinstance(error, RecordError):
                    where, reason = examples[0].place, "the template refuses it"
                    error = RecordError(str(error), where=where, reason=reason)
                self.refused.add(error)
                return Tokenized([None], Counter())
        middle = len(examples) // 2
        first, second = self._accepted(examples[:middle]), self._accepted(examples[middle:])
        return Tokenized([*first.examples, *second.examples], first.counts + second.counts)


def joined(sequences: list[TokenSequence], targets: Any = np.bool_) -> TokenBlock:
    """Sequences one after the other."""
    return TokenBlock(
        np.concatenate([np.zeros(0, np.uint32), *(sequence.tokens for sequence in sequences)]),
        np.concatenate([np.zeros(0, targets), *(sequence.targets for sequence in sequences)]),
        np.array([len(sequence.tokens) for sequence in sequences], np.int64),
    )


def _is_text(example: Example) -> bool:
    return len(example.sequences) == 1 and isinstance(example.sequences[0], Document)


def _holds_documents(batch: Batch) -> bool:
    return bool(batch.examples) and _is_text(batch.examples[0])


def _of_type(batches: list[Batch], kind: type) -> Iterator[Any]:
    return (part for batch in batches for part in batch.sequences if isinstance(part, kind))


def _head(batches: Iterator[Batch], size: int) -> tuple[list[Batch], Iterator[Batch]]:
    """The first batches up to this size of text, and all batches."""
    head: list[Batch] = []
    while sum(batch.size for batch in head) < size:
        batch = next(batches, None)
        if batch is None:
            break
        head.append(batch)
    return head, chain(head, batches)
