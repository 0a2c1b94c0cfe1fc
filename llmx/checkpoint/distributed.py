"""Completes a checkpoint whose files are on several hosts. Needs torch.

Without a shared file system each host holds what its own ranks wrote. That is enough to resume
with the same ranks; after a change of ranks, hosts or ZeRO stage any rank may need any file.

Tried by ``python -m pytest -m deepspeed tests/integration/test_resume.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from llmx.checkpoint.commit import begin, committed_dir, partial_dir, publish
from llmx.checkpoint.manifest import MANIFEST, CheckpointError, rank_file
from llmx.checkpoint.selection import Assessment
from llmx.collectives import first_failure
from llmx.spread import StorageTopology, pass_on

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
    checkpoints, step, lacking = topology.directory, assessment.step, assessment.lacking
    if not lacking or own_files_suffice(state, lacking, topology, stage=stage):
        return
    assert assessment.manifest is not None
    group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    directory = committed_dir(checkpoints, step)
    is_new = topology.leads and topology.storage in lacking and not directory.is_dir()
    if is_new:
        directory = partial_dir(checkpoints, step)
    failed = first_failure(lambda: is_new and begin(checkpoints, step), group=group)
    # The manifest is the last: what has one is complete.
    for name in [*sorted(assessment.manifest.files), MANIFEST]:
        targets = [storage for storage in sorted(lacking) if name in lacking[storage]]
        if targets and not failed:
            entry = assessment.manifest.entry(name)
            route = [assessment.holder[name], *targets]
            failed = pass_on(
                directory / name, entry.bytes, route, blake2b=entry.blake2b, group=group
            )
    failed = failed or first_failure(lambda: is_new and publish(checkpoints, step), group=group)
    torch.distributed.destroy_process_group(group)
    if failed:
        raise CheckpointError(
            f"The files of the checkpoint of step {step} are on several hosts, and the host of "
            f"rank {failed[0]} cannot store those that it lacks: {failed[1]}. Free some space "
            "there, or use a run directory that all hosts share."
        )
