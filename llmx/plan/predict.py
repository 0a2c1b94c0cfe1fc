"""The plan's memory from traces of the real micro step. Pure.

``llmx.lifecycle.memory`` has the traces made and hands them over; without them the plan keeps the
formula of ``llmx.plan.memory``. What is decided by memory while a plan is made (in what gradients
are summed) stays with the formula, so that a run does not depend on what this machine has traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmx.config.optimizers import optimizer_of
from llmx.config.schema import Experiment
from llmx.plan.by_device import CHECKPOINTING, checkpointing_on
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.memory import BYTES, CONTEXT_GIB, GIB
from llmx.plan.step_memory import StepRules, peak_of
from llmx.plan.trace import StepTrace
from llmx.plan.types import MemoryPlan, Plan


@dataclass(frozen=True)
class TraceKey:
    """What a trace is of, beside the network."""

    attention: str
    checkpointing: str
    micro_batch: int


@dataclass(frozen=True)
class Traces:
    """Of one network and task."""

    found: Mapping[TraceKey, StepTrace]
    problem: str = ""
    """Why there are none."""
    context_gib: Mapping[str, float] = field(default_factory=dict)
    """Of the CUDA context, by type of device, where finished runs have shown it."""
    _between: dict[TraceKey, StepTrace | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def get(self, attention: str, checkpointing: str, micro_batch: int) -> StepTrace | None:
        """That of this micro batch, or between those of two others: bytes are linear in it."""
        key = TraceKey(attention, checkpointing, micro_batch)
        if key in self.found:
            return self.found[key]
        if key not in self._between:
            self._between[key] = self._mixed(attention, checkpointing, micro_batch)
        return self._between[key]

    def _mixed(self, attention: str, checkpointing: str, micro_batch: int) -> StepTrace | None:
        sizes = sorted(
            key.micro_batch
            for key in self.found
            if (key.attention, key.checkpointing) == (attention, checkpointing)
        )
        if len(sizes) < 2:
            return None
        low, high = sizes[0], sizes[-1]
        first, last = (self.found[TraceKey(attention, checkpointing, size)] for size in (low, high))
        return first.at(last, (micro_batch - low) / (high - low))


def wanted_traces(exp: Experiment, plan: Plan, *, others: bool) -> list[TraceKey]:
    """Those that a plan needs; ``others``: also for what it might be instead."""
    ways = dict.fromkeys(dict(plan.attention).values())
    own = dict.fromkeys((way, checkpointing_on(exp, name)) for name, way in plan.attention)
    sizes = sorted({rank.micro_batch for rank in plan.ranks})
    found = [TraceKey(way, how, size) for way, how in own for size in sizes]
    if others:
        two = {1, max([2, *sizes])}
        found += [TraceKey(way, how, size) for way in ways for how in CHECKPOINTING for size in two]
    return list(dict.fromkeys(found))


def rules_of(exp: Experiment, plan: Plan) -> StepRules:
    """What a step of the plan does, beside the network."""
    zero, optimizer = exp.zero, optimizer_of(exp.optim.kind)
    buckets = bucket_sizes(exp.model, zero, plan.accelerator)
    fused = plan.accelerator == "cuda" or zero.offload_optimizer != "none"
    temporary = optimizer.temporary_bytes + (0 if fused else optimizer.unfused_bytes)
    return StepRules(
        stage=zero.stage,
        world=plan.world_size,
        width=BYTES[plan.precision],
        sums=BYTES[plan.grad_accum_dtype or plan.precision],
        accumulation=plan.batch.accumulation,
        reduce_bucket=buckets["reduce"],
        overlap=bool(buckets["overlap"]),
        prefetch_bucket=buckets["prefetch"],
        persistence=buckets["persistence"],
        max_live=zero.max_live_parameters,
        max_reuse_distance=zero.max_reuse_distance,
        sub_group=zero.sub_group_size,
        state_width=optimizer.state_bytes,
        temporary_width=temporary,
        offload_optimizer=zero.offload_optimizer != "none",
        offload_param=zero.offload_param != "none",
        hpz=zero.hpz_partition_size,
        bf16=plan.precision == "bf16",
        sent=BYTES.get(str(zero.extra.get("communication_data_type")), 0),
    )


def memory_of(
    exp: Experiment, plan: Plan, trace: StepTrace, device: str, *, context_gib: float | None = None
) -> MemoryPlan:
    """Of the ranks on one type of device. ``context_gib``: measured; None: assumed."""
    config = exp.hardware.devices[device]
    peaks = peak_of(trace, rules_of(exp, plan))
    slots = max(host.slots for host in plan.hosts if host.device == device)
    saves = next((one.saves_host_gib for one in plan.memory if one.device == device), 0.0)
    part = {name: size / GIB for name, size in peaks.at.items()}
    return MemoryPlan(
        device=device,
        parameters_gib=part["parameters"],
        gradients_gib=part["gradients"],
        optimizer_gib=part["optimizer"],
        activations_gib=part["activations"],
        logits_gib=0.0,
        buffers_gib=part["buffers"],
        context_gib=(context_gib or CONTEXT_GIB[config.accelerator])
        + (peaks.freed / GIB if config.accelerator == "cpu" else 0.0),
        host_gib=peaks.host * slots / GIB,
        capacity_gib=config.memory_gib,
        update_gib=part["update"],
        saves_host_gib=saves,
        traced=True,
    )


def devices_of(plan: Plan) -> list[str]:
    """Types of devices, in the order of the ranks."""
    return list(dict.fromkeys(rank.device for rank in plan.ranks))
