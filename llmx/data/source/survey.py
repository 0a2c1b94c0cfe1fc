"""A first reading of all rows: how many there are, and which say the same as an earlier one."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from llmx.data.examples import Row
from llmx.data.format.formats import Conversation, Document, Labelled
from llmx.data.format.preferences import Preference
from llmx.data.source.records import Record


@dataclass(frozen=True)
class Survey:
    """``repeated``: bool [num_rows], True for a row that is identical to an earlier one; None
    where it was not asked for."""

    num_rows: int
    repeated: np.ndarray | None

    @property
    def num_different(self) -> int:
        return self.num_rows - (0 if self.repeated is None else int(self.repeated.sum()))

    def is_repeated(self, index: int) -> bool:
        return self.repeated is not None and bool(self.repeated[index])


def survey_of(rows: Iterable[tuple[int, Row | None, int]], *, find_repeated: bool) -> Survey:
    """Count numbered rows and compare them by a digest of what is trained. 16 bytes a row."""
    digests = array("Q")
    count = 0
    text = hashlib.blake2b(digest_size=16)
    for index, row, _ in rows:
        count = index + 1
        if not find_repeated:
            continue
        text.update(_content(row, index))
        if not isinstance(row, Document) or row.last:
            digests.frombytes(text.digest())
            text = hashlib.blake2b(digest_size=16)
    if not find_repeated:
        return Survey(count, None)
    pairs = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    order = np.lexsort((np.arange(len(pairs)), pairs[:, 1], pairs[:, 0]))
    ordered = pairs[order]
    repeated = np.zeros(count, np.bool_)
    same = (ordered[1:] == ordered[:-1]).all(axis=1)
    repeated[order[1:][same]] = True
    return Survey(count, repeated)


def _content(row: Row | None, index: int) -> bytes:
    if isinstance(row, Document):
        return row.text.encode("utf-8", "surrogatepass")
    if isinstance(row, Conversation):
        turns = [[message.role, message.content] for message in row.messages]
        return json.dumps([turns, row.tools]).encode()
    if isinstance(row, Preference):
        return b"".join(_content(answer, index) for answer in (row.chosen, row.rejected))
    if isinstance(row, Labelled):
        turns = [[message.role, message.content] for message in row.history]
        return json.dumps([turns, row.text, row.label]).encode()
    if isinstance(row, Record):
        return json.dumps(row.value, default=str).encode()
    return f"\0nothing to learn {index}".encode()  # counted as such, not as repeated
