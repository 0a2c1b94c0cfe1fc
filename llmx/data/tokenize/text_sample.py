"""A sample of texts of bounded size, drawn from records of unknown number.

Every text draws a number, a function of the seed and its place alone, and stays while that is
below a threshold; whenever the sample outgrows its budget the threshold is halved and the sample
is sieved. So each text had the same chance, memory stays flat and another reading gives the same.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from llmx.data.examples import TypedRecord
from llmx.data.format.formats import Conversation, Document

TEXT_CHARS = 16_384
"""Longer texts are cut, at a line's end where there is one, and drawn part by part."""
_WORDS = re.compile(r"\w+|[^\w\s]+")
_HEAD = struct.Struct("<dI")


class TextSample:
    """Texts in one file of ``directory``; add all, then iterate as often as needed."""

    def __init__(self, directory: Path, *, max_bytes: int, seed: int) -> None:
        self._path = directory / "texts"
        self._stream: IO[bytes] = self._path.open("w+b")
        self._max_bytes = max_bytes
        self._draws = np.random.Generator(np.random.Philox(seed))
        self._threshold = 1.0
        self.bytes = 0
        """UTF-8 bytes in the sample."""
        self.bytes_read = 0
        """UTF-8 bytes of all texts that were added."""

    def add(self, text: str) -> None:
        """Draw for one text."""
        content = text.encode()
        self.bytes_read += len(content)
        draw = float(self._draws.random())
        if draw >= self._threshold:
            return
        self._stream.write(_HEAD.pack(draw, len(content)) + content)
        self.bytes += len(content)
        while self.bytes > self._max_bytes:
            self._halve()

    def fit_words(self, max_bytes: int) -> None:
        """Make the sample smaller until its different words have at most so many bytes, which
        is what the memory of a training grows with."""
        while self._word_bytes(at_most=max_bytes) > max_bytes:
            self._halve()

    def __iter__(self) -> Iterator[str]:
        self._stream.flush()
        return (content.decode("utf-8") for _, content in self._entries())

    def close(self) -> None:
        self._stream.close()

    def _entries(self) -> Iterator[tuple[float, bytes]]:
        with self._path.open("rb") as stream:
            while head := stream.read(_HEAD.size):
                draw, size = _HEAD.unpack(head)
                yield draw, stream.read(size)

    def _word_bytes(self, *, at_most: int) -> int:
        """UTF-8 bytes of the different words; counted no further than ``at_most``."""
        words: set[str] = set()
        total = 0
        for text in self:
            for word in _WORDS.findall(text):
                if word not in words:
                    words.add(word)
                    total += len(word.encode())
            if total > at_most:
                break
        return total

    def _halve(self) -> None:
        """Sieve with half the threshold: about every second text goes."""
        self._threshold /= 2
        self._stream.flush()
        sieved = self._path.with_suffix(".sieved")
        self.bytes = 0
        with sieved.open("wb") as stream:
            for draw, content in self._entries():
                if draw < self._threshold:
                    stream.write(_HEAD.pack(draw, len(content)) + content)
                    self.bytes += len(content)
        self._stream.close()
        sieved.replace(self._path)
        self._stream = self._path.open("ab")


def texts_of(records: Iterable[TypedRecord | None]) -> Iterator[str]:
    """What is in records as plain texts: documents, and the contents of every turn."""
    for record in records:
        if isinstance(record, Document):
            yield from _cut(record.text)
        elif isinstance(record, Conversation):
            for message in record.messages:
                yield from _cut(message.content)
            if record.tools:
                yield from _cut(record.tools)


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > TEXT_CHARS:
        stop = text.rfind("\n", start + 1, start + TEXT_CHARS) + 1 or start + TEXT_CHARS
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]
