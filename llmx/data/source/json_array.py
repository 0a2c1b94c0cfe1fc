"""The elements of a JSON array, one at a time: memory holds one element, not the file.

The decoder is Python's own; here is only what feeds it. An element that is not complete yet
gets more input, at least as much as it has, so that a long one is not decoded over and over.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmx.data.source.records import (
    OnBad,
    RecordDecoder,
    RecordError,
    Where,
    excerpt,
    key_twice,
    refuse,
)

CHUNK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_CUT = 16
"""An error in the last so many characters of the input may only be its end (``tru``, ``\\u12``)."""


def array_elements(
    file: Path, stream: IO[bytes], bad: OnBad = refuse
) -> Iterator[tuple[Any, Where]]:
    """(element, its place) in order. ``bad`` gets those that have a key twice. Raises RecordError
    where it is not JSON: an array cannot be read beyond that."""
    return _Elements(file, stream, bad).each()


class _Elements:
    def __init__(self, file: Path, stream: IO[bytes], bad: OnBad) -> None:
        self._bad = bad
        self._rows = RecordDecoder()
        self._file = file
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._lines = 1
        """The line of ``_text[0]``."""
        self._column = 1
        self._ended = False

    def each(self) -> Iterator[tuple[Any, Where]]:
        self._expect("[")
        number = 0
        if self._next() == "]":
            self._at += 1
            self._nothing_more()
            return
        while True:
            self._next()
            value, self._at = self._decoded()
            number += 1
            where = Where(self._file, number, "row")
            if self._rows.twice is None:
                yield value, where
            else:
                self._bad(key_twice(self._rows.twice, value, where))
            if self._next() == "]":
                self._at += 1
                self._nothing_more()
                return
            self._expect(",")

    def _decoded(self) -> tuple[Any, int]:
        while True:
            self._rows.twice = None
            try:
                value, stop = self._rows.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or (
                    error.pos >= len(self._text) - _CUT
                )
                if not cut or not self._more(len(self._text) - self._at):
                    raise self._wrong(error.msg, error.pos) from error
            except RecursionError as error:
                raise self._wrong("nested too deeply", self._at) from error
            except ValueError as error:
                problem = "a number of more than 4,300 digits"
                raise self._wrong(problem, self._at) from error
            else:
                if stop < len(self._text) or not self._more():
                    return value, stop
                # A number that ends with the input may go on.

    def _next(self) -> str:
        """The next character that is not space; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _expect(self, character: str) -> None:
        if self._next() != character:
            problem = "Expecting ',' delimiter" if character == "," else f"Expecting {character!r}"
            raise self._wrong(problem, self._at)
        self._at += 1

    def _nothing_more(self) -> None:
        if self._next():
            raise self._wrong("Extra data", self._at)

    def _more(self, at_least: int = 0) -> bool:
        """Read on; what was used is let go. False at the end of the file."""
        if self._ended:
            return False
        self._lines, self._column = self._position(self._at)
        self._text, self._at = self._text[self._at :], 0
        block = self._stream.read(max(CHUNK_BYTES, at_least))
        self._ended = not block
        try:
            self._text += self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            good = error.object[: error.start].decode("utf-8", "replace")
            self._text += good
            line, column = self._position(len(self._text))
            bad = error.object[max(0, error.start - 20) : error.start + 20]
            raise RecordError(
                f"{self._file}, line {line}, column {column}: not UTF-8: {bad!r}. Convert the "
                "file, e.g. `iconv -f GB18030 -t UTF-8`.",
                where=Where(self._file, line, "line"),
                reason="not UTF-8; the array ends here",
                content=repr(bad),
            ) from error
        return not self._ended or bool(self._text)

    def _position(self, at: int) -> tuple[int, int]:
        """(line, column) of a place in ``_text``."""
        before = self._text.count("\n", 0, at)
        if not before:
            return self._lines, self._column + at
        return self._lines + before, at - self._text.rfind("\n", 0, at)

    def _wrong(self, problem: str, at: int) -> RecordError:
        line, column = self._position(at)
        around = excerpt(self._text[max(0, at - 40) : at + 40])
        return RecordError(
            f"{self._file}, line {line}, column {column}: not JSON ({problem}): {around}. Correct "
            "it; a file cut off in the middle must be downloaded again.",
            where=Where(self._file, line, "line"),
            reason="not JSON; the array ends here",
            content=around,
        )
