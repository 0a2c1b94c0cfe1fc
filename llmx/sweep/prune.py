"""Trials that need not run: what they would need is known before, or from an earlier one. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any

from llmx import text as human
from llmx.config import Experiment, to_dict
from llmx.plan.storage import plan_storage
from llmx.plan.types import MemoryPlan, Plan
from llmx.run.provenance.differences import flattened

NAMES = ("name", "run_dir", "sweep.*", "tracking.*")
"""Keys that say nothing of what is trained."""
NO_MEMORY = (
    *NAMES,
    *("checkpoint.metric", "checkpoint.mode", "task.log_every_steps"),
    *("optim.lr", "optim.betas", "optim.eps", "optim.weight_decay", "optim.clip_norm"),
    *("optim.schedule", "optim.warmup_*", "optim.decay_*", "optim.min_lr_ratio", "optim.cycles"),
    *("optim.start_lr_ratio", "adapter.lr", "adapter.alpha"),
)
"""Keys that change nothing of the memory that a step takes."""
MICRO_BATCH, STAGE = "batch.micro_batch", "zero.stage"


@dataclass(frozen=True)
class OutOfMemory:
    """A trial that ran out of memory."""

    index: int
    experiment: Experiment
    plan: Plan
    kind: tuple[str, float | None] | None = None
    """The device and the RAM of its part of the cluster, if it had one."""


def key_of(exp: Experiment) -> str:
    """16 hex digits that two trials share if they train the same."""
    values = _without(NAMES, exp)
    text = json.dumps(values, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def impossible(exp: Experiment, plan: Plan) -> str:
    """Say why a trial cannot fit, whatever its activations take; empty where it may.

    Only what is held for certain counts: parameters, gradients and optimizer states as DeepSpeed
    divides them, on the device and, offloaded, in the RAM of a host.
    """
    for part in plan.memory:
        static_gib = part.parameters_gib + part.gradients_gib + part.optimizer_gib
        if part.capacity_gib and static_gib > part.capacity_gib:
            return (
                "parameters, gradients and optimizer states alone take "
                f"{human.gib(static_gib)} GiB of a rank, {part.device} has "
                f"{human.gib(part.capacity_gib)}"
            )
    for host in plan_storage(exp, plan).hosts:
        if host.ram_has_bytes and (host.offload_bytes or 0) > host.ram_has_bytes:
            return (
                f"what is offloaded takes {human.size(host.offload_bytes or 0)} of a host's RAM, "
                f"which has {human.size(host.ram_has_bytes)}"
            )
    return ""


def needs_more(exp: Experiment, plan: Plan, out_of_memory: Sequence[OutOfMemory]) -> str:
    """Say why a trial will run out of memory as an earlier one did; empty where it may not.

    It must be the same in all that takes memory, with a micro batch as large or larger, a ZeRO
    stage as low or lower, and no less memory by the plan.
    """
    keys = _without(NO_MEMORY, exp)
    for other in out_of_memory:
        other_keys = _without(NO_MEMORY, other.experiment)
        differing = {
            key for key in keys.keys() | other_keys.keys() if keys.get(key) != other_keys.get(key)
        }
        if differing - {MICRO_BATCH, STAGE}:
            continue
        if any(
            rank.micro_batch < earlier.micro_batch
            for rank, earlier in zip(plan.ranks, other.plan.ranks, strict=True)
        ):
            continue
        if exp.zero.stage > other.experiment.zero.stage or _less(plan.memory, other.plan.memory):
            continue
        listed = ", ".join(f"{key}={keys[key]}" for key in (STAGE, MICRO_BATCH) if key in differing)
        return (
            f"trial {other.index} ran out of memory and needs no more"
            f"{f' ({listed} here)' if listed else ''}"
        )
    return ""


def _without(patterns: Sequence[str], exp: Experiment) -> dict[str, Any]:
    """The values of an experiment by dotted key, but for keys that match a pattern."""
    return {
        key: value
        for key, value in flattened(to_dict(exp)).items()
        if not any(fnmatchcase(key, pattern) for pattern in patterns)
    }


def _less(memory: Sequence[MemoryPlan], other: Sequence[MemoryPlan]) -> bool:
    """Whether any device type needs less here by the plan (fewer micro steps, say)."""
    needed = {part.device: part.total_gib for part in other}
    return any(part.total_gib < needed.get(part.device, 0.0) for part in memory)
