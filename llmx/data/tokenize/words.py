"""Texts to ids by words: each different word is tokenized once, all others are looked up.

A tokenizer that cuts texts into words before it merges gives a word the same ids wherever it
stands. A cut that holds for every splitting pattern of ``byte_level``, and that arrays
find at the speed of memory, is before a space that is followed by something other than white
space: what stands before it ends there, and the space begins what follows. So a word here is a
space and all up to the next such cut, with its punctuation, and the first one of a text begins
without a space.

    words = Words(encode_words)
    ids, counts = words.encode([b"a text", b"another"])

The table holds words of up to 15 bytes, compared byte by byte: two words are never taken for
each other. A ``Words`` belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

TABLE_BITS = 18
"""2^this slots of 21 bytes, half of which are used."""
LONGEST = 15
"""Bytes of the longest word that is kept: its bytes and its length are two 64-bit numbers."""
PROBES = 8
"""Slots in which a word may lie."""
WORTH = 1 / 16
"""Part of the words that may be new before a full table is emptied: the texts have changed."""

EncodeWords = Callable[[list[bytes]], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Different words to (uint32 ids, int64 place of each word's first id, int64 number of its ids)."""

_SPACE, _DELETE = 32, 127
_OPENS = np.zeros(256, np.bool_)
"""First bytes of characters that are surely no white space, which is ASCII up to 32 and some of
the characters that begin with C2, E1, E2 or E3."""
_OPENS[33:127] = True
_OPENS[0xC3:0xF5] = True
_OPENS[[0xE1, 0xE2, 0xE3]] = False
_SIZES = np.arange(LONGEST + 1, dtype=np.uint64)
_LOW_MASK = np.array([(1 << 8 * min(n, 8)) - 1 for n in range(LONGEST + 1)], np.uint64)
_HIGH_MASK = np.array([(1 << 8 * max(n - 8, 0)) - 1 for n in range(LONGEST + 1)], np.uint64)
_HIGH_SIZE = _SIZES << np.uint64(56)


def is_cut_off(word: bytes) -> bool:
    """Whether a word begins at a cut, wherever it stands: with a space and what is none."""
    return word[:1] == b" " and len(word) > 1 and bool(_OPENS[word[1]])


class Words:
    """The words of one thread and their ids.

    ``lone``: cut only at a space that stands alone, for tokenizers to which a run of spaces is
    one thing.
    """

    def __init__(self, encode_words: EncodeWords, *, lone: bool = False) -> None:
        self._encode_words = encode_words
        self._lone = lone
        self._pool = np.zeros(1 << 16, np.uint32)
        self.clear()

    def clear(self) -> None:
        """Forget all words."""
        size = 1 << TABLE_BITS
        self._low = np.zeros(size, np.uint64)
        self._high = np.zeros(size, np.uint64)  # 0: an empty slot, as no word has no bytes
        self._first = np.zeros(size, np.int32)
        self._count = np.zeros(size, np.uint8)
        self._used = 0
        self._pool_used = 0

    def __len__(self) -> int:
        return self._used

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """(uint32 ids of all texts, one after the other; int64 number of ids of each text)."""
        filled = [text for text in texts if text]
        counts = np.zeros(len(texts), np.int64)
        if not filled:
            return np.zeros(0, np.uint32), counts
        # A line break after each text: no cut is found across two of them.
        data = b"\n".join([*filled, bytes(16)])
        starts, stops, firsts = self._cut(data, [len(text) for text in filled])
        low, high, slots = _keys(data, starts, stops - starts)
        found = self._found(low, high, slots)
        where, number = self._first[slots].astype(np.int64), self._count[slots].astype(np.int64)
        missing = np.flatnonzero(~found)
        if not len(missing):
            ids = self._gather(where, number)
        else:
            spans = zip(starts[missing].tolist(), stops[missing].tolist(), strict=True)
            order: dict[bytes, int] = {}
            which = [order.setdefault(data[a:b], len(order)) for a, b in spans]
            begins, sizes = self._learn(list(order))
            where[missing], number[missing] = begins[which], sizes[which]
            ids = self._gather(where, number)
            if self._full and len(missing) > WORTH * len(starts):
                self.clear()
            elif not self._full:
                _, example = np.unique(which, return_index=True)
                self._keep(low[missing[example]], high[missing[example]], begins, sizes)
        counts[[index for index, text in enumerate(texts) if text]] = np.add.reduceat(
            number, firsts
        )
        return ids, counts

    def _cut(self, data: bytes, sizes: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(first byte of each word, the byte behind it, the first word of each text)."""
        read = np.frombuffer(data, np.uint8)
        text_stops = np.cumsum(np.array(sizes, np.int64) + 1) - 1
        text_starts = np.concatenate([[0], text_stops[:-1] + 1])
        cuts = np.flatnonzero(read[: text_stops[-1]] == _SPACE)
        good = _OPENS[read[cuts + 1]]
        if self._lone:
            good &= (read[cuts - 1] > _SPACE) & (read[cuts - 1] != _DELETE)
        cuts = cuts[good]
        places = np.searchsorted(cuts, text_starts)
        # A text that begins with a word's space is cut there twice.
        twice = (
            places[(cuts[np.minimum(places, len(cuts) - 1)] == text_starts)] if len(cuts) else []
        )
        cuts = np.delete(cuts, twice)
        places = np.searchsorted(cuts, text_starts)
        starts = np.insert(cuts, places, text_starts)
        firsts = places + np.arange(len(places))
        stops = np.append(starts[1:], text_stops[-1])
        stops[firsts[1:] - 1] = text_stops[:-1]
        return starts, stops, firsts

    def _found(self, low: np.ndarray, high: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Which words are in the table; ``slots`` becomes where."""
        there = self._high[slots]
        found = (there == high) & (self._low[slots] == low)
        open_ = np.flatnonzero(~found & (there != 0))
        for _ in range(PROBES - 1):
            if not len(open_):
                break
            at = (slots[open_] + 1) & (len(self._low) - 1)
            slots[open_] = at
            there = self._high[at]
            hit = (there == high[open_]) & (self._low[at] == low[open_])
            found[open_[hit]] = True
            open_ = open_[~hit & (there != 0)]
        return found & (high != 0)

    def _learn(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Their ids, behind those of the pool that are kept: (first, number) of each word."""
        ids, begins, sizes = self._encode_words(words)
        while self._pool_used + len(ids) > len(self._pool):
            self._pool = np.concatenate([self._pool, np.zeros_like(self._pool)])
        self._pool[self._pool_used : self._pool_used + len(ids)] = ids
        return self._pool_used + begins, sizes

    def _keep(
        self, low: np.ndarray, high: np.ndarray, begins: np.ndarray, sizes: np.ndarray
    ) -> None:
        """Enter words into the table, as many as have room, and keep their ids."""
        open_ = np.flatnonzero((high != 0) & (sizes > 0) & (sizes < 256))
        slots = _slots(low, high)
        kept = np.zeros(len(low), np.bool_)
        for _ in range(PROBES):
            if not len(open_):
                break
            free = open_[self._high[slots[open_]] == 0]
            # Of several that want a slot the last gets it.
            self._first[slots[free]] = free
            free = free[self._first[slots[free]] == free]
            at = slots[free]
            self._low[at], self._high[at], self._count[at] = low[free], high[free], sizes[free]
            kept[free] = True
            open_ = open_[~kept[open_]]
            slots[open_] = (slots[open_] + 1) & (len(self._low) - 1)
        new = np.flatnonzero(kept)
        ids = self._gather(begins[new], sizes[new])
        self._pool[self._pool_used : self._pool_used + len(ids)] = ids
        stops = np.cumsum(sizes[new])
        self._first[slots[new]] = self._pool_used + stops - sizes[new]
        self._pool_used += len(ids)
        self._used += len(new)

    @property
    def _full(self) -> bool:
        return self._used > len(self._low) // 2

    def _gather(self, where: np.ndarray, number: np.ndarray) -> np.ndarray:
        stops = np.cumsum(number)
        index = np.repeat(where - stops + number, number)
        index += np.arange(len(index))
        return self._pool[index]


def _keys(
    data: bytes, starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two uint64 of each word, which hold its bytes and its length (high is 0 where it is too
    long), and the slot where it is looked for first."""
    at_any_byte = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    short = np.minimum(sizes, LONGEST)
    low = at_any_byte[starts] & _LOW_MASK[short]
    high = (
        at_any_byte[np.minimum(starts + 8, len(data) - 8)] & _HIGH_MASK[short] | _HIGH_SIZE[short]
    )
    high[sizes > LONGEST] = 0
    return low, high, _slots(low, high)


def _slots(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    mixed = low * np.uint64(0x9E3779B97F4A7C15) ^ high * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - TABLE_BITS)).astype(np.int64)
