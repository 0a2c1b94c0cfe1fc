"""The fast path of a byte-level BPE: the ids of ``tokenizers``, several times as fast.

``BytePairs.of(tokenizer)`` converts the tokenizer to ``tiktoken``, or says why not. That the ids
are the same is proven, not hoped for: both merge the neighbours of the lowest rank first, but
tokenizers joins only the pairs of its list, and tiktoken any two parts whose bytes are a token.
So every token is split with the merges before its own, and must come apart into exactly the pair
that its merge names; then no text can tell the two apart. What the proof does not cover is not
converted, and texts with something in them that the two might see differently are left to
tokenizers.

``PretokenCache`` then encodes each different pre-token once and looks up all others. A tokenizer
that splits texts into pre-tokens before it merges gives a pre-token the same ids wherever it
stands. A cut that holds for every splitting pattern here, and that arrays find at the speed of
memory, is before a space that is followed by something other than white space: what stands before
it ends there, and the space begins what follows. So a pre-token here is a space and all up to the
next such cut, with its punctuation, and the first one of a text begins without a space.

    cache = PretokenCache(pairs.encode_pretokens)
    ids, counts = cache.encode([b"a text", b"another"])

Tried by ``python -m pytest tests/unit/test_data_encoders.py``, measured by
``python benchmarks/tokenization.py``.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

TABLE_BITS = 18
"""2^this slots of 21 bytes, half of which are used."""
LONGEST = 15
"""Bytes of the longest word that is kept: its bytes and its length are two 64-bit numbers."""
PROBES = 8
"""Slots in which a word may lie."""
WORTH = 1 / 16
"""Part of the words that may be new before a full table is emptied: the texts have changed."""

EncodePretokens = Callable[[list[bytes]], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Different words to (uint32 ids, int64 place of each word's first id, int64 number of its ids)."""

_SPACE = 32
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


class PretokenCache:
    """The words of one thread and their ids."""

    def __init__(self, encode_pretokens: EncodePretokens) -> None:
        self._encode_words = encode_pretokens
        self._pool = np.zeros(1 << 16, np.uint32)
        self.clear()

    def clear(self) -> None:
        """Empty the table of words."""
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
        is_known = self._found(low, high, slots)
        where, number = self._first[slots].astype(np.int64), self._count[slots].astype(np.int64)
        missing = np.flatnonzero(~is_known)
        if not len(missing):
            ids = self._gather(where, number)
        else:
            spans = zip(starts[missing].tolist(), stops[missing].tolist(), strict=True)
            order: dict[bytes, int] = {}
            word_numbers = [order.setdefault(data[a:b], len(order)) for a, b in spans]
            begins, sizes = self._learn(list(order))
            where[missing], number[missing] = begins[word_numbers], sizes[word_numbers]
            ids = self._gather(where, number)
            if self._full and len(missing) > WORTH * len(starts):
                self.clear()
            elif not self._full:
                _, example = np.unique(word_numbers, return_index=True)
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
        cuts = cuts[_OPENS[read[cuts + 1]]]
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
        """Whether each word is in the table; ``slots`` becomes its slot."""
        there = self._high[slots]
        hits = (there == high) & (self._low[slots] == low)
        open_ = np.flatnonzero(~hits & (there != 0))
        for _ in range(PROBES - 1):
            if not len(open_):
                break
            at = (slots[open_] + 1) & (len(self._low) - 1)
            slots[open_] = at
            there = self._high[at]
            hit = (there == high[open_]) & (self._low[at] == low[open_])
            hits[open_[hit]] = True
            open_ = open_[~hit & (there != 0)]
        is_known: np.ndarray = hits & (high != 0)
        return is_known

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
        entered = np.zeros(len(low), np.bool_)
        for _ in range(PROBES):
            if not len(open_):
                break
            free = open_[self._high[slots[open_]] == 0]
            # Of several that want a slot the last gets it.
            self._first[slots[free]] = free
            free = free[self._first[slots[free]] == free]
            at = slots[free]
            self._low[at], self._high[at], self._count[at] = low[free], high[free], sizes[free]
            entered[free] = True
            open_ = open_[~entered[open_]]
            slots[open_] = (slots[open_] + 1) & (len(self._low) - 1)
        new = np.flatnonzero(entered)
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
        ids: np.ndarray = self._pool[index]
        return ids


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
    slots: np.ndarray = (mixed >> np.uint64(64 - TABLE_BITS)).astype(np.int64)
    return slots


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Marks join letters.
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words are cut where lower case ends: Mistral's Tekken; o200k of gpt-oss and Llama 4.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same languages, written so that the engine need not step back: possessive where nothing
# that follows could match what was taken.
_QUICK_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_QUICK_LLAMA3 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s"
)
PATTERNS = {
    _GPT2: _QUICK_GPT2,
    _LLAMA3: _QUICK_LLAMA3,
    _QWEN: _QUICK_LLAMA3.replace(r"\p{N}{1,3}+", r"\p{N}"),
    _QWEN35: _QWEN35,
    _TEKKEN: _TEKKEN,
    _O200K: _O200K,
}
"""Splitting patterns that are known, each with an equal that tiktoken runs at least as fast."""
_LONG_SPACE = re.compile(r"\s{10000}")
_FOLDS = re.compile("[\u017f\ufb05\ufb06]")
"""Letters that are an s to some engines and not to others where case is ignored."""


class NotConvertible(Exception):
    """Why a tokenizer stays with its own library; for the summary."""


@dataclass(frozen=True)
class BytePairs:
    """A converted tokenizer. Ids are those of the original."""

    encoding: Any
    """``tiktoken.Encoding``; its ranks are turned into ids by ``ids_of_ranks``."""
    ids_of_ranks: np.ndarray
    """uint32 [number of ranks]"""
    bytes_of_ranks: np.ndarray
    """int64 [number of ranks]: length of each."""
    bytes_of_ids: np.ndarray | None
    """int64 [ids]: length of each; None where an added token takes what stands beside it."""
    composes: bool
    """The tokenizer brings texts into Unicode's NFC first."""
    spaces: bool
    """The tokenizer puts a space before a text that begins without one."""
    unsafe: re.Pattern[str]
    """Matches in a text leave it to the tokenizer's own library."""

    @classmethod
    def of(cls, tokenizer: Any) -> BytePairs:
        """Convert a fast Hugging Face tokenizer. Raises NotConvertible with the reason."""
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        pattern, spaces = _splitting(state["pre_tokenizer"])
        composes = _composes(state["normalizer"])
        ranks, ids = _ranks(state["model"], added={t["id"] for t in state["added_tokens"]})
        import tiktoken

        encoding = tiktoken.Encoding(
            "llmx", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
        )
        # Added tokens that are no special tokens are found in any text.
        added = state["added_tokens"]
        words = [token["content"] for token in added if not token["special"]]
        parts = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
        parts += [_LONG_SPACE.pattern] + ([_FOLDS.pattern] if pattern != _GPT2 else [])
        sizes = np.fromiter(map(len, ranks), np.int64, len(ranks))
        of_ids = np.zeros(1 + max([*ids, *(token["id"] for token in added)]), np.int64)
        of_ids[ids] = sizes
        for token in added:
            of_ids[token["id"]] = len(token["content"].encode())
        takes_more = any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in added)
        return cls(
            encoding,
            np.array(ids, np.uint32),
            sizes,
            None if takes_more else of_ids,
            composes,
            spaces,
            re.compile("|".join(parts)),
        )

    def prepared(self, text: str) -> bytes:
        """The text whose words, each for itself, have the ids of the text."""
        return (b" " if self.spaces and text and text[0] != " " else b"") + text.encode()

    def takes(self, text: str) -> bool:
        """Whether this text is encoded here; the others go to the tokenizer's own library."""
        if self.composes and not (text.isascii() or unicodedata.is_normalized("NFC", text)):
            return False
        return self.unsafe.search(text) is None

    def _ranks(self, text: bytes) -> np.ndarray:
        ranks: np.ndarray = self.encoding.encode_to_numpy(text.decode(), disallowed_special=())
        return ranks

    def encode_pretokens(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words of ``words``: (ids, place of each word's first id, number of its ids).

        Those that begin at a cut are encoded in one call, one behind the other: the cuts are
        between them too, and the lengths of the tokens say which are whose.
        """
        begins, counts = np.zeros(len(words), np.int64), np.zeros(len(words), np.int64)
        cut = [i for i, word in enumerate(words) if is_cut_off(word)]
        ranks = self._ranks(b"".join([words[i] for i in cut]))
        stops = np.cumsum(self.bytes_of_ranks[ranks])
        word_stops = np.cumsum([len(words[i]) for i in cut], dtype=np.int64)
        last = np.searchsorted(stops, word_stops)
        if len(cut) and not np.array_equal(stops[last], word_stops):
            raise AssertionError("a token reaches across the beginning of a word")
        begins[cut] = np.concatenate([[0], last[:-1] + 1]) if len(cut) else 0
        counts[cut] = last + 1 - begins[cut]
        parts, total = [self.ids_of_ranks[ranks]], len(ranks)
        for index in sorted(set(range(len(words))).difference(cut)):
            parts.append(self.ids_of_ranks[self._ranks(words[index])])
            begins[index], counts[index] = total, len(parts[-1])
            total += len(parts[-1])
        return np.concatenate(parts), begins, counts


def _splitting(state: dict[str, Any] | None) -> tuple[str, bool]:
    """(the regex that cuts a text into words before merging, a space is put before it)"""
    steps = (state or {}).get("pretokenizers", [state]) if state else []
    last = steps[-1] if steps else None
    if last is None or last["type"] != "ByteLevel":
        raise NotConvertible("it is no byte-level BPE")
    spaces = last["add_prefix_space"]
    if last["use_regex"] and len(steps) == 1:
        return _GPT2, spaces
    # Behind another cutting, every part would get its space.
    splits_first = len(steps) == 2 and not last["use_regex"] and not spaces
    if splits_first and steps[0]["type"] == "Split":
        split = steps[0]
        pattern = split["pattern"].get("Regex", "")
        # The patterns leave nothing over: all that they match, or nothing but that, is the same.
        behaviour = (split["behavior"], split["invert"])
        if behaviour in (("Isolated", False), ("Removed", True)) and pattern in PATTERNS:
            return pattern, False
    raise NotConvertible("its way of cutting texts into words is not known")


def _composes(state: dict[str, Any] | None) -> bool:
    if state is None:
        return False
    if state["type"] == "NFC":
        return True
    raise NotConvertible(f"it changes texts first ({state['type']})")


def _ranks(model: dict[str, Any], *, added: set[int]) -> tuple[dict[bytes, int], list[int]]:
    """(rank of each token's bytes, id of each rank), proven to merge as the tokenizer does."""
    if model["type"] != "BPE" or model.get("dropout") or model.get("byte_fallback"):
        raise NotConvertible("it is no plain BPE")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotConvertible("its tokens carry word marks")
    vocab: dict[str, int] = model["vocab"]
    byte_of = byte_of_character()
    try:
        ids = [vocab[chr(character)] for character in sorted(byte_of, key=byte_of.__getitem__)]
    except KeyError as error:
        raise NotConvertible("its vocabulary lacks single bytes") from error
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        try:
            a, b = (bytes(byte_of[ord(character)] for character in part) for part in (left, right))
            index = vocab[left + right]
        except KeyError as error:
            raise NotConvertible("a merge is not made of bytes") from error
        if a + b in ranks:
            raise NotConvertible("two merges make the same token")
        if _split(a + b, ranks) != [a, b]:
            raise NotConvertible("a token is not made by the merges before it")
        ranks[a + b] = len(ids)
        ids.append(index)
    # A word that is a token as a whole is taken at once; without it, only merges make tokens.
    if model.get("ignore_merges") and set(vocab.values()) - set(ids) - added:
        raise NotConvertible("it has tokens that no merge makes")
    return ranks, ids


def _split(text: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts of ``text`` when all merges known so far are applied, lowest rank first."""
    parts = [text[i : i + 1] for i in range(len(text))]
    if len(parts) == 2:
        return parts
    never = len(ranks)
    pairs = [ranks.get(text[i : i + 2], never) for i in range(len(text) - 1)]
    while len(parts) > 2:
        best = min(pairs)
        if best == never:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del pairs[at]
        if at:
            pairs[at - 1] = ranks.get(parts[at - 1] + parts[at], never)
        if at < len(pairs):
            pairs[at] = ranks.get(parts[at] + parts[at + 1], never)
    return parts


def byte_of_character() -> dict[int, int]:
    """The characters (code points) by which byte-level tokenizers write bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: byte for byte in printable}
    return table | {256 + i: byte for i, byte in enumerate(hidden)}
