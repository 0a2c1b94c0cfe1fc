"""Whether the files of a model directory are what was written. Standard library only.

``damaged_files`` finds by sizes and first bytes what an interrupted download, or a git clone
without git-lfs, leaves. ``seal`` writes a manifest beside the weights of a final model or an
export; ``check_sealed`` compares the files with it when they are loaded. Files are hashed once:
what was verified is remembered in the cache by size, time of change and inode. A directory without
a manifest was not written by llmx, and is loaded as it is.

    damaged_files(Path("~/models/Qwen3-0.6B").expanduser())  # [] where all is well
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmx.checkpoint import selection
from llmx.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FileEntry,
    Manifest,
    Problem,
    parse_manifest,
)
from llmx.errors import ConfigError
from llmx.run.rundir import read_mapping, write_json, write_text
from llmx.text import plural, printable

LFS_POINTER = b"version https://git-lfs"
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses more."""
WEIGHTS = (".safetensors", ".bin")
FETCH = "Download it again."


def check_model_files(directory: Path) -> None:
    """ConfigError with a line for each damaged file of a model or an adapter."""
    if problems := damaged_files(directory):
        raise ConfigError("\n".join(problems))


def damaged_files(directory: Path, *, weights: bool = True) -> list[str]:
    """A line for each file that is damaged or missing. ``weights``: look at those, too."""
    problems = []
    for file in sorted(directory.glob("*")):
        is_weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        if not file.is_file() or (is_weights and not weights):
            continue
        try:
            problem = _problem(file)
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})."
        if problem:
            problems.append(f"{printable(str(file), keep='')}: {problem}")
    return problems


def _problem(file: Path) -> str:
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            where = printable(str(file.parent), keep="")
            return (
                "is a git-lfs pointer, not the file itself. Run `git lfs pull` in "
                f"{where}, or download the model again."
            )
    if file.suffix == ".safetensors":
        return _safetensors_problem(file)
    if file.suffix == ".json":
        return _json_problem(file)
    if file.suffix == ".bin":
        return _pickle_problem(file)
    return ""


def _safetensors_problem(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            return f"is not a safetensors file ({size:,} bytes). {FETCH}"
        if size < 8 + length:
            return f"is cut off ({size:,} bytes, its header alone has {8 + length:,}). {FETCH}"
        try:
            header = json.loads(stream.read(length))
            ends = [value["data_offsets"][1] for key, value in header.items() if key[:2] != "__"]
            expected = 8 + length + max(map(int, ends), default=0)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return f"has a damaged header. {FETCH}"
    if size != expected:
        return f"is damaged or cut off ({size:,} bytes, its header says {expected:,}). {FETCH}"
    return ""


def _json_problem(file: Path) -> str:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON ({error}). {FETCH}"
    if not file.name.endswith(".index.json"):
        return ""
    try:
        shards = set(values["weight_map"].values())
        missing = sorted(name for name in shards if not (file.parent / name).is_file())
    except (LookupError, TypeError, AttributeError):
        return f"has no weight_map. {FETCH}"
    if missing:
        return (
            f"{plural(len(missing), 'file')} of the {len(shards)} that it names missing, e.g. "
            f"{missing[0]}. Download the model again."
        )
    return ""


def _pickle_problem(file: Path) -> str:
    with file.open("rb") as stream:
        head = stream.read(4)
    if not head or (head == b"PK\x03\x04" and not zipfile.is_zipfile(file)):
        return f"is damaged or cut off ({file.stat().st_size:,} bytes). {FETCH}"
    return ""


COPY_AGAIN = "Copy the model again, or export it again: python -m llmx export RUN."
EDITED = ("README.md", MANIFEST)
"""Files that are not listed: a model card is for people to edit."""


def seal(directory: Path) -> None:
    """Write ``manifest.json``: size and hash of every file."""
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in EDITED
    )

    def entry(name: str) -> FileEntry:
        path = directory / name
        return FileEntry(path.stat().st_size, selection.hash_file(path))

    with ThreadPoolExecutor(selection.HASH_THREADS) as pool:
        entries = dict(zip(names, pool.map(entry, names), strict=True))
    manifest = Manifest(0, entries, hosts={}, run_id="", created=0.0)
    write_text(directory / MANIFEST, manifest.to_text())


def check_sealed(directory: Path, *, fix: str, rehash: bool = False) -> None:
    """CheckpointError where a file is not as it was written; nothing without a manifest.

    Args:
        fix: a sentence that says how to get the model again.
        rehash: hash every file, also those that were verified before.
    """
    if not selection.is_present(directory / MANIFEST):
        return
    try:
        manifest = parse_manifest((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: {error}. {fix}") from error
    note = _note_of(directory, manifest)
    verified = {} if rehash else read_mapping(note)
    now = {name: _identity(directory / name) for name in manifest.files}
    changed = [name for name, identity in now.items() if identity != verified.get(name, 0)]
    if not changed:
        return
    problems = _problems(directory, manifest, changed, hashes=False)  # at once
    if problems or (problems := _problems(directory, manifest, changed, hashes=True)):
        count = f" ({len(problems) - 1} more files differ)" if len(problems) > 1 else ""
        raise CheckpointError(
            f"{directory}/{problems[0]}{count}. {fix} To use the files as they are, remove "
            f"{directory / MANIFEST}."
        )
    with contextlib.suppress(OSError):  # then they are hashed again the next time
        write_json(note, now)


def _problems(
    directory: Path, manifest: Manifest, names: Sequence[str], *, hashes: bool
) -> list[Problem]:
    def check(name: str) -> Problem | None:
        return selection.check_file(directory, name, manifest.files[name], hashes=hashes)

    with ThreadPoolExecutor(selection.HASH_THREADS) as pool:
        return [problem for problem in pool.map(check, names) if problem]


def _identity(path: Path) -> list[int] | None:
    """Values that change with a file's content; None where it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


def _note_of(directory: Path, manifest: Manifest) -> Path:
    """The file in the cache that remembers the verified files of this directory and manifest."""
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    text = f"{os.path.realpath(directory)}\0{manifest.digest}"
    name = hashlib.blake2b(os.fsencode(text), digest_size=16).hexdigest()
    return root / "verified" / f"{name}.json"
