"""Reserving bytes, on file systems that can and on one that cannot."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmx.checkpoint.disk import DISK, allocate
from llmx.checkpoint.tensors import Fragment, TensorSpec, TensorWriter

VALUES = np.arange(2**18, dtype=np.float32)
SPEC = TensorSpec("w", "F32", VALUES.size)


def write(path: Path) -> int:
    """Reserve, then write; the bytes that the disk had set aside in between."""
    with TensorWriter(path, [SPEC]) as writer:
        writer.reserve()
        reserved = path.stat().st_blocks * 512
        writer.write([Fragment("w", "F32", VALUES.size, VALUES)])
    assert path.stat().st_size == writer.num_bytes
    return reserved


@pytest.fixture
def simple_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without ``fallocate(2)``, as NFS before 4.2 is."""
    made = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(tmp_path)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no ramfs can be mounted here: {made.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_bytes_are_set_aside_where_the_file_system_can(tmp_path: Path) -> None:
    assert write(tmp_path / "file") >= VALUES.nbytes


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_nothing_is_written_to_reserve_where_it_cannot(simple_disk: Path) -> None:
    """The C library's posix_fallocate would write to every block, over NFS one request each."""
    descriptor = DISK.create(simple_disk / "probe")
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        allocate(descriptor, 2**20)
    DISK.close(descriptor)
    assert write(simple_disk / "file") == 0


def test_what_cannot_be_reserved_is_said_as_the_kernel_says_it(tmp_path: Path) -> None:
    descriptor = DISK.create(tmp_path / "file")
    try:
        with pytest.raises(
            OSError, match=f"{os.strerror(errno.EFBIG)}|{os.strerror(errno.ENOSPC)}"
        ):
            allocate(descriptor, 2**62)
    finally:
        DISK.close(descriptor)
