"""Rows that are nearly equal, and rows that a set of evaluation rows was copied into.

Both compare words: lower case, without punctuation, and each character of a script that is written
without blanks (Chinese, Japanese) as a word of its own. Used by ``python -m llmx data near=``,
``data decontaminate=`` and ``python -m llmx synthesize``. Shown by
``python -m pytest tests/unit/test_data_command.py``.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import util
from typing import Any

from llmx.data.format.rows import Conversation, Labelled, Preference
from llmx.data.source.records import Document, Record, Row
from llmx.errors import ConfigError

_UNSPACED = "\u2e80-\u2fdf\u3005-\u3007\u3041-\u30fa\u30fc-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters of Chinese and Japanese without their punctuation, for a class of a pattern."""
WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")
PERMUTATIONS = 128
"""Values of a MinHash; its estimate of a similarity of 0.8 has a standard error of 0.035."""
RECALL = 0.9
"""The least share of pairs at the threshold that the index finds."""
SHORTEST = 8
"""Words of the shortest text that is looked for inside others, as for GPT-3."""
COMMON = 10
"""A run of words in more evaluation rows than this is their template, and is not looked for."""


def words_of(text: str) -> list[str]:
    """The words of a text, as texts are compared."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


def texts_of(row: Row | None, record: Record | Document) -> list[str]:
    """The texts of a row: of a chat those of user, assistant and tools, for many chats may share a
    system prompt. Of a record without a row all of its strings."""
    if row is None:
        return [] if isinstance(record, Document) else list(_strings(record.value))
    if isinstance(row, Preference):
        return [*texts_of(row.chosen, record), *texts_of(row.rejected, record)]
    if isinstance(row, Conversation):
        return [turn.content for turn in row.messages if turn.role != "system"]
    return [row.text] if isinstance(row, Labelled) else list(row.texts)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def check_installed(option: str) -> None:
    """ConfigError where the library that ``option`` needs is missing."""
    if util.find_spec("rensa") is None:
        raise ConfigError(
            f"{option} needs the package rensa, which is not installed. Run "
            "`pip install llmx[data]`."
        )


class NearDuplicates:
    """Finds the earlier text that is most similar to a new one.

    The similarity of two texts is the Jaccard index of their sets of ``shingle`` words in a row,
    estimated by MinHash (Broder, 1997) with the candidates of locality-sensitive hashing. About
    2 KiB of memory per text that is kept.
    """

    def __init__(self, threshold: float, *, shingle: int) -> None:
        import rensa

        # The fewest bands, for the fewest false candidates, that find enough at the threshold.
        bands = next(
            bands
            for bands in (4, 8, 16, 32, 64, 128)
            if 1 - (1 - threshold ** (PERMUTATIONS // bands)) ** bands >= RECALL or bands == 128
        )
        self._signature: Callable[[int, int], Any] = rensa.RMinHash
        self._index = rensa.RMinHashLSH(threshold, PERMUTATIONS, bands)
        self._signatures: dict[int, object] = {}
        self._threshold, self._shingle = threshold, shingle

    def add(self, key: int, words: Sequence[str]) -> tuple[int, float] | None:
        """Keep a text under ``key``. Or, where an earlier one is as similar as the threshold, keep
        nothing and return (its key, similarity). A text without words is similar to none."""
        if not words:
            return None
        signature = self._signature(PERMUTATIONS, 1)
        signature.update(list(set(runs(words, min(self._shingle, len(words))))))
        similar = [
            (signature.jaccard(self._signatures[earlier]), earlier)
            for earlier in self._index.query(signature)
        ]
        similarity, earlier = max(similar, default=(0.0, 0))
        if similarity >= self._threshold:
            return earlier, similarity
        self._index.insert(key, signature)
        self._signatures[key] = signature
        return None


def runs(words: Sequence[str], length: int) -> Iterator[str]:
    """All ``length`` words in a row."""
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))


class EvalTexts:
    """The texts of an evaluation set, to find rows that have parts of them.

    As for GPT-3 (Brown et al., 2020, appendix C): a row is contaminated if it has ``length`` words
    in a row (13 there) of an evaluation text. An evaluation text of 8 words or more that is
    shorter counts as a whole. A row with exactly the words of an evaluation row is contaminated,
    too. Words in a row that more than 10 evaluation rows have are their template, and left out.
    """

    def __init__(self, rows: Iterable[Sequence[str]], *, length: int) -> None:
        """``rows``: the texts of each evaluation row."""
        shortest, counts = min(length, SHORTEST), Counter[int]()
        self._whole: set[int] = set()
        self.short = 0
        """Texts that are too short to be looked for inside others."""
        self.num_rows = 0
        lengths: dict[int, int] = {}
        for texts in rows:
            self.num_rows += 1
            in_row: set[int] = set()
            row_words = [words for text in texts if (words := words_of(text))]
            for words in row_words:
                size = min(length, len(words))
                self.short += size < shortest
                if size >= shortest:
                    hashes = set(map(hash, runs(words, size)))
                    lengths |= dict.fromkeys(hashes, size)
                    in_row |= hashes
            counts.update(in_row)
            self._whole.add(hash(" ".join(word for words in row_words for word in words)))
        self._runs = {value for value, count in counts.items() if count <= COMMON}
        self.common = len(counts) - len(self._runs)
        """Words in a row that were left out as a template."""
        self._lengths = sorted({lengths[value] for value in self._runs})

    def match(self, words: Sequence[str]) -> str:
        """The words that a row has in common with the evaluation set; empty for a clean one."""
        in_common = " ".join(words)
        if not words or hash(in_common) not in self._whole:
            candidates = (run for length in self._lengths for run in runs(words, length))
            in_common = next((run for run in candidates if hash(run) in self._runs), "")
        return re.sub(f"(?<=[{_UNSPACED}]) (?=[{_UNSPACED}])", "", in_common)
