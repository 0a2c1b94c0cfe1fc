"""Checkpoint files from the storages that have them to those that need them.

Without a shared file system each host holds what its own ranks wrote. That is enough to go on
with the same ranks; after a change of ranks, hosts or ZeRO stage any rank may need any part.
Tried by ``python -m pytest -m deepspeed tests/integration/test_resume_storages.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.commit import begin, committed_dir, partial_dir, publish
from llmx.checkpoint.distributed.topology import Place, exchange
from llmx.checkpoint.manifest import MANIFEST, CheckpointError, rank_file
from llmx.checkpoint.received_file import Incoming
from llmx.checkpoint.selection import Verdict

CHUNK_BYTES = 32 * 2**20
TIMEOUT = timedelta(hours=6)
"""For one host to get what it lacks. A group's usual half hour is 200 GB over gigabit Ethernet."""


def own_files_suffice(
    state: Mapping[str, Any], lacking: Mapping[int, list[str]], place: Place, *, stage: int
) -> bool:
    """Whether each rank finds all that it holds in the file of the same rank.

    So it is where the state was partitioned over as many ranks at the same stage, and nothing
    was shared out among ranks that all need it. A pure function of what all ranks know.
    """
    return (
        state["world_size"] == len(place.leaders)
        and state["zero_stage"] == stage > 0
        and all(entry["trained"] for entry in state["parameters"].values())
        and not state.get("buffers")
        and all(
            rank_file(rank) not in lacking.get(storage, [])
            for rank, storage in enumerate(place.leaders)
        )
    )


def bring_missing(place: Place, verdict: Verdict, state: Mapping[str, Any], *, stage: int) -> None:
    """Complete the checkpoint on every storage, unless no rank needs that. Collective.

    Raises:
        CheckpointError: a storage could not take it; on every rank alike.
    """
    if not verdict.lacking or own_files_suffice(state, verdict.lacking, place, stage=stage):
        return
    group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    for storage, names in sorted(verdict.lacking.items()):
        # The manifest is the last: what has one is complete.
        names = sorted(names, key=lambda name: name == MANIFEST)
        problem = None
        target = place.directory
        if place.rank == storage:
            target, problem = _prepare(place, verdict.step)
        target_problem = exchange(problem, group=group)[storage]
        for name in [] if target_problem else names:
            source = verdict.holder[name]
            if place.rank == source:
                _send(committed_dir(place.directory, verdict.step) / name, storage, group=group)
            elif place.rank == storage:
                problem = problem or _receive(target, name, source, verdict, group=group)
        if (
            place.rank == storage
            and not problem
            and target == partial_dir(place.directory, verdict.step)
        ):
            problem = _publish(place, verdict.step)
        if failed := exchange(problem, group=group)[storage]:
            raise CheckpointError(
                f"The checkpoint of step {verdict.step} is in parts on several hosts, and the host "
                f"of rank {storage} cannot take what it lacks: {failed}. Free some space there, or "
                "use a run directory that all hosts share."
            )
    torch.distributed.destroy_process_group(group)


def _prepare(place: Place, step: int) -> tuple[Path, str | None]:
    """Where the files go: into the checkpoint that is there, else into a new one."""
    existing = committed_dir(place.directory, step)
    if existing.is_dir():
        return existing, None
    try:
        return begin(place.directory, step), None
    except OSError as error:
        return existing, str(error)


def _publish(place: Place, step: int) -> str | None:
    try:
        publish(place.directory, step)
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
    directory: Path, name: str, source: int, verdict: Verdict, *, group: Any
) -> str | None:
    """Takes everything that is sent, in any case; returns what went wrong."""
    assert verdict.manifest is not None
    size = torch.zeros(1, dtype=torch.int64)
    torch.distributed.recv(size, source, group=group)
    left, file, problem = int(size), None, None
    try:
        file = Incoming(directory, name, verdict.manifest.entry(name))
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
