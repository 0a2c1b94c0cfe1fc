"""One file of a checkpoint that comes from another host: received, verified, renamed.

Without a shared file system a storage lacks what the others wrote (``Assessment.lacking``). The
transport is the caller's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from llmx.checkpoint.disk import DISK, Disk, make_directories, remove_tree, write_all
from llmx.checkpoint.manifest import HASH_BYTES, CheckpointError, FileEntry
from llmx.checkpoint.tensors import as_bytes


class ReceivedFile:
    """A file that is being received. It gets its name only after its hash was verified.

    Args:
        directory: the checkpoint, or the partial one that is to become it.
        name: relative to it.
    """

    def __init__(self, directory: Path, name: str, entry: FileEntry, *, disk: Disk = DISK) -> None:
        self._target = directory / name
        self._temporary = self._target.with_name(f".incoming-{self._target.name}")
        self._entry = entry
        self._disk = disk
        self._digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self._written = 0
        make_directories(disk, self._target.parent)
        remove_tree(disk, self._temporary)
        self._descriptor = disk.create(self._temporary)

    def write(self, chunk: Any) -> None:
        """The next bytes, any buffer."""
        data = as_bytes(chunk)
        self._digest.update(data)
        self._written += len(data)
        write_all(self._disk, self._descriptor, data)

    def finish(self) -> None:
        """Give the file its name, durably. CheckpointError: it has another size or hash."""
        found = FileEntry(self._written, self._digest.hexdigest())
        if found != self._entry:
            raise CheckpointError(
                f"{self._target.name} was received with {found.bytes} bytes and hash "
                f"{found.blake2b[:16]}…, expected {self._entry.bytes} and "
                f"{self._entry.blake2b[:16]}…. It was not put in place."
            )
        self._disk.sync(self._descriptor)
        self._disk.rename(self._temporary, self._target)
        self._disk.sync_directory(self._target.parent)

    def __enter__(self) -> ReceivedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._disk.close(self._descriptor)
        remove_tree(self._disk, self._temporary)
