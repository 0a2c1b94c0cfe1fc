"""Examples of more than ``data.seq_len`` tokens: cut, split, dropped or refused, each counted.

The sequences of an example are cut together. What may go of a sequence is told by its example
(``Example.cut``): its end, its start, its prompt, or nothing. A start or an end is cut token by
token. The prompt that the conversations of an example share is cut as text and rendered again
(``shorter_prompts``): what the chat template writes stays, and the prompt stays shared.

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
from llmx.data.examples import Example, ExampleSequence, TokenSequence
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document
from llmx.data.tokenize.conversations import Renderer
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
    """Applies ``data.over_long`` to one example after the other."""

    def __init__(self, data: DataConfig, renderer: Renderer, *, splits: bool) -> None:
        """``splits``: documents become several sequences."""
        self._data = data
        self._splits = splits
        self._renderer = renderer
        begin, end = (renderer.bos, renderer.eos) if renderer.verbatim else ([], [])
        self._begin, self._end = np.array(begin, np.uint32), np.array(end, np.uint32)
        """The tokens that every piece of a document begins and ends with."""
        self._capacity = data.seq_len - len(begin) - len(end)
        if splits and self._capacity < 1:
            raise ConfigError(
                f"data.seq_len={data.seq_len}: a sequence has no room for text between its special "
                "tokens. Set e.g. data.seq_len=512."
            )

    def with_shorter_prompt(
        self, example: Example, sequences: list[TokenSequence], fates: Fates
    ) -> list[TokenSequence] | None:
        """The sequences of an example; where they are too long and of its prompt alone may go, with
        a shorter one. None if the answers alone are too long.

        Raises DataError where the template refuses the shorter conversation.
        """
        data, length = self._data, _length(sequences)
        if length <= data.seq_len or set(example.cuts) != {"prompt"}:
            return sequences
        if data.over_long in ("drop", "error") or data.packing == "concat":
            return sequences
        chats = _sharing_their_prompt(example.sequences)
        if not chats:
            return sequences
        fates.overflows(length)
        shortened = shorter_prompts(
            self._renderer, chats, limit=data.seq_len, side=data.truncate_prompt
        )
        if shortened is None:
            fates.dropped[ANSWER_TOO_LONG if len(chats) == 1 else COMPLETIONS_TOO_LONG] += 1
            return None
        fates.cut(length - _length(shortened[1]))
        return shortened[1]

    def fitted(
        self, example: Example, sequences: list[TokenSequence], fates: Fates
    ) -> list[list[TokenSequence]]:
        """What is stored of an example: its sequences, whole or cut; none where it is dropped; each
        piece of a single document for itself, unless the task has said what may be cut of it."""
        if self._data.packing == "concat":
            if len(sequences) > 1:
                raise ConfigError(
                    "data.packing=concat cuts sequences at seq_len, and this task's examples are "
                    f"several sequences that belong together (here {len(sequences)}). Use "
                    "data.packing=best_fit."
                )
            return [sequences]
        length = _length(sequences)
        is_document = len(sequences) == 1 and isinstance(example.sequences[0], Document)
        if self._splits and is_document and example.cut == "auto" and length > self._data.seq_len:
            pieces = self._pieces(sequences[0])
            fates.split_sequences += len(pieces) - 1
            return [[piece] for piece in pieces]
        kept: list[TokenSequence] | None = sequences
        if length > self._data.seq_len:
            kept = self._cut(example, sequences, length, fates)
        if kept is None:
            return []
        for part, sequence in zip(example.sequences, kept, strict=True):
            # The first token is predicted from nothing.
            if isinstance(part, Conversation) and not sequence.targets[1:].any():
                fates.dropped[NO_TARGET_LEFT] += 1
                return []
        if kept is not sequences:
            fates.cut(length - _length(kept))
        return [kept]

    def _cut(
        self, example: Example, sequences: list[TokenSequence], length: int, fates: Fates
    ) -> list[TokenSequence] | None:
        """The sequences of a too long example, cut to ``data.seq_len``; None if it is dropped."""
        limit = self._data.seq_len
        fates.overflows(length)
        if self._data.over_long == "error":
            in_sequences = f" in {len(sequences)} sequences" if len(sequences) > 1 else ""
            raise DataError(
                f"{example.place}: {length} tokens{in_sequences}, data.seq_len is {limit}. Raise "
                "data.seq_len, or set data.over_long to truncate or drop."
            )
        if self._data.over_long == "drop":
            fates.dropped[TOO_LONG] += 1
            return None
        places = list(zip(sequences, example.cuts, strict=True))
        # The longest of those that may be cut lose first.
        sizes = [len(sequence.tokens) if cut in ("end", "start") else 0 for sequence, cut in places]
        losses = _level_cuts(sizes, length - limit)
        if sum(losses) < length - limit:
            fates.dropped[NEVER_CUT] += 1
            return None
        return [
            self._without(sequence, lost, cut)
            for (sequence, cut), lost in zip(places, losses, strict=True)
        ]

    def _without(self, sequence: TokenSequence, lost: int, cut: str) -> TokenSequence:
        """The sequence without ``lost`` tokens at its start or its end. The tokens that end every
        document stay at its end."""
        size, end = len(sequence.tokens), len(self._end)
        first = 0
        if cut != "start":
            ends = size >= lost + end and np.array_equal(sequence.tokens[size - end :], self._end)
            first = size - lost - (end if ends else 0)
        keep = np.ones(size, np.bool_)
        keep[first : first + lost] = False
        columns = {column: values[keep] for column, values in sequence.columns.items()}
        return TokenSequence(sequence.tokens[keep], sequence.targets[keep], columns)

    def _pieces(self, document: TokenSequence) -> list[TokenSequence]:
        """A document as runs of at most ``data.seq_len`` tokens, one after the other."""
        begin, end = self._begin, self._end
        body = document.tokens[len(begin) : len(document.tokens) - len(end)]
        starts = list(range(0, len(body), self._capacity))
        if starts[-1] == len(body) - 1 and not len(begin) + len(end):
            starts[-1] -= 1  # nothing can be learned from a single token
        runs = [
            np.concatenate([begin, body[start:stop], end])
            for start, stop in pairwise([*starts, len(body)])
        ]
        return [TokenSequence(run, np.ones(len(run), np.bool_)) for run in runs]


def _length(sequences: list[TokenSequence]) -> int:
    return sum(len(sequence.tokens) for sequence in sequences)


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


# Prompts as text

_JOINS = "\u200d\ufe0e\ufe0f"
"""Zero-width joiner and variation selectors: they belong to the character before them."""


def shorter_prompts(
    renderer: Renderer, conversations: Sequence[Conversation], *, limit: int, side: str
) -> tuple[list[Conversation], list[TokenSequence]] | None:
    """Conversations that share their prompt, with one by which they have together at most ``limit``
    tokens, and the tokens of each; None where the answers alone are too long.

    The oldest turns go first, then the text before the answer, from its ``left`` or its ``right``
    side. What the chat template writes stays, and the text is cut between characters, never between
    the bytes of one.
    """
    chats = list(conversations)
    rows = renderer.conversations(chats)
    first = int(chats[0].messages[0].role == "system")
    while (over := sum(len(row.tokens) for row in rows) - limit) > 0:
        *before, question = chats[0].messages[:-1]
        turns = [at for at, message in enumerate(chats[0].messages[:-1]) if message.role == "user"]
        if later := [at for at in turns if at > first]:
            before = before[:first] + before[later[0] :]
        elif question.content:
            # Each of the sequences loses what is cut.
            text = _cut_text(renderer, question.content, -(-over // len(chats)), side=side)
            question = replace(question, content=text)
        else:
            return None
        chats = [replace(chat, messages=(*before, question, chat.messages[-1])) for chat in chats]
        rows = renderer.conversations(chats)
    return chats, rows


def _cut_text(renderer: Renderer, text: str, over: int, *, side: str) -> str:
    """The text without at least one character, and without about ``over`` tokens."""
    offsets = renderer.plain_backend.encode(text, add_special_tokens=False).offsets
    if over >= len(offsets):
        return ""
    if side == "left":
        at = max(1, *(stop for _, stop in offsets[:over]))
        while at < len(text) and _continues(text[at]):
            at += 1
        return text[at:]
    at = min(len(text) - 1, *(start for start, _ in offsets[len(offsets) - over :]))
    while at > 0 and _continues(text[at]):
        at -= 1
    return text[:at]


def _sharing_their_prompt(sequences: Sequence[ExampleSequence]) -> list[Conversation]:
    """The sequences, if they are conversations that are the same but for the last answer."""
    chats = [sequence for sequence in sequences if isinstance(sequence, Conversation)]
    if len(chats) < len(sequences) or len(chats[0].messages) < 2:
        return []
    prompts = [(chat.messages[:-1], chat.tools) for chat in chats]
    return chats if prompts.count(prompts[0]) == len(prompts) else []


def _continues(character: str) -> bool:
    """Whether a character is written together with the one before it."""
    return character in _JOINS or unicodedata.combining(character) != 0
