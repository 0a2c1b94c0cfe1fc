"""Examples of more than ``data.seq_len`` tokens: cut, dropped or refused, each counted by reason.

The sequences of an example are cut together. What may go of a sequence is said by its example
(``Example.cut``): its end, its start, its prompt, or nothing. A start or an end is cut here, token
by token. The prompt that the conversations of an example share is cut as text, before they are
tokenized (``PromptCutter``): what the chat template writes stays, and the prompt stays shared.

Tried by ``python -m pytest tests/unit/test_data_examples.py``.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from llmx.config import DataConfig
from llmx.data.examples import Example, ExampleSequence
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document
from llmx.data.tokenize.conversations import Renderer, TokenSequence
from llmx.data.tokenize.documents import TokenBlock
from llmx.errors import ConfigError, DataError

LENGTH_STEP = 64
"""Lengths of too long examples are counted in steps of so many tokens."""
TOO_LONG = "too long"
NO_TARGET_LEFT = "without an answer in the first seq_len tokens"
ANSWER_TOO_LONG = "answer longer than seq_len"
COMPLETIONS_TOO_LONG = "completions longer than seq_len"
NEVER_CUT = "longer than seq_len, and not to be cut"
"""Reasons for which examples are dropped."""
LENGTH_REASONS = (
    TOO_LONG, NO_TARGET_LEFT, ANSWER_TOO_LONG, COMPLETIONS_TOO_LONG, NEVER_CUT,
)  # fmt: skip


@dataclass
class Fates:
    """What became of rows, by the names of ``meta.json``."""

    rows_read: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    """Tokens that were cut off from examples in the store."""
    split_sequences: int = 0
    """Further sequences of split documents."""
    unanswered_turns: int = 0
    """Turns after the last answer, which were left out of used rows."""
    overflow: Counter[int] = field(default_factory=Counter)
    """Length, rounded up to ``LENGTH_STEP`` -> examples of more than ``data.seq_len`` tokens."""
    notes: Counter[str] = field(default_factory=Counter)
    """What renderings are not as they were in the row."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> examples that are not used."""

    def add(self, other: Fates) -> None:
        """Count the rows of ``other``, too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def cut(self, num_tokens: int) -> None:
        """Count an example that lost so many tokens."""
        self.truncated += 1
        self.truncated_tokens += num_tokens

    def overflows(self, length: int) -> None:
        """Count an example that is too long."""
        self.overflow[-(-length // LENGTH_STEP) * LENGTH_STEP] += 1


class Truncation:
    """Applies ``data.over_long`` block by block; ``fates`` counts what was cut and dropped."""

    def __init__(
        self,
        data: DataConfig,
        fates: Fates,
        *,
        bos: Sequence[int] = (),
        eos: Sequence[int] = (),
        splits: bool = False,
        wraps: bool = False,
    ) -> None:
        """``eos``: the tokens that end every document and are kept where its end is cut.
        ``splits``: documents become several sequences; ``wraps``: each of these begins with
        ``bos`` and ends with ``eos``."""
        self._data = data
        self._fates = fates
        self._eos = list(eos)
        self._splits = splits
        self._wrap = (list(bos), self._eos) if wraps else ([], [])
        self._capacity = data.seq_len - sum(map(len, self._wrap))
        if splits and self._capacity < 1:
            raise ConfigError(
                f"data.seq_len={data.seq_len}: a sequence has no room for text between its special "
                "tokens. Set e.g. data.seq_len=512."
            )

    def __call__(self, examples: list[Example], block: TokenBlock) -> TokenBlock:
        """The tokens of the examples that fit, as they are or cut."""
        if not examples:
            return block
        if self._data.packing == "concat":
            if block.sizes is not None and int(block.sizes.max()) > 1:
                raise ConfigError(
                    "data.packing=concat cuts sequences at seq_len, and this task's examples are "
                    f"several sequences that belong together (up to {int(block.sizes.max())}). Use "
                    "data.packing=best_fit."
                )
            return block
        if self._splits and all(map(_is_uncut_document, examples)):
            return self._split(block)
        sizes = np.ones(len(examples), np.int64) if block.sizes is None else block.sizes
        keep = np.ones(len(block.tokens), np.bool_)
        used = np.ones(len(examples), np.bool_)
        edges = np.concatenate([[0], np.cumsum(block.lengths)]).tolist()
        spans = iter(pairwise(edges))
        for number, example in enumerate(examples):
            own = [next(spans) for _ in example.sequences]
            cut: list[slice] | None = []
            if own[-1][1] - own[0][0] > self._data.seq_len:
                cut = self._cut(example, block, own)
            for part in cut or ():
                keep[part] = False
            if cut is not None and not _all_answered(example, block.targets, keep, own):
                self._fates.dropped[NO_TARGET_LEFT] += 1
                cut = None
            if cut is None:
                used[number] = False
                keep[own[0][0] : own[-1][1]] = False
            elif cut:
                self._fates.cut(sum(part.stop - part.start for part in cut))
        return block if keep.all() else _selected(block, keep, used, sizes)

    def _cut(
        self, example: Example, block: TokenBlock, spans: list[tuple[int, int]]
    ) -> list[slice] | None:
        """The tokens that an example which is too long loses; None where it is dropped."""
        limit, over_long = self._data.seq_len, self._data.over_long
        total = spans[-1][1] - spans[0][0]
        self._fates.overflows(total)
        if over_long == "error":
            in_sequences = f" in {len(spans)} sequences" if len(spans) > 1 else ""
            raise DataError(
                f"{example.place}: {total} tokens{in_sequences}, data.seq_len is {limit}. Raise "
                "data.seq_len, or set data.over_long to truncate or drop."
            )
        if over_long == "drop":
            self._fates.dropped[TOO_LONG] += 1
            return None
        # Cut from the longest of those that may be cut.
        places = list(zip(spans, example.cuts, strict=True))
        lengths = [stop - start if cut in ("end", "start") else 0 for (start, stop), cut in places]
        losses = _level_cuts(lengths, total - limit)
        if sum(losses) < total - limit:
            self._fates.dropped[NEVER_CUT] += 1
            return None
        parts: list[slice] = []
        for ((start, stop), cut), lost in zip(places, losses, strict=True):
            if cut == "start":
                parts.append(slice(start, start + lost))
            elif lost:
                stop -= self._kept_end(block, start, stop, lost)
                parts.append(slice(stop - lost, stop))
        return parts

    def _kept_end(self, block: TokenBlock, start: int, stop: int, lost: int) -> int:
        """Tokens at the end of a sequence that stay where ``lost`` of those before them go."""
        count = len(self._eos)
        ends = count > 0 and block.tokens[stop - count : stop].tolist() == self._eos
        return count if ends and stop - start >= lost + count else 0

    def _split(self, block: TokenBlock) -> TokenBlock:
        """Documents as runs of at most ``seq_len`` tokens, one after the other."""
        if int(block.lengths.max()) <= self._data.seq_len:
            return block
        bos, eos = (np.array(tokens, np.uint32) for tokens in self._wrap)
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for document in np.split(block.tokens, np.cumsum(block.lengths)[:-1]):
            body = document[len(bos) : len(document) - len(eos)]
            start = 0
            while True:
                stop = min(start + self._capacity, len(body))
                # No run of a single token, from which nothing can be learned.
                stop -= len(body) - stop == 1 and not len(bos) + len(eos)
                parts += [bos, body[start:stop], eos]
                lengths.append(len(bos) + stop - start + len(eos))
                self._fates.split_sequences += start > 0
                if stop == len(body):
                    break
                start = stop
        tokens = np.concatenate(parts)
        return TokenBlock(tokens, np.ones(len(tokens), np.bool_), np.array(lengths))


def _is_uncut_document(example: Example) -> bool:
    """Whether it is one document, of which the task has not said what may be cut."""
    return (
        len(example.sequences) == 1
        and isinstance(example.sequences[0], Document)
        and example.cut == "auto"
    )


def _all_answered(
    example: Example, targets: np.ndarray, keep: np.ndarray, spans: list[tuple[int, int]]
) -> bool:
    """Whether each conversation has a target among the tokens that it keeps, but for the first."""
    return all(
        (targets[start:stop][keep[start:stop]][1:] != 0).any()
        for sequence, (start, stop) in zip(example.sequences, spans, strict=True)
        if isinstance(sequence, Conversation)
    )


def _level_cuts(lengths: list[int], over: int) -> list[int]:
    """Cuts that shorten the longest to the length of the next, until ``over`` is lost; one token of
    each stays."""
    low, high = 1, max(lengths)  # the length that none is longer than
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(0, length - middle) for length in lengths) >= over:
            low = middle
        else:
            high = middle - 1
    return [max(0, length - low) for length in lengths]


def _selected(
    block: TokenBlock, keep: np.ndarray, keep_examples: np.ndarray, sizes: np.ndarray
) -> TokenBlock:
    """The block without the tokens that are cut and the examples that are dropped."""
    of_sequences = np.repeat(keep_examples, sizes)
    edges = np.cumsum(block.lengths)
    sums = np.concatenate([[0], np.cumsum(keep, dtype=np.int64)])
    lengths = (sums[edges] - sums[edges - block.lengths])[of_sequences]
    by_number = {"token": keep, "sequence": of_sequences, "example": keep_examples}
    return TokenBlock(
        block.tokens[keep],
        block.targets[keep],
        lengths,
        None if block.sizes is None else sizes[keep_examples],
        {column: values[by_number[column.per]] for column, values in block.columns.items()},
    )


# Prompts as text

_JOINS = "\u200d\ufe0e\ufe0f"
"""Zero-width joiner and variation selectors: they belong to the character before them."""


class PromptCutter:
    """Cuts prompts until the conversations of an example, which share their prompt, have together
    at most ``limit`` tokens. Threads may share it.

    The oldest turns go first, then the text before the answer, from the side that
    ``data.truncate_prompt`` says. What the chat template writes stays, and the text is cut between
    characters, never between the bytes of one.
    """

    def __init__(self, renderer: Renderer, *, limit: int, side: str) -> None:
        """``side``: ``left`` cuts the beginning of the text off, ``right`` its end."""
        self._renderer = renderer
        self._limit = limit
        self._from_left = side == "left"

    def shortened(
        self, *conversations: Conversation
    ) -> tuple[tuple[Conversation, ...], list[TokenSequence]] | None:
        """The conversations with a prompt that fits, as they are where it does, and the tokens of
        each; None where the answers alone are too long."""
        rows = self._renderer.conversations([*conversations])
        first = int(conversations[0].messages[0].role == "system")
        while (over := sum(len(row.tokens) for row in rows) - self._limit) > 0:
            *before, question = conversations[0].messages[:-1]
            messages = [*before, question]
            turns = [at for at, message in enumerate(messages) if message.role == "user"]
            if later := [at for at in turns if at > first]:
                before = before[:first] + before[later[0] :]
            elif question.content:
                # Each of the sequences loses what is cut.
                question = replace(
                    question, content=self._cut(question.content, -(-over // len(conversations)))
                )
            else:
                return None
            conversations = tuple(
                replace(chat, messages=(*before, question, chat.messages[-1]))
                for chat in conversations
            )
            rows = self._renderer.conversations([*conversations])
        return conversations, rows

    def _cut(self, text: str, over: int) -> str:
        """The text without at least one character, and without about ``over`` tokens."""
        encoding = self._renderer.plain_backend.encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        if over >= len(offsets):
            return ""
        if self._from_left:
            at = max(1, *(stop for _, stop in offsets[:over]))
            while at < len(text) and _continues(text[at]):
                at += 1
            return text[at:]
        at = min(len(text) - 1, *(start for start, _ in offsets[len(offsets) - over :]))
        while at > 0 and _continues(text[at]):
            at -= 1
        return text[:at]


def sharing_their_prompt(sequences: Sequence[ExampleSequence]) -> list[Conversation]:
    """The sequences, if they are conversations that are the same but for the last answer."""
    chats = [sequence for sequence in sequences if isinstance(sequence, Conversation)]
    if len(chats) < len(sequences) or len(chats[0].messages) < 2:
        return []
    prompts = [(chat.messages[:-1], chat.tools) for chat in chats]
    return chats if prompts.count(prompts[0]) == len(prompts) else []


def _continues(character: str) -> bool:
    """Whether a character is written together with the one before it."""
    return character in _JOINS or unicodedata.combining(character) != 0
