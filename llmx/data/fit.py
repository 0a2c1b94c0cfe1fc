"""Rows that are longer than ``seq_len``: cut, dropped or refused, each counted by its reason.

A long text comes in pieces, of which a batch may hold several, or the middle one: here they
become rows again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmx.config import DataConfig
from llmx.data.encode import TokenBlock
from llmx.data.forms import Conversation, Document
from llmx.data.render import TokenRow
from llmx.errors import DataError

CUT_OFF = "tokens cut off"
"""Of rows that are in the store: how much of them ``data.seq_len`` has no room for."""


class Fit:
    """Applies ``data.over_long`` block by block; ``counts`` gets what was cut and dropped."""

    def __init__(
        self, data: DataConfig, counts: Counter[str], *, state: Sequence[int] | None = None
    ) -> None:
        self._data = data
        self._counts = counts
        self._open, self._room = state or (0, 0)

    @property
    def state(self) -> tuple[int, int]:
        """(whether the last document goes on, tokens that it may still have), to go on later."""
        return int(self._open), self._room

    def __call__(self, rows: list[Any], block: TokenBlock) -> tuple[TokenBlock, bool]:
        """The rows that fit, and whether the first is the rest of the last one of before."""
        if self._data.packing == "concat":
            return self._whole(rows, block)
        pieces = bool(self._open) or any(_goes_on(row) for row in rows)
        fits = not len(block.lengths) or int(block.lengths.max()) <= self._data.seq_len
        if fits and not pieces and not any(isinstance(row, Conversation) for row in rows):
            return block, False
        kept: list[TokenRow] = []
        lengths: list[int] = []
        joins = False
        start = 0
        for row, length in zip(rows, block.lengths.tolist(), strict=True):
            stop = start + length
            whole = TokenRow(block.tokens[start:stop], block.targets[start:stop])
            start = stop
            continues = bool(self._open)
            fitted = self._fitted(row, whole)
            if fitted is None:
                continue
            kept.append(fitted)
            if continues and lengths:
                lengths[-1] += len(fitted.tokens)
            else:
                joins = joins or continues
                lengths.append(len(fitted.tokens))
        joined_rows = joined(kept)
        return TokenBlock(joined_rows.tokens, joined_rows.targets, np.array(lengths, int)), joins

    def _whole(self, rows: list[Any], block: TokenBlock) -> tuple[TokenBlock, bool]:
        """Every row as it is."""
        if not rows:
            return block, False
        joins = bool(self._open)
        self._open = int(_goes_on(rows[-1]))
        if any(_goes_on(row) for row in rows):
            begins = [0, *(i for i in range(1, len(rows)) if not _goes_on(rows[i - 1]))]
            lengths = np.add.reduceat(block.lengths, begins)
            block = TokenBlock(block.tokens, block.targets, lengths)
        return block, joins

    def _fitted(self, row: Any, tokens: TokenRow) -> TokenRow | None:
        counts, limit = self._counts, self._data.seq_len
        continues, self._open = bool(self._open), int(_goes_on(row))
        room = self._room if continues else limit
        cut_off = max(0, len(tokens.tokens) - room)
        if continues and not room:  # its document was cut, dropped or is full
            if self._data.over_long == "truncate":
                counts[CUT_OFF] += cut_off
            return None
        if cut_off:
            if self._data.over_long == "error":
                raise DataError(
                    f"{row.where}: {len(tokens.tokens)} tokens, data.seq_len is {limit}. Raise "
                    "data.seq_len, or set data.over_long to truncate or drop."
                )
            if self._data.over_long == "drop" and not continues:
                counts["too long"] += 1
                self._room = 0
                return None
            counts["truncated"] += 1
            counts[CUT_OFF] += cut_off
            tokens = TokenRow(tokens.tokens[:room], tokens.targets[:room])
        self._room = room - len(tokens.tokens)
        if isinstance(row, Conversation) and not tokens.targets[1:].any():
            counts["without an answer in the first seq_len tokens"] += 1
            if cut_off:
                counts["truncated"] -= 1
                counts[CUT_OFF] -= cut_off
            return None
        return tokens


def _goes_on(row: Any) -> bool:
    """Whether a row is a piece of which more follows."""
    return isinstance(row, Document) and not row.last


def joined(rows: list[TokenRow]) -> TokenBlock:
    """Rows one after the other."""
    if not rows:
        return TokenBlock(np.zeros(0, np.uint32), np.zeros(0, np.bool_), np.zeros(0, np.int64))
    return TokenBlock(
        np.concatenate([row.tokens for row in rows]),
        np.concatenate([row.targets for row in rows]),
        np.array([len(row.tokens) for row in rows], np.int64),
    )
