"""Predicted peak memory of a rank, by part: a traced micro step under the rules of a plan. Pure.

``llmx.plan.step_memory`` applies DeepSpeed's rules to the trace; the context of the device, saves
in the background and drawing samples come on top. Without a trace the memory is not known.
"""

from __future__ import annotations

from dataclasses import replace

from llmx.config.accelerators import ACCELERATORS
from llmx.config.optimizers import optimizer_of, state_bytes
from llmx.config.schema import Experiment, ModelConfig
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.network import Network
from llmx.plan.rollout_time import Samples
from llmx.plan.step_memory import StepRules, peak_of
from llmx.plan.trace import StepTrace
from llmx.plan.types import MemoryPlan, Plan

GIB = 1024.0**3
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

FUSED_LOSS_CHUNK_BYTES = 512 * 2**20
"""Logits that a fused loss has in memory at a time (``llmx.models.loss``)."""


def fused_loss(model: ModelConfig, accelerator: str) -> bool:
    """Whether the head and the cross entropy are computed together."""
    gpu = ACCELERATORS[accelerator].is_gpu
    return gpu if model.fused_loss is None else model.fused_loss


def samples_of(exp: Experiment, plan: Plan) -> Samples | None:
    """What a step of the plan draws; None where it draws nothing, or its network is not known."""
    if plan.drawn is None or plan.network is None:
        return None
    width, prompts = BYTES[plan.precision], plan.batch.global_batch
    return Samples(plan.network, width, prompts, plan.drawn, exp.data.seq_len)


def with_drawing(
    memory: MemoryPlan, samples: Samples | None, resting: float, *, sharded: bool, world: int
) -> MemoryPlan:
    """The memory of a rank with what it takes to draw its part of the samples. ``resting``: bytes
    between two steps. ``sharded``: the weights are gathered once for all samples, where they take
    at most half of what is free (``weights_for_generation``)."""
    if samples is None:
        return memory
    size = resting + samples.drawing_bytes(-(-samples.num_completions // world))
    if sharded and world > 1:
        weights = samples.width * samples.network.num_parameters
        free = (memory.capacity_gib - memory.context_gib) * GIB - resting
        size += weights if not memory.capacity_gib or 2 * weights <= free else 0
    training_gib = memory.total_gib - memory.context_gib
    return replace(memory, drawing_gib=max(0.0, size / GIB - training_gib))


def before_training_gib(
    network: Network, exp: Experiment, *, precision: str, world_size: int
) -> float:
    """GiB that a rank needs for a network that computes stored columns, before training. ZeRO-3
    shards its weights, and gathers the layer that computes and the next one."""
    elements = float(network.num_parameters)
    if exp.zero.stage >= 3:
        elements = elements / world_size + min(2 * network.largest, network.num_parameters)
    return BYTES[precision] * elements / GIB + 1.0


def optimizer_bytes(kind: str, precision: str) -> int:
    """Bytes of the states and the master weight of a trained element."""
    return state_bytes(kind) + (0 if precision == "fp32" else 4)


def _save_bytes(exp: Experiment, plan: Plan, num_trained: int) -> float:
    """Bytes in host memory of what a rank copies for a checkpoint saved in the background."""
    checkpoint, fp32 = exp.checkpoint, plan.precision == "fp32"
    if checkpoint.background == "never" or not (checkpoint.every_steps or checkpoint.every_minutes):
        return 0.0
    shard = num_trained / plan.world_size if exp.zero.stage >= 1 else num_trained
    return (optimizer_bytes(exp.optim.kind, plan.precision) + (4 if fp32 else 0)) * shard


def rules_of(exp: Experiment, plan: Plan) -> StepRules:
    """The rules of a step of the plan."""
    zero, optimizer = exp.zero, optimizer_of(exp.optim.kind)
    buckets = bucket_sizes(exp.model, zero, plan.accelerator)
    fused = plan.on_gpus or zero.offload_optimizer != "none"
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
    """The memory of the ranks on one type of device. ``context_gib``: measured; None: assumed."""
    config = exp.hardware.devices[device]
    accelerator = ACCELERATORS[config.accelerator]
    peaks = peak_of(trace, rules_of(exp, plan))
    slots = plan.slots_on(device)
    part = {name: size / GIB for name, size in peaks.at.items()}
    memory = MemoryPlan(
        device=device,
        parameters_gib=part["parameters"],
        gradients_gib=part["gradients"],
        optimizer_gib=part["optimizer"],
        activations_gib=part["activations"],
        buffers_gib=part["buffers"],
        context_gib=(context_gib or accelerator.context_gib)
        + (0.0 if accelerator.is_gpu else peaks.freed / GIB),
        host_gib=peaks.host * slots / GIB,
        capacity_gib=config.memory_gib,
        update_gib=part["update"],
        saves_host_gib=_save_bytes(exp, plan, trace.num_trained) * slots / GIB,
    )
    samples = None if plan.rollout_hosts else samples_of(exp, plan)
    sharded = exp.zero.stage >= 3
    return with_drawing(memory, samples, peaks.current, sharded=sharded, world=plan.world_size)
