"""Compressed files as streams of bytes: .gz, .zst, .bz2, .xz; one that is cut off is an error."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from pathlib import Path
from typing import IO, Any

SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile)
"""What reading a damaged file raises; bz2 raises an OSError without a number."""


def opened(file: Path) -> IO[bytes]:
    """The file's bytes, decompressed, as a buffered stream that can ``peek``."""
    suffix = file.suffix.lower()
    if suffix == ".zst":
        return io.BufferedReader(_Zstandard(file))
    if suffix in (".gz", ".bz2", ".xz"):
        opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix]
        return opener(file, "rb")  # type: ignore[operator,no-any-return]
    return file.open("rb")


class _Zstandard(io.RawIOBase):
    """The content of a .zst file. The library's own reader takes a file that is cut off for one
    that ends; this one raises EOFError."""

    def __init__(self, file: Path) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._stream = file.open("rb")
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._stream.read(1 << 16)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise EOFError(str(error)) from error
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
