"""Reads a file of lines that others append to, and that may be cut back or replaced meanwhile.

Standard library only and one file: ``status`` and ``watch`` also send it over ssh to a host
that has nothing but a Python 3.
"""

# open instead of pathlib: its import would be a third of the start on a far host.
# ruff: noqa: PTH123
from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    Record = dict[str, Any]


class LineTail:
    """Whole lines appended since the last call; an unfinished one stays for the next.

    A file that was replaced (as a resume does with ``metrics.jsonl``) or is shorter than it was
    is read anew from its first line, and ``began_anew`` is true until the next call.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.began_anew = False
        self._offset = 0
        self._partial = b""
        self._file: tuple[int, int] | None = None

    def read(self) -> list[bytes]:
        """The new lines, in order, without their ends; none where there is no file."""
        self.began_anew = False
        try:
            with open(self.path, "rb") as stream:
                status = os.fstat(stream.fileno())
                file = (status.st_dev, status.st_ino)
                known = self._file is not None
                if known and (file != self._file or status.st_size < self._offset):
                    self._offset, self._partial, self.began_anew = 0, b"", True
                self._file = file
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return []
        self._offset += len(data)
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        return lines


def record_of(line: bytes) -> Record | None:
    """The JSON object of a line; None for anything else, such as a line that a crash cut off."""
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def records_of(lines: Iterable[bytes]) -> list[Record]:
    """The JSON objects of ``lines``; the others are left out."""
    found = [record_of(line) for line in lines]
    return [record for record in found if record is not None]


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The JSON objects of the lines of a file; none where there is no file. A last line that has
    no end yet counts where it is a whole object."""
    try:
        with open(path, "rb") as stream:
            return records_of(stream.read().split(b"\n"))
    except OSError:
        return []
