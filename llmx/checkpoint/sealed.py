"""The manifest of a model directory: a final model, or an export.

``seal`` writes it beside the weights, as a checkpoint has one; ``check_sealed`` holds the files
against it when they are loaded. Files are hashed once: what was verified is remembered in the cache
by size, time of change and inode. A directory without a manifest was not written by llmx, and is
loaded as it is. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
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
    make_manifest,
    parse_manifest,
)
from llmx.run.rundir import read_mapping, write_json, write_text

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
    manifest = make_manifest(0, entries, hosts={}, run_id="", created=0.0)
    write_text(directory / MANIFEST, manifest.to_text())


def check_sealed(directory: Path, *, fix: str, whole: bool = False) -> None:
    """CheckpointError where a file is not as it was written; nothing without a manifest.

    Args:
        fix: a sentence that says how to get the model again.
        whole: hash every file, also those that were verified before.
    """
    if not selection.is_present(directory / MANIFEST):
        return
    try:
        manifest = parse_manifest((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: {error}. {fix}") from error
    note = _note_of(directory, manifest)
    verified = {} if whole else read_mapping(note)
    now = {name: _identity(directory / name) for name in manifest.files}
    changed = [name for name, identity in now.items() if identity != verified.get(name, 0)]
    if not changed:
        return
    problems = _problems(directory, manifest, changed, hashes=False)  # at once
    if problems or (problems := _problems(directory, manifest, changed, hashes=True)):
        more = f" ({len(problems) - 1} more files differ)" if len(problems) > 1 else ""
        raise CheckpointError(
            f"{directory}/{problems[0]}{more}. {fix} To use the files as they are, remove "
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
    """What changes with a file's content; None where it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


def _note_of(directory: Path, manifest: Manifest) -> Path:
    """Where it is remembered what was verified of this directory and this manifest."""
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    text = f"{os.path.realpath(directory)}\0{manifest.digest}"
    name = hashlib.blake2b(os.fsencode(text), digest_size=16).hexdigest()
    return root / "verified" / f"{name}.json"
