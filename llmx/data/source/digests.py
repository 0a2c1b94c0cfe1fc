"""SHA-256 of source files, computed once: remembered by path, size, time of change and inode.

A run needs the digests to know its store, on every rank and every time. A file that was not
touched since is not read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from llmx.data.store.samples import sha256_of_file
from llmx.run.rundir import write_json

WORTH_BYTES = 1 << 20
"""Smaller files are sooner read again than looked up."""


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
