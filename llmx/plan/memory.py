"""Predicted peak memory of a rank, by part. Pure arithmetic; says what it assumes.

States: parameters, gradients and optimizer (fp32 master, two moments) as ZeRO shards or
offloads them. Beside them what published estimates leave out: activations, logits of the
target positions, communication buckets, temporaries of the update, the CUDA context. What
DeepSpeed 0.19.8 keeps at each stage was measured tensor by tensor
(``tests/integration/test_train_engines.py``), activations operator by operator
(``tests/unit/test_plan_memory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmx.config.accelerators import ACCELERATORS, Accelerator
from llmx.config.optimizers import optimizer_of, state_bytes
from llmx.config.schema import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    DeviceConfig,
    Experiment,
    ModelConfig,
    OptimConfig,
    ZeroConfig,
)
from llmx.plan.adapter import AdapterSize, adapter_size, trained_parameters
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.geometry import Geometry, model_geometry
from llmx.plan.rollout_time import Samples
from llmx.plan.step_memory import ALL_REDUCED_ELEMENTS, StepRules, peak_of
from llmx.plan.trace import StepTrace
from llmx.plan.types import NO_LOGITS, SUMMED, MemoryPlan, NetworkBeside, Plan

GIB = 1024.0**3
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

FUSED_LOSS_CHUNK_BYTES = 512 * 2**20
"""Logits that a fused loss has in memory at a time (``llmx.models.loss``)."""


def fused_loss(model: ModelConfig, accelerator: str) -> bool:
    """Whether the head and the cross entropy are computed together."""
    gpu = ACCELERATORS[accelerator].is_gpu
    return gpu if model.fused_loss is None else model.fused_loss


def predict_memory(
    exp: Experiment,
    geometry: Geometry,
    *,
    device_name: str,
    device: DeviceConfig,
    micro_batch: int,
    world_size: int,
    slots: int,
    precision: str,
    buckets: dict[str, int],
    grad_accum_dtype: str = "",
    beside: Sequence[NetworkBeside] = (),
    logits: str = SUMMED,
    samples: Samples | None = None,
) -> MemoryPlan:
    """Predict the peak of one rank on ``device`` and of the RAM of its host (GiB).

    The peak is the larger of the last backward pass (with activations, logits and buckets) and of
    the update (with its temporaries). ``beside``: networks that are there all the time.
    ``logits``: what the loss asks of the output head (``Task.logits``). ``samples``: what the ranks
    draw in a step.
    """
    zero, adapter = exp.zero, adapter_size(exp.model, exp.adapter)
    accelerator = ACCELERATORS[device.accelerator]
    n = geometry.num_parameters + (adapter.added if adapter else 0)
    # Frozen weights have neither gradients nor an optimizer.
    trained = trained_parameters(exp.model, exp.adapter) or n
    trained += sum(network.num_trained for network in beside)
    width = BYTES[precision]
    shard = trained / world_size if zero.stage >= 1 else trained
    optimizer = optimizer_bytes(exp.optim.kind, precision) * shard
    if optimizer_of(exp.optim.kind).matrices_apart and not adapter:
        optimizer += 4 * adamw_elements(geometry, trained) * shard / trained
    quantized = adapter.quantized if adapter else 0
    parameters = width * (n - quantized) / (world_size if zero.stage >= 3 else 1)
    parameters += packed_bytes(quantized, double=exp.adapter.double_quant)
    parameters += sum(beside_bytes(network, exp, width, world_size) for network in beside)
    step = step_bytes(
        exp.zero,
        exp.optim,
        trained,
        shard,
        width=width,
        accum=BYTES[grad_accum_dtype or precision],
        bf16=precision == "bf16",
        cuda=accelerator.is_gpu,
    )
    host = 0.0
    if zero.offload_param != "none":
        host += parameters if zero.offload_param == "cpu" else 0.0
        parameters = 0.0
    if zero.offload_optimizer != "none":
        # Gradients of a partition live beside the optimizer that reads them: in fp32, and summed
        # over micro steps.
        host += (optimizer if zero.offload_optimizer == "cpu" else 0.0) + 4 * shard
        on_device = offloaded_gradients(
            zero.stage, trained, shard, width=width, accum=BYTES[grad_accum_dtype or precision]
        )
        host += step.gradients if zero.stage >= 2 and not on_device else 0.0
        optimizer, step = 0.0, StepBytes(on_device, on_device, step.buffers)
    resting = parameters + optimizer
    if zero.stage == 1 and precision == "bf16" and grad_accum_dtype == "fp32":
        resting += 4 * trained  # BF16_Optimizer's sums
    if zero.stage >= 3:
        resting += step.gradients + width * buckets["reduce"]
        # The working set: gathered layers (two: this one and the prefetched one), and those that
        # DeepSpeed does not release where the backward pass begins, since it needs them again
        # within max_reuse_distance.
        layer = (n - 2 * geometry.vocab_size * geometry.hidden_size) / max(1, geometry.num_layers)
        largest = max(layer, geometry.vocab_size * geometry.hidden_size)
        gathered = min(2 * largest + zero.max_reuse_distance / 2, zero.max_live_parameters, n)
        # One network runs at a time.
        parameters += max(
            [width * gathered, *(gathered_bytes(network, width) for network in beside)]
        )
        if zero.hpz_partition_size > 1:
            parameters += width * n / zero.hpz_partition_size

    tokens = micro_batch * exp.data.seq_len
    buffers: float = width * buckets["reduce"] * (2 if buckets["overlap"] else 1)
    buffers += width * buckets["allgather" if zero.stage < 3 else "prefetch"]
    buffers += step.buffers
    if width < 4 and zero.extra.get("communication_data_type") == "fp32":
        # Each bucket is copied to fp32 on its way.
        buffers += 4 * (min(trained, ALL_REDUCED_ELEMENTS) if step.buffers else buckets["reduce"])
    if world_size == 1:
        buffers = 0.0
    activations = 0.0
    # One backward pass serves all that are trained.
    for shape in (geometry, *(network.shape for network in beside if network.shape)):
        activations += _activation_bytes(exp.model, shape, tokens, width, accelerator)
        activations += _dense_mask_bytes(exp.model, exp.data, shape, tokens, width, accelerator)
        if adapter:
            # With activation checkpointing one layer at a time.
            layers = 1 if exp.model.activation_checkpointing == "none" else shape.num_layers
            activations += width * tokens * adapter.activations / max(1, layers)
            activations += width * adapter.unpacked
    of_logits = 0.0
    if logits != NO_LOGITS:
        fused = logits == SUMMED and fused_loss(exp.model, device.accelerator)
        of_logits = _logits_bytes(geometry, adapter, tokens, width, accelerator, fused=fused)
        # Of a frozen network, at every target: a loss may compare them with the trained one's.
        of_frozen = (
            tokens * network.vocab_size * beside_width(network, width) for network in beside
        )
        of_logits += max(of_frozen, default=0)
    in_backward, in_update = activations + of_logits + buffers, step.update - step.gradients
    freed = 0.0 if accelerator.is_gpu else max(0.0, min(in_backward, in_update))
    memory = MemoryPlan(
        device=device_name,
        parameters_gib=parameters / GIB,
        gradients_gib=step.gradients / GIB,
        optimizer_gib=optimizer / GIB,
        activations_gib=activations / GIB,
        logits_gib=of_logits / GIB,
        buffers_gib=buffers / GIB,
        context_gib=accelerator.context_gib + freed / GIB,
        host_gib=host * slots / GIB,
        capacity_gib=device.memory_gib,
        update_gib=max(0.0, in_update - in_backward) / GIB,
        saves_host_gib=_save_bytes(exp.checkpoint, exp.optim, shard, precision) * slots / GIB,
    )
    return with_drawing(memory, samples, resting, sharded=zero.stage >= 3, world=world_size)


def samples_of(exp: Experiment, plan: Plan) -> Samples | None:
    """What a step of the plan draws; None where it draws nothing, or its network is not known."""
    shape = model_geometry(exp.model)
    if plan.drawn is None or shape is None:
        return None
    width, prompts = BYTES[plan.precision], plan.batch.global_batch
    return Samples(shape, width, prompts, plan.drawn, exp.data.seq_len)


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
        weights = samples.width * samples.shape.num_parameters
        free = (memory.capacity_gib - memory.context_gib) * GIB - resting
        size += weights if not memory.capacity_gib or 2 * weights <= free else 0
    training_gib = memory.total_gib - memory.context_gib
    return replace(memory, drawing_gib=max(0.0, size / GIB - training_gib))


def with_size(network: NetworkBeside, shape: Geometry | None) -> NetworkBeside:
    """A frozen network with the size of a geometry; None: not known."""
    if shape is None:
        return network
    embedding = shape.vocab_size * shape.hidden_size
    layer = (shape.num_parameters - 2 * embedding) // max(1, shape.num_layers)
    return replace(
        network,
        num_parameters=shape.num_parameters,
        largest=max(layer, embedding),
        vocab_size=shape.vocab_size,
    )


def with_trained_size(
    network: NetworkBeside, model: ModelConfig, adapter: AdapterConfig
) -> NetworkBeside:
    """A trained network with the size of ``model`` with a score in the place of its output head;
    unchanged where it is not known."""
    shape, of_adapter = model_geometry(model), adapter_size(model, adapter)
    if shape is None:
        return network
    embedding = shape.vocab_size * shape.hidden_size
    is_tied = shape.num_looked_up < embedding  # the embedding is the head, too, and stays
    shape = replace(
        shape,
        num_parameters=shape.num_parameters - (0 if is_tied else embedding) + shape.hidden_size,
        num_looked_up=shape.num_looked_up + (embedding if is_tied else 0),
    )
    sized = replace(with_size(network, shape), shape=shape, vocab_size=0)
    if of_adapter is None:
        frozen = shape.num_parameters - (trained_parameters(model, adapter) or shape.num_parameters)
        return replace(sized, num_trained=shape.num_parameters - max(0, frozen))
    return replace(
        sized,
        num_parameters=shape.num_parameters + of_adapter.added,
        num_trained=of_adapter.trained + shape.hidden_size,
        num_packed=of_adapter.quantized,
    )


def packed_bytes(weights: int, *, double: bool) -> float:
    """Bytes of weights in 4 bits, with a scale for each 64 of them, fp32; or in 8 bits, and one for
    each 256 of these."""
    return weights * (0.5 + ((1 + 4 / 256) if double else 4) / 64)


def beside_width(network: NetworkBeside, width: int) -> int:
    """Bytes of an element. ``width``: bytes of an element of the run."""
    return BYTES[network.precision] if network.precision else width


def beside_bytes(network: NetworkBeside, exp: Experiment, width: int, world_size: int) -> float:
    """Bytes of its weights on one rank: ZeRO-3 shards them, at other stages each rank has all, as
    it has those in 4 bits."""
    shards = world_size if exp.zero.stage >= 3 else 1
    num_unpacked = network.num_parameters - network.num_packed
    packed = packed_bytes(network.num_packed, double=exp.adapter.double_quant)
    return beside_width(network, width) * num_unpacked / shards + packed


def gathered_bytes(network: NetworkBeside, width: int) -> float:
    """Bytes that ZeRO-3 gathers while it runs: the layer that computes and the next one."""
    elements = min(2 * network.largest, network.num_parameters)
    return float(beside_width(network, width) * elements)


def before_training_gib(
    network: NetworkBeside, exp: Experiment, precision: str, world_size: int
) -> float:
    """GiB that a rank needs for a network that computes stored columns, before training."""
    width = BYTES[precision]
    size_bytes = beside_bytes(network, exp, width, world_size)
    if exp.zero.stage >= 3:
        size_bytes += gathered_bytes(network, width)
    return size_bytes / GIB + 1.0


def optimizer_bytes(kind: str, precision: str) -> int:
    """Bytes of the states and the master weight of a trained element."""
    return state_bytes(kind) + (0 if precision == "fp32" else 4)


def adamw_elements(geometry: Geometry, trained: int) -> int:
    """Elements that are AdamW's beside Muon: what is outside the layers."""
    outside = geometry.vocab_size * geometry.hidden_size
    outside = max(outside, geometry.num_looked_up + outside * (geometry.num_looked_up > 0))
    return min(outside, trained)


@dataclass(frozen=True)
class StepBytes:
    """Bytes of what one optimizer step takes beside parameters, optimizer and activations."""

    gradients: float
    """There when the last backward pass ends."""
    update: float
    """The most during the update, gradients included."""
    buffers: float = 0.0
    """Reductions that DeepSpeed's bucket sizes do not bound."""


def step_bytes(
    zero: ZeroConfig,
    optim: OptimConfig,
    n: float,
    shard: float,
    *,
    width: int,
    accum: int,
    bf16: bool,
    cuda: bool,
) -> StepBytes:
    """The bytes of a step as DeepSpeed 0.19.8 takes it; ``accum`` is the width of the sums over
    micro steps."""
    stage, offload = zero.stage, zero.offload_optimizer != "none"
    optimizer = optimizer_of(optim.kind)
    temporary = optimizer.temporary_bytes + (0 if cuda or offload else optimizer.unfused_bytes)
    half = width < 4
    if stage == 0:
        bucket = width * min(n, ALL_REDUCED_ELEMENTS)
        return StepBytes(width * n, (width + (4 if half else 0)) * n, bucket)
    if stage == 1 and half and accum == 4:
        if bf16 and not offload:
            # BF16_Optimizer: fp32 sums whole on every rank, beside the gradients; a bucket is
            # flattened in fp32 and reduced in bf16.
            gradients = (4 + width) * n
            # All matrices are one tensor: where it is larger than a bucket, it is reduced alone.
            reduced = 6 * n if n <= ALL_REDUCED_ELEMENTS else width * n
            return StepBytes(gradients, gradients + temporary * shard, reduced)
        return StepBytes((4 + width) * n, 4 * n + (4 + temporary) * shard)
    if stage == 1:
        return StepBytes(width * n + width * shard, _flat_update(width, temporary) * shard)
    if stage == 2:
        # fp32 sums of half-precision gradients lie flat already, ready for the optimizer.
        flat = 4 + temporary if half and accum == 4 else _flat_update(width, temporary)
        return StepBytes(accum * shard, flat * shard)
    group = min(shard, zero.sub_group_size)
    flat = max(width + 4, 4 + temporary) if half else 4 + temporary
    return StepBytes(accum * shard, accum * shard + flat * group)


def offloaded_gradients(stage: int, n: float, shard: float, *, width: int, accum: int) -> float:
    """Bytes of gradients on the device beside an offloaded optimizer: at stage 1 all of them, until
    the last micro step of a step has ended; and fp32 sums of gradients in 16 bits, which stages 1
    and 2 copy to the host for the update alone."""
    if stage == 3:
        return 0.0
    compact = width < accum
    sums = accum * shard if compact else 0.0
    return sums + (max(width, accum) * n if stage == 1 else 0.0)


def _flat_update(width: int, temporary: int) -> int:
    """Bytes an element of a partition at stages 1 and 2: the gradients, a flat copy of them, that
    in fp32, temporaries of the optimizer."""
    return width + (max(width + 4, 4 + temporary) if width < 4 else 4 + temporary)


def _save_bytes(
    checkpoint: CheckpointConfig, optim: OptimConfig, shard: float, precision: str
) -> float:
    """Bytes in host memory of what a checkpoint saved in the background holds."""
    if checkpoint.background == "never" or not (checkpoint.every_steps or checkpoint.every_minutes):
        return 0.0
    return (optimizer_bytes(optim.kind, precision) + (4 if precision == "fp32" else 0)) * shard


def _logits_bytes(
    geometry: Geometry,
    adapter: AdapterSize | None,
    tokens: int,
    width: int,
    accelerator: Accelerator,
    *,
    fused: bool,
) -> float:
    """Logits and their gradient, every position a target; the chunk that is in fp32; and the
    hidden states that were picked, with their gradient."""
    logits_bytes = float(tokens * geometry.vocab_size * width)
    chunk = min(accelerator.loss_chunk_bytes, logits_bytes * 4 / width)
    picked = 2 * tokens * geometry.hidden_size * width
    if not fused:
        return 2 * logits_bytes + chunk + picked
    head = geometry.vocab_size * geometry.hidden_size
    # The head's gradient is there from the forward pass on, summed over chunks in fp32.
    gradient = head * (width if logits_bytes <= FUSED_LOSS_CHUNK_BYTES else 4 + width)
    if adapter is not None and not adapter.trains_head:
        gradient = 0
    return 2 * min(logits_bytes, FUSED_LOSS_CHUNK_BYTES) + chunk + picked + gradient


@dataclass(frozen=True)
class LayerActivations:
    """Bytes a token that one layer keeps for the backward pass."""

    all: int
    selective: int
    """Inputs and the results of matrix products and attention only."""
    full: int
    """The layer's input."""


def layer_activations(geometry: Geometry, width: int, *, mask_width: int = 1) -> LayerActivations:
    """The activations that the operators of one layer save in training, without a dense attention
    mask.

    ``mask_width``: bytes of an element of a dropout mask (CUDA 1; a CPU keeps it in the
    activations' dtype).
    """
    g, hidden = geometry, geometry.hidden_size
    attention = width * (2 * g.query_size + 2 * g.kv_size) + 4 * g.num_heads
    dropout = 2 * hidden * mask_width if g.dropout else 0
    if g.block == "llama":
        # RMSNorm: its input in fp32, the normalised input, one number; and its output.
        norms = 2 * (hidden * (4 + 2 * width) + 4)
        if g.qk_norm:
            norms += (g.query_size + g.kv_size) * (4 + width)
            norms += 4 * (g.num_heads + g.num_kv_heads)
        all_ = norms + attention + 4 * width * g.intermediate_size
        products = g.query_size + 2 * g.kv_size + 2 * hidden + 2 * g.intermediate_size
    else:
        # LayerNorm: input, output, two numbers.
        norms = 2 * (2 * hidden * width + 2 * width)
        all_ = norms + attention + g.activation_tensors * width * g.intermediate_size + dropout
        products = g.query_size + 2 * g.kv_size + 2 * hidden + g.intermediate_size
    selective = width * (hidden + products + g.query_size) + 4 * g.num_heads
    return LayerActivations(all_, min(all_, selective), width * hidden)


def _activation_bytes(
    model: ModelConfig, geometry: Geometry, tokens: int, width: int, accelerator: Accelerator
) -> float:
    """Saved for the backward pass, with attention that keeps no ``seq_len``^2 scores."""
    mask_width = 1 if accelerator.is_gpu else width
    layer = layer_activations(geometry, width, mask_width=mask_width)
    layer_bytes = {
        "none": layer.all,
        "selective": layer.selective,
        "full": layer.full,
    }[model.activation_checkpointing]
    total = geometry.num_layers * layer_bytes
    if model.activation_checkpointing != "none":
        total += layer.all  # the one that is computed again
    # The last norm, and what the backward pass of one layer has in flight.
    total += geometry.hidden_size * (4 + 2 * width)
    total += width * (3 * geometry.intermediate_size + 2 * geometry.hidden_size)
    return float(tokens * total)


def _dense_mask_bytes(
    model: ModelConfig,
    data: DataConfig,
    geometry: Geometry,
    tokens: int,
    width: int,
    accelerator: Accelerator,
) -> float:
    """Masks of packed rows, [B, 1, T, T]: one as it is made, and one in the dtype of the
    activations that each layer keeps. Attention in both directions always has one; and scores
    where no kernel does without."""
    attention = model.attention
    squares = float(tokens) * data.seq_len
    if geometry.keeps_scores:
        layers = 1 if model.activation_checkpointing == "full" else geometry.num_layers
        return squares * (width + 2 * width * geometry.num_heads * layers)
    dense = attention in ("sdpa", "eager") or (attention == "auto" and not accelerator.is_gpu)
    if not (dense or not geometry.causal):
        return 0.0
    if data.layout == "padded" or data.packing == "none":
        return 0.0
    if attention == "eager":  # scores of all heads, twice, and one mask for all layers
        return squares * (width + 2 * width * geometry.num_heads * geometry.num_layers)
    layers = geometry.num_layers if model.activation_checkpointing == "none" else 1
    return squares * (1 + width * layers)


# --- By a trace ----------------------------------------------------------------------------------

# ``llmx.lifecycle.knowledge`` has traces made and hands them over; without them the plan keeps the
# formula above. In what gradients are summed is decided by the formula alone, so that a run does
# not depend on what this machine has traced.


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
    """The memory of the ranks on one type of device, by a trace. ``context_gib``: measured; None:
    assumed."""
    config = exp.hardware.devices[device]
    accelerator = ACCELERATORS[config.accelerator]
    peaks = peak_of(trace, rules_of(exp, plan))
    saves = next((part.saves_host_gib for part in plan.memory if part.device == device), 0.0)
    part = {name: size / GIB for name, size in peaks.at.items()}
    memory = MemoryPlan(
        device=device,
        parameters_gib=part["parameters"],
        gradients_gib=part["gradients"],
        optimizer_gib=part["optimizer"],
        activations_gib=part["activations"],
        logits_gib=0.0,
        buffers_gib=part["buffers"],
        context_gib=(context_gib or accelerator.context_gib)
        + (0.0 if accelerator.is_gpu else peaks.freed / GIB),
        host_gib=peaks.host * plan.slots_on(device) / GIB,
        capacity_gib=config.memory_gib,
        update_gib=part["update"],
        saves_host_gib=saves,
        traced=True,
    )
    samples = None if plan.rollout_hosts else samples_of(exp, plan)
    sharded = exp.zero.stage >= 3
    return with_drawing(memory, samples, peaks.current, sharded=sharded, world=plan.world_size)
