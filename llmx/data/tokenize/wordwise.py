"""Tokenizers that are no byte-level BPE, word by word: each different word is tokenized once.

``Wordwise.of(backend)`` says why not, where the ids of a word could depend on its neighbours.
They do not where everything before the model looks at single characters (Unicode's forms, lower
case, accents) and either the pre-tokenizer cuts at spaces (WordPiece, Unigram and BPE behind
``Metaspace``, ``BertPreTokenizer``, ``Whitespace``), or the model is a BPE no token of which
reaches from a letter or mark over the space behind it (SentencePiece's models): no merge can join
what no token holds. Texts with characters beside a space that may vanish, or become a space
themselves, are left to whole encoding.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np

MARK = "\u2581"
"""The character that SentencePiece writes for a space."""
_LOCAL = (
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
    "Precompiled",
)
"""Normalizers that see a character and its combining marks, never what is beyond a space."""
_CUTTERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
_INSIDE = ("Punctuation", "Digits", "UnicodeScripts")
"""Pre-tokenizers that cut further what others have cut."""


WORTH_CHARS = 16
"""Characters a space from which words are too long to come again."""


class NotWordwise(Exception):
    """Why a tokenizer encodes whole texts; for the summary."""


@dataclass(frozen=True)
class Wordwise:
    """A tokenizer whose words have ids of their own."""

    backend: Any
    """``tokenizers.Tokenizer``"""
    prepends: bool
    """It puts a space before every text, even before one that begins with a space."""
    added: re.Pattern[str] | None
    """Tokens that are found in any text. One that has them is not encoded here."""

    lone = True
    """Only a space that stands alone begins a word: some normalizers join runs of them."""

    @classmethod
    def of(cls, backend: Any) -> Wordwise:
        """``backend`` takes special tokens as text, and neither pads nor truncates. Raises
        NotWordwise with the reason."""
        state = json.loads(backend.to_str())
        marks, prepends = _normalizer(state["normalizer"])
        if state["model"].get("dropout"):
            raise NotWordwise("it chooses tokens by chance")
        if not _cuts(state["pre_tokenizer"], marks=marks):
            _check_vocabulary(state["model"])
        words = [token["content"] for token in state["added_tokens"] if not token["special"]]
        parts = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
        return cls(backend, prepends, re.compile("|".join(parts)) if parts else None)

    def takes(self, text: str) -> bool:
        """Whether this text is encoded here."""
        if text.count(" ") * WORTH_CHARS < len(text):
            return False
        if self.added and self.added.search(text):
            return False
        return text.isascii() or not _has_loose_space(text)

    def prepared(self, text: str) -> bytes:
        """The text whose words, each for itself, have the ids of the text."""
        return (b" " if self.prepends and text else b"") + text.encode()

    def encode_pretokens(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, place of each word's first id, number of its ids)"""
        skip = int(self.prepends)  # the tokenizer puts it there again
        texts = [word[skip:].decode() for word in words]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        ids_by_word = [encoding.ids for encoding in encodings]
        counts = np.array([len(ids) for ids in ids_by_word], np.int64)
        ids = np.array([token for ids in ids_by_word for token in ids], np.uint32)
        return ids, np.cumsum(counts) - counts, counts


def _normalizer(state: dict[str, Any] | None) -> tuple[bool, bool]:
    """(spaces become marks, a mark is put before the text)"""
    steps = [] if state is None else state.get("normalizers", [state])
    marks = prepends = False
    for step in steps:
        pattern = step.get("pattern", {})
        if step["type"] == "Prepend" and step["prepend"] == MARK and not marks:
            prepends = True
        elif step["type"] == "Replace" and pattern == {"String": " "} and step["content"] == MARK:
            marks = True
        elif not (
            step["type"] in _LOCAL or (step["type"] == "Replace" and pattern == {"Regex": " {2,}"})
        ):
            raise NotWordwise(f"what it changes in texts is not known ({step['type']})")
    if prepends and not marks:
        raise NotWordwise("it puts a mark before texts, and none for their spaces")
    return marks, prepends


def _cuts(state: dict[str, Any] | None, *, marks: bool) -> bool:
    """Whether a text is cut at every space; False where it is not cut at all."""
    cut = False
    for step in [] if state is None else state.get("pretokenizers", [state]):
        pattern = step.get("pattern", {})
        if step["type"] in _CUTTERS and not marks:
            cut = True
        elif step["type"] == "Metaspace" and step["replacement"] == MARK:
            cut = cut or step["split"]
        elif step["type"] == "Split" and not step["invert"] and pattern == {"String": MARK}:
            cut = cut or (marks and step["behavior"] == "MergedWithNext")
        elif step["type"] == "Split" and pattern == {"String": " "} and marks:
            continue  # there is none left
        elif step["type"] not in _INSIDE:
            raise NotWordwise(f"its way of cutting texts into words is not known ({step['type']})")
    return cut


def _check_vocabulary(model: dict[str, Any]) -> None:
    if model["type"] != "BPE":
        raise NotWordwise("it does not cut texts into words")
    if MARK not in model["vocab"]:
        raise NotWordwise("it has no token for a space")
    across = re.compile(f"[^{MARK}]{MARK}")
    if any(across.search(token) for token in model["vocab"]):
        raise NotWordwise("some of its tokens hold several words")


def _has_loose_space(text: str) -> bool:
    """Whether there is a mark, or a space beside what is loose."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    loose = _loose()[points]
    space = points == ord(" ")
    beside = (loose[1:] & space[:-1]) | (loose[:-1] & space[1:])
    return bool(beside.any()) or MARK in text


@functools.cache
def _loose() -> np.ndarray:
    """bool [code points]: what may vanish, be joined to a space or become one: white space,
    control, format and combining characters, what decomposes into these, and the sign of a
    character that was lost."""
    loose = np.zeros(sys.maxunicode + 1, np.bool_)
    for point in range(0x80, sys.maxunicode + 1):
        character = chr(point)
        loose[point] = unicodedata.category(character)[0] in "CZM" or (
            unicodedata.category(unicodedata.normalize("NFKD", character)[0])[0] in "CZM"
        )
    loose[0xFFFD] = True
    return loose
