"""Temporary directories. One of a command that was killed is removed by a later command.

Tried by ``python -m pytest tests/unit/test_replacing.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "llmx.tmp-"
LEFT_AFTER_S = 3600.0
"""A directory gets its lock just after it is made; younger ones are let be."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory below ``TMPDIR`` that is removed at the end of the block."""
    _remove_left(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_left(root: Path) -> None:
    """Remove this user's old directories that no process holds."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < LEFT_AFTER_S:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
