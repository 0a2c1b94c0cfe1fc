"""Transfer of checkpoint files from the storages that have them to those that need them.

Without a shared file system each host holds what its own ranks wrote. That is enough to resume
with the same ranks; after a change of ranks, hosts or ZeRO stage any rank may need any file.
Tried by ``python -m pytest -m deepspeed tests/integration/test_resume_storages.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.commit import begin, committed_dir, partial_dir, publish
from llmx.checkpoint.distributed.topology import StorageTopology
from llmx.checkpoint.manifest import MANIFEST, CheckpointError, rank_file
from llmx.checkpoint.received_file import ReceivedFile
from llmx.checkpoint.selection import Assessment
from llmx.collectives import all_gather

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
