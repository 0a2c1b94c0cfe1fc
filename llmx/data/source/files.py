"""Reads files on disk as records, one at a time, each with the place it came from.

A file, a directory or a glob is read by what the suffixes say (``llmx.config.file_formats``), also
compressed (.gz, .zst). What is wrong with a file is said with its name, its line
or row and an excerpt; a wrong record goes to ``bad``, which raises it or takes note, and the
records after it are read. The bytes of a file are named by its SHA-256, which is computed once.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmx.config.build import shown
from llmx.config.file_formats import (
    COMPRESSED,
    files_in,
    is_saved,
    known_suffixes,
    name_problem,
    type_of,
)
from llmx.data.source.records import Document, Meter, OnBad, Record, RecordError, Where, refuse
from llmx.data.source.tables import chosen_split, saved_files
from llmx.errors import DataError
from llmx.run.rundir import write_json

DEMO_DIRECTORY = Path(__file__).resolve().parents[2] / "assets" / "demo"
"""Bundled (scripts/make_demo_data.py): train.jsonl, eval.jsonl, preferences/, tokenizer/."""
WORTH_BYTES = 1 << 20
"""Smaller files are hashed again: that is faster than looking their digest up."""
READ_BYTES = 1 << 18


def source_files(
    path: str, *, split: str | None = None, prefers: tuple[str, ...] = ("train",)
) -> tuple[list[Path], list[Path]]:
    """The files that ``path`` (a file, a directory or a glob) names, sorted by name, and the files
    of a directory that belong to other splits.

    ``split``, else the first of ``prefers`` that is there, chooses from a directory with several.
    Raises DataError when there are no files, or when one has a suffix that is not read.
    """
    place = Path(path).expanduser()
    others: list[Path] = []
    if place.is_file():
        files = [place]
    elif place.is_dir():
        if is_saved(place):
            return saved_files(place, split=split, prefers=prefers), []
        files = sorted(files_in(place))
        split_of = {file: split_name(file.relative_to(place).as_posix()) for file in files}
        splits = sorted(filter(None, {*split_of.values()}))
        if len(splits) > 1 or splits == [split or prefers[0]]:
            name = chosen_split(place, splits, split, prefers)
            others = [file for file in files if split_of[file] != name]
            files = [file for file in files if split_of[file] == name]
    else:
        files = sorted(Path(name) for name in glob.glob(str(place), recursive=True))  # noqa: PTH207
        files = [file for file in files if file.is_file()]
    if not files:
        suffixes = ", ".join(known_suffixes())
        raise DataError(
            f"data.path={shown(path)}: no such file, or no file there ends in {suffixes} "
            f"(or one of these and {', '.join(COMPRESSED)}). Relative paths start at "
            f"{Path.cwd()}."
        )
    for file in files:
        if problem := name_problem(file):
            raise DataError(f"{file}: {problem}.")
    return files, others


SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "dev": "validation", "val": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_SPLIT_WORD = re.compile(rf"(?:^|[-._ 0-9/])({'|'.join(SPLIT_WORDS)})(?=[-._ 0-9/])")
_SHARD = re.compile(r"data/([\w.]+)-\d{5}-of-\d{5}\.[^/]*")


def split_name(file: str) -> str | None:
    """The split to which a file belongs, by the rules of the Hub:
    ``data/train_sft-00000-of-00001.parquet``, ``data/valid.jsonl``, ``test/a.csv``. None for a name
    that says nothing of it."""
    if shard := _SHARD.fullmatch(file):
        return SPLIT_WORDS.get(shard[1], shard[1])
    word = _SPLIT_WORD.search(file)
    return SPLIT_WORDS[word[1]] if word else None


def read_file(
    file: Path, *, bad: OnBad = refuse, text_unit: str = "file", meter: Meter | None = None
) -> Iterator[Record | Document]:
    """Records of one file (or documents of a text file), in order.

    ``bad`` is called with every record that is wrong; by default it raises. A file that is damaged
    or cut off is such a record too, its last: what follows it cannot be read. ``meter`` is kept up
    to date.
    """
    meter = meter or Meter()
    before = meter.bytes
    file_type = type_of(file)
    if file_type is None:
        raise DataError(f"{file}: {name_problem(file)}.")
    module, name = file_type.reader.split(":")
    read = getattr(importlib.import_module(module), name)
    try:
        with opened(file, meter) as stream:
            yield from read(file, stream, bad, text_unit)
        meter.bytes = before + file.stat().st_size
    except OSError as error:
        # Of damaged content Arrow says so by an OSError without a number.
        if error.errno is not None:
            raise DataError(f"{file}: cannot be read ({error}).") from error
        bad(
            RecordError(
                f"{file}: the compressed file is damaged or cut off ({error}). Download it again.",
                where=Where(file, 0, "end"),
                reason="damaged or cut off; the file ends here",
            )
        )


def opened(file: Path, meter: Meter) -> IO[bytes]:
    """The file's bytes, decompressed, as a stream that can ``peek``; ``meter`` counts what is
    read from disk."""
    raw = io.BufferedReader(_Metered(file, meter), READ_BYTES)
    if (compression := COMPRESSED.get(file.suffix.lower())) is None:
        return raw
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression))


class _Metered(io.FileIO):
    """A file that counts what is read of it."""

    def __init__(self, file: Path, meter: Meter) -> None:
        super().__init__(file, "rb")
        self._meter = meter

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._meter.bytes += count or 0
        return count


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_of(file: Path, *, cache: Path) -> str:
    """Hex digest of the file's bytes; ``cache`` is the directory of what is remembered.

    What cannot be read or written there is computed again: the cache is never needed.
    """
    before = file.stat()
    if before.st_size < WORTH_BYTES:
        return sha256_of_file(file)
    name = hashlib.sha256(os.fsencode(os.path.abspath(file))).hexdigest()[:32]
    note = cache / "digests" / f"{name}.json"
    identity = [before.st_size, before.st_mtime_ns, before.st_ino, before.st_dev]
    try:
        remembered = json.loads(note.read_text(encoding="utf-8"))
        if remembered["identity"] == identity:
            return str(remembered["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = sha256_of_file(file)
    after = file.stat()
    if [after.st_size, after.st_mtime_ns, after.st_ino, after.st_dev] == identity:
        try:
            write_json(note, {"file": str(file), "identity": identity, "sha256": digest})
        except OSError:
            return digest
    return digest
