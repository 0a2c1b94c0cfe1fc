"""Checkpoints over several hosts: which ranks share a file system, and files that go from one to
another. Needs torch.

Without a shared file system each host holds what its own ranks wrote. That is enough to resume
with the same ranks; after a change of ranks, hosts or ZeRO stage any rank may need any file.

The storage topology says which ranks see the same ``checkpoints/``, and which one acts for it. It
is not configured but probed: hosts may share a file system or have one each, and several hosts may
have one name (containers). Each rank creates a mark and looks whose marks it sees:

    leave_mark(checkpoints, rank)     -- barrier --
    seen = marks_seen(checkpoints, range(world))     -- all-gather of seen --
    leader = storage_leaders(seen)[rank]     -- barrier --
    remove_mark(checkpoints, rank)

Tried by ``python -m pytest -m deepspeed tests/integration/test_resume.py``.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.commit import MARK, begin, committed_dir, partial_dir, publish
from llmx.checkpoint.disk import DISK, Disk, make_directories, remove_tree, write_all
from llmx.checkpoint.manifest import HASH_BYTES, MANIFEST, CheckpointError, FileEntry, rank_file
from llmx.checkpoint.selection import Assessment
from llmx.checkpoint.tensors import as_bytes
from llmx.collectives import all_gather


def leave_mark(checkpoints: Path, rank: int, *, token: str, disk: Disk = DISK) -> None:
    """``token``: the same on all ranks, new at each start: marks that a crash left do not count."""
    make_directories(disk, checkpoints)
    path = _mark(checkpoints, rank, token)
    remove_tree(disk, path)
    disk.close(disk.create(path))


def marks_seen(checkpoints: Path, ranks: Iterable[int], *, token: str) -> frozenset[int]:
    """Ranks whose mark is here. Each name is looked up: a listing may be cached by NFS."""
    return frozenset(rank for rank in ranks if _mark(checkpoints, rank, token).exists())


def remove_mark(checkpoints: Path, rank: int, *, token: str, disk: Disk = DISK) -> None:
    remove_tree(disk, _mark(checkpoints, rank, token))


def storage_leaders(visible_marks: Sequence[frozenset[int]]) -> list[int]:
    """For each rank the lowest rank on its storage. ``visible_marks[r]``: what rank
    ``r`` saw."""
    return [min(ranks | {rank}) for rank, ranks in enumerate(visible_marks)]


def _mark(checkpoints: Path, rank: int, token: str) -> Path:
    return checkpoints / f"{MARK}{token}-{rank:05d}"


@dataclass(frozen=True)
class StorageTopology:
    """This rank among those that see the same directory."""

    directory: Path
    """``checkpoints/``."""
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
    """Probe which ranks share ``directory``. Collective over ``group``.

    ``create``: create it where it is missing; otherwise, if no rank has it, nothing is probed.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not create and not any(all_gather(directory.is_dir(), group=group)):
        return StorageTopology(directory=directory, rank=rank, leaders=(0,) * world)
    token = all_gather(secrets.token_hex(4), group=group)[0]
    leave_mark(directory, rank, token=token)
    torch.distributed.barrier(group=group)
    try:
        visible_marks = all_gather(marks_seen(directory, range(world), token=token), group=group)
    finally:
        # Only after every rank has looked: the all-gather was the barrier.
        remove_mark(directory, rank, token=token)
    return StorageTopology(
        directory=directory, rank=rank, leaders=tuple(storage_leaders(visible_marks))
    )


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
        received = FileEntry(self._written, self._digest.hexdigest())
        if received != self._entry:
            raise CheckpointError(
                f"{self._target.name} was received with {received.bytes} bytes and hash "
                f"{received.blake2b[:16]}…, expected {self._entry.bytes} and "
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


CHUNK_BYTES = 32 * 2**20
TIMEOUT = timedelta(hours=6)
"""For one host to receive what it lacks. The default, 30 minutes, is 200 GB over 1 Gbit/s."""


def own_files_suffice(
    state: Mapping[str, Any],
    lacking: Mapping[int, list[str]],
    topology: StorageTopology,
    *,
    stage: int,
) -> bool:
    """Whether each rank finds all of its state in the file of the same rank.

    True where the state was partitioned over as many ranks at the same stage, and nothing was
    split among ranks that all need it. A pure function of what all ranks know.
    """
    return (
        state["world_size"] == len(topology.leaders)
        and state["zero_stage"] == stage > 0
        and all(entry["trained"] for entry in state["parameters"].values())
        and not state.get("buffers")
        and all(
            rank_file(rank) not in lacking.get(storage, [])
            for rank, storage in enumerate(topology.leaders)
        )
    )


def transfer_missing(
    topology: StorageTopology, assessment: Assessment, state: Mapping[str, Any], *, stage: int
) -> None:
    """Complete the checkpoint on every storage, unless no rank needs that. Collective.

    Raises:
        CheckpointError: a storage could not take it; on every rank alike.
    """
    if not assessment.lacking or own_files_suffice(
        state, assessment.lacking, topology, stage=stage
    ):
        return
    group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    for storage, names in sorted(assessment.lacking.items()):
        # The manifest is the last: what has one is complete.
        names = sorted(names, key=lambda name: name == MANIFEST)
        problem = None
        target = topology.directory
        if topology.rank == storage:
            target, problem = _prepare(topology, assessment.step)
        target_problem = all_gather(problem, group=group)[storage]
        for name in [] if target_problem else names:
            source = assessment.holder[name]
            if topology.rank == source:
                _send(
                    committed_dir(topology.directory, assessment.step) / name, storage, group=group
                )
            elif topology.rank == storage:
                problem = problem or _receive(target, name, source, assessment, group=group)
        if (
            topology.rank == storage
            and not problem
            and target == partial_dir(topology.directory, assessment.step)
        ):
            problem = _publish(topology, assessment.step)
        if failed := all_gather(problem, group=group)[storage]:
            raise CheckpointError(
                f"The files of the checkpoint of step {assessment.step} are on several hosts, and "
                f"the host of rank {storage} cannot store those that it lacks: {failed}. Free some "
                "space there, or use a run directory that all hosts share."
            )
    torch.distributed.destroy_process_group(group)


def _prepare(topology: StorageTopology, step: int) -> tuple[Path, str | None]:
    """The directory that receives the files: the checkpoint that is there, else a new one."""
    existing = committed_dir(topology.directory, step)
    if existing.is_dir():
        return existing, None
    try:
        return begin(topology.directory, step), None
    except OSError as error:
        return existing, str(error)


def _publish(topology: StorageTopology, step: int) -> str | None:
    try:
        publish(topology.directory, step)
    except OSError as error:
        return str(error)
    return None


def _send(path: Path, to: int, *, group: Any) -> None:
    size = path.stat().st_size
    torch.distributed.send(torch.tensor([size]), to, group=group)
    with path.open("rb") as stream:
        while block := stream.read(CHUNK_BYTES):
            values = torch.frombuffer(bytearray(block), dtype=torch.uint8)
            torch.distributed.send(values, to, group=group)


def _receive(
    directory: Path, name: str, source: int, assessment: Assessment, *, group: Any
) -> str | None:
    """Receive all bytes that are sent, also after an error; returns the error."""
    assert assessment.manifest is not None
    size = torch.zeros(1, dtype=torch.int64)
    torch.distributed.recv(size, source, group=group)
    left, file, problem = int(size), None, None
    try:
        file = ReceivedFile(directory, name, assessment.manifest.entry(name))
    except OSError as error:
        problem = str(error)
    while left:
        block = torch.empty(min(left, CHUNK_BYTES), dtype=torch.uint8)
        torch.distributed.recv(block, source, group=group)
        left -= len(block)
        try:
            if file is not None and problem is None:
                file.write(block.numpy())
        except OSError as error:
            problem = str(error)
    if file is None:
        return problem
    try:
        with file:
            if problem is None:
                file.finish()
    except (OSError, CheckpointError) as error:
        problem = problem or str(error)
    return problem
