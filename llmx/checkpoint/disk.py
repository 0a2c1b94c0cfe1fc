"""Every system call by which a checkpoint changes the disk, and nothing else.

One thin object, so that tests can put a fault at each of them
(``tests/unit/test_checkpoint_faults.py``). Reading needs no such door.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 8 * 2**20
"""Written and hashed at a time: long enough that the GIL is released, short enough to cache."""

UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
"""Errors of a file system that cannot reserve bytes."""


class Disk:
    """The real disk. All methods raise OSError."""

    def create(self, path: Path) -> int:
        """A new, empty file open for writing; FileExistsError if there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def reserve(self, descriptor: int, num_bytes: int) -> None:
        """Make sure that ``num_bytes`` can be written. The file has that size afterwards."""
        if num_bytes:
            allocate(descriptor, num_bytes)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some bytes of ``data``, at least one; returns how many (``write(2)``)."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until the content is on the disk itself."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in ``path`` are on the disk itself."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        os.mkdir(path, 0o755)  # noqa: PTH102, one system call

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; a file at ``target`` is replaced, a directory with content is not."""
        os.rename(source, target)  # noqa: PTH104, one system call

    def remove_file(self, path: Path) -> None:
        os.unlink(path)  # noqa: PTH108, one system call

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)  # noqa: PTH106, one system call


DISK = Disk()


def allocate(descriptor: int, num_bytes: int) -> None:
    """``fallocate(2)``. OSError EOPNOTSUPP where the file system has none (NFS before 4.2).

    Not ``os.posix_fallocate``: there the C library writes a byte to every 4 KiB instead, each a
    request of its own over NFS.
    """
    from ctypes import get_errno  # what only reads checkpoints does without

    call = _fallocate()
    while call(descriptor, 0, 0, num_bytes):
        number = get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    """The C library's, on Linux; it reports through ``ctypes.get_errno``."""
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call.restype = ctypes.c_int
    return call


def write_all(disk: Disk, descriptor: int, data: memoryview) -> None:
    """Write all of ``data`` (bytes), in as many calls as it takes."""
    while len(data):
        data = data[disk.write(descriptor, data) :]


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a new file and wait until its content is on the disk. Its name is durable with its
    directory."""
    descriptor = disk.create(path)
    try:
        write_all(disk, descriptor, memoryview(data))
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def make_directories(disk: Disk, path: Path) -> None:
    """Make ``path`` and its parents where they are missing, each name durable."""
    if path.is_dir():
        return
    make_directories(disk, path.parent)
    try:
        disk.make_directory(path)
    except FileExistsError:
        return  # another rank was quicker
    disk.sync_directory(path.parent)


def remove_tree(disk: Disk, path: Path) -> None:
    """Remove a directory with all its content; links are removed, not followed.

    Absent files are fine, also those that another process removes at this moment.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            if path.is_symlink() or path.exists():
                disk.remove_file(path)
            return
        with os.scandir(path) as entries:
            children = sorted(entry.name for entry in entries)
        for name in children:
            remove_tree(disk, path / name)
        disk.remove_directory(path)
