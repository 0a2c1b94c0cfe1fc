"""The plan's memory from traces of the real micro step, and what else would fit. Pure.

``llmx.lifecycle.memory`` has the traces made and hands them over; without them the plan keeps the
formula of ``llmx.plan.memory``. What is decided by memory while a plan is made (in what gradients
are summed) stays with the formula, so that a run does not depend on what this machine has traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmx.config.schema import Experiment, ModelConfig, ZeroConfig
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.memory import BYTES, GIB, cheapest_fit, does_not_fit
from llmx.plan.step_memory import StepRules, peak_of
from llmx.plan.trace import StepTrace
from llmx.plan.types import MemoryPlan, Plan

STATE_WIDTHS = {"sgd": 0, "lion": 4, "muon": 4, "adafactor": 0, "adam8bit": 2}
"""Bytes an element of an optimizer's state, beside master weights; 8 for AdamW."""
CHECKPOINTING = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16)

STAGE_3_SLOWER, OFFLOAD_SLOWER, OFFLOAD_PARAM_SLOWER, NVME_SLOWER = 1.1, 1.4, 1.8, 3.0
"""Assumed, for the order of what to try only: gathering of parameters, and copies to the host."""


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

    def get(self, attention: str, checkpointing: str, micro_batch: int) -> StepTrace | None:
        """That of this micro batch, or between those of two others: bytes are linear in it."""
        exact = self.found.get(TraceKey(attention, checkpointing, micro_batch))
        if exact is not None:
            return exact
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


def wanted_traces(plan: Plan, model: ModelConfig, *, others: bool) -> list[TraceKey]:
    """Those that a plan needs; ``others``: also for what it might be instead."""
    ways = dict.fromkeys(dict(plan.attention).values())
    sizes = sorted({rank.micro_batch for rank in plan.ranks})
    found = [TraceKey(way, model.activation_checkpointing, size) for way in ways for size in sizes]
    if others:
        two = {1, max([2, *sizes])}
        found += [TraceKey(way, how, size) for way in ways for how in CHECKPOINTING for size in two]
    return list(dict.fromkeys(found))


def rules_of(exp: Experiment, plan: Plan) -> StepRules:
    """What a step of the plan does, beside the network."""
    zero, kind = exp.zero, exp.optim.kind
    buckets = bucket_sizes(exp.model, zero, plan.accelerator)
    fused = plan.accelerator == "cuda" or zero.offload_optimizer != "none"
    # Lion makes its update; AdamW without its fused kernel makes the denominator twice.
    temporary = {"lion": 4, "adamw": 0 if fused else 8}.get(kind, 0)
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
        state_width=STATE_WIDTHS.get(kind, 8),
        temporary_width=temporary,
        offload_optimizer=zero.offload_optimizer != "none",
        offload_param=zero.offload_param != "none",
        hpz=zero.hpz_partition_size,
    )


def memory_of(exp: Experiment, plan: Plan, trace: StepTrace, device: str) -> MemoryPlan:
    """Of the ranks on one type of device."""
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
        context_gib=1.0 if config.accelerator == "cuda" else 0.4,
        host_gib=peaks.host * slots / GIB,
        capacity_gib=config.memory_gib,
        update_gib=part["update"],
        saves_host_gib=saves,
        traced=True,
    )


def with_traces(plan: Plan, exp: Experiment, traces: Traces) -> Plan:
    """The plan with the memory that the traces give, and what it says of it; unchanged where they
    do not cover it."""
    found = []
    for device in devices_of(plan):
        size = max(rank.micro_batch for rank in plan.ranks if rank.device == device)
        trace = traces.get(plan.attention_on(device), exp.model.activation_checkpointing, size)
        if trace is None:
            return plan
        found.append(memory_of(exp, plan, trace, device))
    kept = [
        text for text in plan.warnings if not any(does_not_fit(one) in text for one in plan.memory)
    ]
    said = [does_not_fit(one) for one in found if not one.fits]
    if said:
        said.append(advice(exp, plan, choices(exp, plan, traces)))
    return replace(plan, memory=tuple(found), warnings=(*said, *kept))


def devices_of(plan: Plan) -> list[str]:
    """Types of devices, in the order of the ranks."""
    return list(dict.fromkeys(rank.device for rank in plan.ranks))


@dataclass(frozen=True)
class Choice:
    """One way to run the experiment, and what it takes on each type of device."""

    zero: str
    """The option of the group."""
    checkpointing: str
    micro_batch: int
    """Of every rank."""
    memory: Mapping[str, MemoryPlan]
    """By type of device."""
    cost: float
    """Of time, against that of the cheapest of all; assumed, but for what is computed again."""
    chosen: bool = False
    """It is the plan."""

    @property
    def fits(self) -> bool:
        """On every type of device."""
        return all(one.fits for one in self.memory.values())

    @property
    def most_gib(self) -> float:
        return max(one.total_gib for one in self.memory.values())

    def overrides(self, exp: Experiment) -> list[str]:
        """To type, against the experiment."""
        found = []
        if self.zero != option_of(exp.zero):
            found.append(f"zero={self.zero}")
        if self.checkpointing != exp.model.activation_checkpointing:
            found.append(f"model.activation_checkpointing={self.checkpointing}")
        if self.micro_batch != exp.batch.micro_batch:
            found.append(f"batch.micro_batch={self.micro_batch}")
        return found


OPTIONS: dict[str, dict[str, object]] = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "stage3": {"stage": 3},
    "stage3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}
"""Options of the group ``zero`` that are compared, with what each sets."""


def choices(exp: Experiment, plan: Plan, traces: Traces) -> list[Choice]:
    """ZeRO stages and offloads x activation checkpointing x micro batches, each planned; the
    cheapest first; those of them that were traced."""
    own = option_of(exp.zero)
    options = OPTIONS if own in OPTIONS else {**OPTIONS, own: {}}
    devices = devices_of(plan)
    found: list[Choice] = []
    for how in CHECKPOINTING:
        for size in sorted({exp.batch.micro_batch, *MICRO_BATCHES}):
            each = {name: traces.get(plan.attention_on(name), how, size) for name in devices}
            known = {name: trace for name, trace in each.items() if trace is not None}
            if len(known) < len(devices):
                continue
            flops = max(trace.flops for trace in known.values()) / size
            for option, values in options.items():
                zero = exp.zero if option == own else _zero(exp.zero, values)
                model = replace(exp.model, activation_checkpointing=how)
                other = replace(exp, zero=zero, model=model)
                memory = {name: memory_of(other, plan, known[name], name) for name in devices}
                # The update, and what is exchanged, are once for all tokens of a micro batch.
                cost = flops * _slower(zero) * (1 + 0.05 / size)
                here = (own, exp.model.activation_checkpointing, exp.batch.micro_batch)
                chosen = (option, how, size) == here
                found.append(Choice(option, how, size, memory, cost, chosen))
    least = min((one.cost for one in found), default=1.0) or 1.0
    relative = [replace(one, cost=one.cost / least) for one in found]
    return sorted(relative, key=lambda one: (one.cost, one.most_gib))


def advice(exp: Experiment, plan: Plan, found: list[Choice]) -> str:
    """What to change where the plan does not fit: of each ZeRO option the cheapest that fits with
    at most the micro batch that was asked for, each planned; with the overrides to type."""
    if not found:
        remedy = cheapest_fit(exp.model, exp.zero, exp.batch)
        return f"Cheapest remedy: {remedy}."
    own = next((one.cost for one in found if one.chosen), None)
    cheapest: dict[str, Choice] = {}
    for one in found:
        if one.fits and one.micro_batch <= exp.batch.micro_batch and not one.chosen:
            cheapest.setdefault(one.zero, one)
    texts = []
    for one in list(cheapest.values())[:3]:
        time = f", about {one.cost / own - 1:+.0%} time" if own else ""
        texts.append(f"{' '.join(one.overrides(exp))} ({one.most_gib:.1f} GiB{time})")
    if texts:
        return f"What fits, each planned, the cheapest first: {'; '.join(texts)}."
    return (
        "No ZeRO stage fits, with offload, activation checkpointing and a micro batch of 1. Take "
        "more or larger devices, zero=infinity, or a shorter data.seq_len."
    )


def option_of(zero: ZeroConfig) -> str:
    """The option of the group ``zero`` that it is, or the nearest name."""
    for name, values in OPTIONS.items():
        if zero == _zero(zero, values) and zero.hpz_partition_size == 1:
            return name
    return f"stage{zero.stage}*"


def _zero(zero: ZeroConfig, values: Mapping[str, object]) -> ZeroConfig:
    plain = replace(
        zero, offload_optimizer="none", offload_param="none", hpz_partition_size=1, nvme_path=None
    )
    return dataclasses.replace(plain, **values)  # type: ignore[arg-type]


def _slower(zero: ZeroConfig) -> float:
    found = STAGE_3_SLOWER if zero.stage == 3 else 1.0
    if zero.stage == 0:
        found *= 1.001  # of two alike the one that needs less memory
    if zero.offload_optimizer != "none":
        found *= OFFLOAD_SLOWER if zero.offload_param == "none" else OFFLOAD_PARAM_SLOWER
    if "nvme" in (zero.offload_optimizer, zero.offload_param):
        found *= NVME_SLOWER
    return found
