"""Tokenized rows on their way into samples: on disk, so that memory stays flat.

Packing needs every row's length before it can place the first one. So rows are written as
they come, only their lengths are kept, and the packed samples are gathered afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from llmx.data.pack import Piece
from llmx.data.render import TokenRow
from llmx.data.store import Sample


class Spool:
    """Rows in two files of ``directory``; append all, then gather."""

    def __init__(self, directory: Path) -> None:
        self._tokens_path = directory / "rows.tokens"
        self._targets_path = directory / "rows.targets"
        self._tokens = self._tokens_path.open("wb")
        self._targets = self._targets_path.open("wb")
        self._open_row = False
        self.lengths = array("q")
        """Tokens of each row."""

    def append(self, row: TokenRow, *, more: bool = False) -> None:
        """Add a row, or a piece of one when ``more`` of the same row follows."""
        self._tokens.write(row.tokens.astype(np.uint32, copy=False).tobytes())
        self._targets.write(row.targets.astype(np.uint8, copy=False).tobytes())
        if self._open_row:
            self.lengths[-1] += len(row.tokens)
        else:
            self.lengths.append(len(row.tokens))
        self._open_row = more

    def samples(self, packed: Iterable[list[Piece]]) -> Iterator[Sample]:
        """The packed samples, gathered from disk. A piece's first token is never a target:
        nothing stands before it that it could be predicted from."""
        self._tokens.close()
        self._targets.close()
        if not self.lengths:
            return
        tokens = np.memmap(self._tokens_path, dtype=np.uint32, mode="r")
        targets = np.memmap(self._targets_path, dtype=np.uint8, mode="r")
        starts = np.concatenate([[0], np.cumsum(np.frombuffer(self.lengths, np.int64))])
        for pieces in packed:
            spans = [
                slice(int(starts[row]) + start, int(starts[row]) + stop)
                for row, start, stop in pieces
            ]
            sizes = [span.stop - span.start for span in spans]
            row_starts = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int64)
            wanted = np.concatenate([targets[span] for span in spans]).astype(np.bool_)
            wanted[row_starts] = False
            yield Sample(np.concatenate([tokens[span] for span in spans]), wanted, row_starts)

    def close(self) -> None:
        self._tokens.close()
        self._targets.close()
