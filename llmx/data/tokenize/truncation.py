"""Examples of more than ``data.seq_len`` tokens: cut, dropped or refused, each counted by reason.

The sequences of an example are cut together. What may go of a sequence is said by its example
(``Example.cut``): its end, its start, of its prompt (all before the first target; a completion
stays whole), or nothing. ``data.truncate_prompt`` says from which side a prompt is cut.

Prompts of conversations with the same turns before the answer are cut as text, before they are
tokenized (``PromptCutter``): what the chat template writes stays, and a prompt that is shared stays
shared. Everything else is cut here, token by token.

Tried by ``python -m pytest tests/unit/test_data_prompts.py tests/unit/test_data_examples.py``.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from llmx.config import DataConfig
from llmx.data.examples import Example, ExampleSequence
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document
from llmx.data.tokenize.conversations import Renderer, TokenSequence, own_backend
from llmx.data.tokenize.documents import TokenBlock
from llmx.errors import ConfigError, DataError

TRUNCATED = "truncated"
CUT_OFF = "tokens cut off"
"""Tokens that were cut off from examples in the store."""
SPLIT = "further sequences of split documents"
OVERFLOW = "tokens long: "
"""With a length, rounded up to ``LENGTH_STEP``: how many examples of more than ``data.seq_len``
tokens there are of it."""
LENGTH_STEP = 64
TOO_LONG = "too long"
NO_TARGET_LEFT = "without an answer in the first seq_len tokens"
ANSWER_TOO_LONG = "answer longer than seq_len"
COMPLETIONS_TOO_LONG = "completions longer than seq_len"
NEVER_CUT = "longer than seq_len, and not to be cut"
"""Reasons for which examples are dropped."""
LENGTH_REASONS = (
    TOO_LONG, NO_TARGET_LEFT, ANSWER_TOO_LONG, COMPLETIONS_TOO_LONG, NEVER_CUT,
)  # fmt: skip


def overflow_key(length: int) -> str:
    """The key under which an example of this length is counted."""
    return f"{OVERFLOW}{-(-length // LENGTH_STEP) * LENGTH_STEP}"


def too_long_to_cut(example: Example) -> str:
    """The reason for which an example is dropped that cannot be made to fit."""
    if "prompt" not in example.cuts:
        return NEVER_CUT
    return ANSWER_TOO_LONG if len(example.sequences) == 1 else COMPLETIONS_TOO_LONG


class Truncation:
    """Applies ``data.over_long`` block by block; ``counts`` gets what was cut and dropped."""

    def __init__(
        self,
        data: DataConfig,
        counts: Counter[str],
        *,
        bos: Sequence[int] = (),
        eos: Sequence[int] = (),
        splits: bool = False,
        wraps: bool = False,
    ) -> None:
        """``bos``: the tokens that begin every text, which a cut prompt keeps; ``eos``: those that
        end every document and are kept where its end is cut. ``splits``: documents become several
        sequences; ``wraps``: each of these begins with ``bos`` and ends with ``eos``."""
        self._data = data
        self._counts = counts
        self._bos, self._eos = list(bos), list(eos)
        self._splits = splits
        self._wrap = (self._bos, self._eos) if wraps else ([], [])
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
        counts, limit = self._counts, self._data.seq_len
        sizes = np.ones(len(examples), np.int64) if block.sizes is None else block.sizes
        totals = np.add.reduceat(block.lengths, np.cumsum(sizes) - sizes)
        if int(totals.max()) <= limit and not any(map(_is_chat, examples)):
            return block
        borders = np.concatenate([[0], np.cumsum(block.lengths)])
        sums = np.concatenate([[0], np.cumsum(block.targets != 0, dtype=np.int64)])
        # Of each sequence: whether it has a target behind its first token.
        has_targets = sums[borders[1:]] > sums[borders[:-1] + 1]
        keep = np.ones(len(block.tokens), np.bool_)
        keep_examples = np.ones(len(examples), np.bool_)
        first = 0
        for number, example in enumerate(examples):
            last = first + int(sizes[number])
            spans = list(pairwise(borders[first : last + 1].tolist()))
            cut = self._cut(example, block, keep, spans) if totals[number] > limit else 0
            if cut is None:
                keep_examples[number] = False
            elif _is_chat(example):
                remain = has_targets[first:last].tolist()
                if cut:
                    remain = [_has_target(block.targets, keep, *span) for span in spans]
                chats = (isinstance(part, Conversation) for part in example.sequences)
                if not all(good for good, chat in zip(remain, chats, strict=True) if chat):
                    counts[NO_TARGET_LEFT] += 1
                    keep_examples[number] = False
                    cut = 0
            if cut:
                counts[TRUNCATED] += 1
                counts[CUT_OFF] += cut
            if not keep_examples[number]:
                keep[borders[first] : borders[last]] = False
            first = last
        if keep_examples.all() and keep.all():
            return block
        return _selected(block, keep, keep_examples, sizes)

    def _cut(
        self,
        example: Example,
        block: TokenBlock,
        keep: np.ndarray,
        spans: list[tuple[int, int]],
    ) -> int | None:
        """Take tokens of an example that is too long out of ``keep``; returns how many, or None
        where it is dropped."""
        counts, limit = self._counts, self._data.seq_len
        total = spans[-1][1] - spans[0][0]
        counts[overflow_key(total)] += 1
        if self._data.over_long == "error":
            in_sequences = f" in {len(spans)} sequences" if len(spans) > 1 else ""
            raise DataError(
                f"{example.place}: {total} tokens{in_sequences}, data.seq_len is {limit}. Raise "
                "data.seq_len, or set data.over_long to truncate or drop."
            )
        if self._data.over_long == "drop":
            counts[TOO_LONG] += 1
            return None
        over = total - limit
        cuts = example.cuts
        prompts = [
            self._prompt(block, *span) if cut == "prompt" else (0, 0)
            for span, cut in zip(spans, cuts, strict=True)
        ]
        for (start, _), (low, room), lost in zip(
            spans, prompts, _equal_cuts([room for _, room in prompts], over), strict=True
        ):
            if self._data.truncate_prompt == "right":
                low += room - lost
            keep[start + low : start + low + lost] = False
            over -= lost
        # What is over now is taken from the longest of those that may be cut at an end.
        ends = [
            stop - start if cut in ("end", "start") else 0
            for (start, stop), cut in zip(spans, cuts, strict=True)
        ]
        for (start, stop), cut, lost in zip(spans, cuts, _level_cuts(ends, over), strict=True):
            if cut == "end":
                stop -= self._kept_end(block, start, stop, lost)
            keep[slice(stop - lost, stop) if cut == "end" else slice(start, start + lost)] = False
            over -= lost
        if over > 0:
            counts[too_long_to_cut(example)] += 1
            return None
        return total - limit - over

    def _kept_end(self, block: TokenBlock, start: int, stop: int, lost: int) -> int:
        """Tokens at the end of a sequence that stay where ``lost`` of those before them go."""
        count = len(self._eos)
        ends = count > 0 and block.tokens[stop - count : stop].tolist() == self._eos
        return count if ends and stop - start >= lost + count else 0

    def _prompt(self, block: TokenBlock, start: int, stop: int) -> tuple[int, int]:
        """(first token of a sequence's prompt that may go, how many may)."""
        targets = np.flatnonzero(block.targets[start + 1 : stop])
        bos = self._bos
        has_bos = block.tokens[start : start + len(bos)].tolist() == bos
        # One token must stand before the first target.
        low = max(1, len(bos) if has_bos else 0)
        stop_of_prompt = int(targets[0]) + 1 if len(targets) else stop - start
        return low, max(0, stop_of_prompt - low)

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
                self._counts[SPLIT] += start > 0
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


def _is_chat(example: Example) -> bool:
    return any(isinstance(sequence, Conversation) for sequence in example.sequences)


def _has_target(targets: np.ndarray, keep: np.ndarray, start: int, stop: int) -> bool:
    return bool((targets[start:stop][keep[start:stop]][1:] != 0).any())


def _equal_cuts(rooms: list[int], over: int) -> list[int]:
    """Equal cuts, as far as each has room: the smallest that sum to at least ``over``, or all."""
    low, high = 0, max(rooms)
    while low < high:
        middle = (low + high) // 2
        if sum(min(room, middle) for room in rooms) >= over:
            high = middle
        else:
            low = middle + 1
    return [min(room, low) for room in rooms]


def _level_cuts(lengths: list[int], over: int) -> list[int]:
    """Cuts that shorten the longest to the length of the next, until ``over`` is lost; one token of
    each stays."""
    if over <= 0 or not any(lengths):
        return [0] * len(lengths)
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
        self._backend = own_backend(renderer.tokenizer, plain=True)

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
        encoding = self._backend.encode(text, add_special_tokens=False)
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
