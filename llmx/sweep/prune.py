"""Trials that need not run: what they would need is known before, or from an earlier one. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any

from llmx import text as human
from llmx.config import Experiment, to_dict
from llmx.plan.storage import plan_storage
from llmx.plan.types import MemoryPlan, Plan

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


def key_of(exp: Experiment) -> str:
    """The same for two trials that train the same: 16 hex digits."""
    values = {key: value for key, value in _flat(exp).items() if not _among(key, NAMES)}
    text = json.dumps(values, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def impossible(exp: Experiment, plan: Plan) -> str:
    """Why a trial cannot fit, whatever its activations take; empty where it may.

    Only what is held for certain counts: parameters, gradients and optimizer states as DeepSpeed
    divides them, on the device and, offloaded, in the RAM of a host.
    """
    for part in plan.memory:
        held = part.parameters_gib + part.gradients_gib + part.optimizer_gib
        if part.capacity_gib and held > part.capacity_gib:
            return (
                f"parameters, gradients and optimizer states alone take {human.gib(held)} GiB of a "
                f"rank, {part.device} has {human.gib(part.capacity_gib)}"
            )
    for host in plan_storage(exp, plan).hosts:
        if host.ram_has_bytes and (host.offload_bytes or 0) > host.ram_has_bytes:
            return (
                f"what is offloaded takes {human.size(host.offload_bytes or 0)} of a host's RAM, "
                f"which has {human.size(host.ram_has_bytes)}"
            )
    return ""


def needs_more(exp: Experiment, plan: Plan, out_of_memory: Sequence[OutOfMemory]) -> str:
    """Why a trial will run out of memory as an earlier one did; empty where it may not.

    It must be the same in all that takes memory, with a micro batch as large or larger, a ZeRO
    stage as low or lower, and no less memory by the plan.
    """
    keys = _memory_keys(exp)
    for other in out_of_memory:
        other_keys = _memory_keys(other.experiment)
        differing = {
            key for key in keys.keys() | other_keys.keys() if keys.get(key) != other_keys.get(key)
        }
        if differing - {MICRO_BATCH, STAGE}:
            continue
        if any(
            more.micro_batch < less.micro_batch
            for more, less in zip(plan.ranks, other.plan.ranks, strict=True)
        ):
            continue
        if exp.zero.stage > other.experiment.zero.stage or _less(plan.memory, other.plan.memory):
            continue
        more = ", ".join(f"{key}={keys[key]}" for key in (STAGE, MICRO_BATCH) if key in differing)
        return (
            f"trial {other.index} ran out of memory and needs no more"
            f"{f' ({more} here)' if more else ''}"
        )
    return ""


def _memory_keys(exp: Experiment) -> dict[str, Any]:
    return {key: value for key, value in _flat(exp).items() if not _among(key, NO_MEMORY)}


def _less(memory: Sequence[MemoryPlan], other: Sequence[MemoryPlan]) -> bool:
    """Whether any device type needs less here by the plan (fewer micro steps, say)."""
    needed = {part.device: part.total_gib for part in other}
    return any(part.total_gib < needed.get(part.device, 0.0) for part in memory)


def _flat(exp: Experiment) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            else:
                flat[f"{prefix}{key}"] = value

    walk(to_dict(exp), "")
    return flat


def _among(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
