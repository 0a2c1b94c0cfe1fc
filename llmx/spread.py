"""Which ranks share a directory, and files that go from one host to others. Needs torch.

Hosts may share a file system or have one each, and several hosts may have one name (containers):
which ranks see the same directory is not configured but probed. A file goes in a chain, from the
rank that has it to one rank of each storage that lacks it.

Tried by ``python -m pytest tests/unit/test_spread.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.commit import MARK
from llmx.checkpoint.disk import DISK, make_directories
from llmx.collectives import all_gather, first_failure

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class StorageTopology:
    """This rank among those that see the same directory."""

    directory: Path
    rank: int
    leaders: tuple[int, ...]
    """For each rank of the run, the one that acts for its storage."""

    @property
    def storage(self) -> int:
        """The rank that acts for this storage: its name among the storages."""
        return self.leaders[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once on each storage."""
        return self.rank == self.storage

    @property
    def members(self) -> list[int]:
        """The ranks on this storage, ascending."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.storage]


def find_topology(directory: Path, *, create: bool, group: Any) -> StorageTopology:
    """Probe which ranks share ``directory``: each leaves a mark there and looks for those of the
    others. Collective over ``group``.

    ``create``: create it where it is missing; otherwise, if no rank has it, nothing is probed.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not create and not any(all_gather(directory.is_dir(), group=group)):
        return StorageTopology(directory, rank, leaders=(0,) * world)
    # New at each start: marks that a crash left do not count.
    token = all_gather(secrets.token_hex(4), group=group)[0]
    marks = [directory / f"{MARK}{token}-{number:05d}" for number in range(world)]
    make_directories(DISK, directory)
    marks[rank].touch()
    try:
        all_gather(None, group=group)
        # Each name is looked up: a listing may be cached by NFS.
        first = next((number for number, mark in enumerate(marks) if mark.exists()), rank)
        leaders = all_gather(first, group=group)
    finally:
        # Only after every rank has looked: the all-gather was the barrier.
        marks[rank].unlink(missing_ok=True)
    return StorageTopology(directory, rank, tuple(leaders))


def pass_on(
    file: Path, size: int, route: Sequence[int], *, blake2b: str = "", group: Any
) -> tuple[int, str] | None:
    """Send a file from the first rank of ``route`` to the others, which write it. Collective over
    ``group``.

    A rank sends each chunk on as soon as it is here, so many hosts get a file in about the time of
    one.

    Args:
        file: its path on this rank; it appears there whole and durably, or not at all.
        blake2b: the expected hash, 64 hexadecimal digits; by default nothing is compared.

    Returns:
        The first rank that could not write the file, and why; the same on every rank.
    """
    rank = torch.distributed.get_rank()
    chunks = _chunks(file, size, route, group=group) if rank in route else iter(())
    if rank == route[0]:
        for _ in chunks:
            pass  # an error ends this rank, and so the others, which wait for it

    def receive() -> None:
        try:
            if rank in route[1:]:
                _write(file, chunks, blake2b)
        finally:
            for _ in chunks:
                pass  # after an error, too: the ranks before and after this one wait

    return first_failure(receive, group=group)


def _chunks(file: Path, size: int, route: Sequence[int], *, group: Any) -> Iterator[Any]:
    """The content of a file, read by the first rank of ``route`` and received by the others; each
    chunk was sent on before it comes."""
    place = list(route).index(torch.distributed.get_rank())
    with contextlib.nullcontext() if place else file.open("rb") as stream:
        for start in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
            if stream is None:
                torch.distributed.recv(chunk, route[place - 1], group=group)
            elif stream.readinto(chunk.numpy().data) != len(chunk):
                raise OSError(f"{file} has changed while it was sent to other hosts")
            if place + 1 < len(route):
                torch.distributed.send(chunk, route[place + 1], group=group)
            yield chunk.numpy()


def _write(file: Path, chunks: Iterator[Any], blake2b: str) -> None:
    """Write a file under a temporary name; it gets its own after its hash was verified."""
    temporary = file.with_name(f".incoming-{file.name}")
    digest = hashlib.blake2b(digest_size=32)
    make_directories(DISK, file.parent)
    try:
        with temporary.open("wb") as stream:
            for chunk in chunks:
                digest.update(chunk)
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        if blake2b and digest.hexdigest() != blake2b:
            raise OSError(
                f"{file.name} was received with the hash {digest.hexdigest()[:16]}…, expected "
                f"{blake2b[:16]}…. It was not put in place"
            )
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    DISK.sync_directory(file.parent)
