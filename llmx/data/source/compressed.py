"""Compressed files as streams of bytes: .gz, .zst, .bz2, .xz; one that is cut off is an error."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmx.data.source.records import Meter

READ_BYTES = 1 << 18
DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)
"""What reading a damaged file raises; bz2 raises an OSError without a number."""


@contextlib.contextmanager
def opened(file: Path, meter: Meter) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed, as a stream that can ``peek``; ``meter`` counts what is
    read from disk."""
    suffix = file.suffix.lower()
    with io.BufferedReader(_Metered(file, meter), READ_BYTES) as raw:
        if suffix == ".zst":
            yield io.BufferedReader(_Zstandard(raw))
        elif suffix in (".gz", ".bz2", ".xz"):
            opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix]
            with opener(raw, "rb") as stream:
                yield stream
        else:
            yield raw


class _Metered(io.FileIO):
    """A file that counts what is read of it."""

    def __init__(self, file: Path, meter: Meter) -> None:
        super().__init__(file, "rb")
        self._meter = meter

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._meter.bytes += count or 0
        return count


class _Zstandard(io.RawIOBase):
    """The content of a .zst file. The library's own reader takes a file that is cut off for one
    that ends; this one raises EOFError."""

    def __init__(self, stream: Any) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._stream = stream
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
