"""The types of data files by suffix. The command line asks before a launch
(``llmx.compose.complete``), the ranks when they read (``llmx.data.source.files``)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmx.config import plugins


@dataclass(frozen=True)
class FileType:
    """A type of data files. Another one needs a file with its reader and an entry of
    ``FILE_TYPES``."""

    suffixes: tuple[str, ...]
    reader: str
    """``module:function``, imported where a file is read: ``(file, stream, bad, text_unit)`` to
    records or documents (``llmx.data.source.records``)."""
    compressible: bool = True
    """Whether such a file may be compressed by another program."""


_LINES, _TABLES = "llmx.data.source.lines", "llmx.data.source.tables"
FILE_TYPES = [
    FileType((".txt", ".text"), f"{_LINES}:text_records"),
    FileType((".json", ".jsonl", ".ndjson"), f"{_LINES}:json_records"),
    FileType((".tsv", ".csv"), f"{_LINES}:delimited_records"),
    FileType((".parquet", ".arrow"), f"{_TABLES}:table_records", compressible=False),
]
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffixes of compressions that are read, each with its name for Arrow."""
_PACKED = {".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip"}
"""Suffixes of other compressions, each with the command that unpacks such a file."""
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
"""Files that describe a data set and lie beside it."""
PROVENANCE = ".provenance.json"
"""The end of the name of another one: what a file was made of, by ``data out=`` or
``synthesize``."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that tell a directory of ``Dataset.save_to_disk`` or ``DatasetDict``."""


def kind_of(file: Path) -> str:
    """The suffix that tells the format, in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in (*COMPRESSED, *_PACKED):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def known_suffixes() -> tuple[str, ...]:
    """The suffixes of all types."""
    return tuple(suffix for file_type in FILE_TYPES for suffix in file_type.suffixes)


def type_of(file: Path) -> FileType | None:
    """The type of a file, of llmx or of an installed package; None where it has none."""
    kind = kind_of(file)
    shipped = (file_type for file_type in FILE_TYPES if kind in file_type.suffixes)
    if (file_type := next(shipped, None)) is not None or not kind:
        return file_type
    name = kind[1:]
    return None if plugins.FILE_TYPES.problem(name) else plugins.FILE_TYPES.load(name)


def name_problem(file: Path) -> str:
    """Why a file with this name cannot be read as data, with the fix; empty where it can."""
    kind, last = kind_of(file), file.suffix.lower()
    file_type = type_of(file)
    if last in _PACKED:
        command = f"{_PACKED[last]} {shlex.quote(str(file))}"
        return f"{last} files are not read. Unpack it first: `{command}`"
    if file_type is None:
        reason = f"{kind} files are not read" if kind else "its name has no suffix"
        return (
            f"{reason}; those that end in {', '.join(known_suffixes())} are, also compressed "
            f"({', '.join(COMPRESSED)}). Rename it, or convert it to JSON Lines"
        )
    if last in COMPRESSED and not file_type.compressible:
        return (
            f"a {kind} file is compressed inside and cannot be read through another compression. "
            f"Decompress it ({last} off)"
        )
    return ""


def files_in(directory: Path) -> Iterator[Path]:
    """The data files of a directory and below it, in no order; hidden ones left out, which tools
    leave behind (``.ipynb_checkpoints``, ``._rows.jsonl``)."""
    for place, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(place, name)
            if name.startswith(".") or name in NOT_DATA or name.endswith(PROVENANCE):
                continue
            if kind_of(file) in known_suffixes() and file.is_file():
                yield file


def is_saved(directory: Path) -> bool:
    """Whether a directory is what ``save_to_disk`` writes."""
    return any((directory / name).is_file() for name in SAVED)
