"""Predicted peak memory of a rank, by part. Pure arithmetic; says what it assumes.

States: parameters, gradients and optimizer (fp32 master, two moments) as ZeRO shards or
offloads them. Beside them what published estimates leave out: activations, logits of the
target positions, communication buckets, the CUDA context.
"""

from __future__ import annotations

from llmx.config.schema import DeviceConfig, Experiment
from llmx.plan.geometry import Geometry
from llmx.plan.types import MemoryPlan

GIB = 1024.0**3
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


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
) -> MemoryPlan:
    """Predict the peak of one rank on ``device`` and of the RAM of its host (GiB)."""
    zero, n = exp.zero, geometry.num_parameters
    width = BYTES[precision]
    optimizer_width = _optimizer_bytes(exp.optim.kind, precision)

    parameters = width * n / (world_size if zero.stage >= 3 else 1)
    gradients = width * n / (world_size if zero.stage >= 2 else 1)
    optimizer = optimizer_width * n / (world_size if zero.stage >= 1 else 1)
    host = 0.0
    if zero.offload_param != "none":
        host += parameters if zero.offload_param == "cpu" else 0.0
        parameters = 0.0
    if zero.offload_optimizer != "none":
        # Gradients of a partition live beside the optimizer that reads them.
        host += (optimizer if zero.offload_optimizer == "cpu" else 0.0) + gradients
        optimizer = gradients = 0.0
    if zero.stage >= 3:
        # The working set: gathered layers (two: this one and the prefetched one).
        layer = (n - 2 * geometry.vocab_size * geometry.hidden_size) / max(1, geometry.num_layers)
        largest = max(layer, geometry.vocab_size * geometry.hidden_size)
        parameters += width * min(2 * largest, zero.max_live_parameters, n)
        if zero.hpz_partition_size > 1:
            parameters += width * n / zero.hpz_partition_size

    tokens = micro_batch * exp.data.seq_len
    buffers: float = width * buckets["reduce"] * (2 if buckets["overlap"] else 1)
    buffers += width * buckets["allgather" if zero.stage < 3 else "prefetch"]
    if world_size == 1:
        buffers = 0.0
    return MemoryPlan(
        device=device_name,
        parameters_gib=parameters / GIB,
        gradients_gib=gradients / GIB,
        optimizer_gib=optimizer / GIB,
        activations_gib=_activation_bytes(exp, geometry, tokens, width) / GIB,
        # Logits in fp32, their gradient, and the 16-bit copy the head wrote.
        logits_gib=tokens * geometry.vocab_size * (8 + width) / GIB,
        buffers_gib=buffers / GIB,
        context_gib=1.0 if device.accelerator == "cuda" else 0.4,
        host_gib=host * slots / GIB,
        capacity_gib=device.memory_gib,
    )


def _optimizer_bytes(kind: str, precision: str) -> int:
    moments = 0 if kind == "sgd" else 8
    return moments + (0 if precision == "fp32" else 4)


def _activation_bytes(exp: Experiment, geometry: Geometry, tokens: int, width: int) -> float:
    """Saved for the backward pass, with fused attention (no seq_len^2 scores)."""
    hidden, ffn = geometry.hidden_size, geometry.intermediate_size
    layer = tokens * width * (10 * hidden + 2 * geometry.kv_size + 4 * ffn)
    if exp.model.activation_checkpointing:
        return geometry.num_layers * tokens * width * hidden + layer
    return float(geometry.num_layers * layer)


def cheapest_fit(exp: Experiment) -> str:
    """What to try next when the plan does not fit: the ladder, cheapest step first."""
    zero = exp.zero
    if exp.batch.micro_batch > 1:
        return "batch.micro_batch=1 (accumulation rises by itself)"
    if not exp.model.activation_checkpointing:
        return "model.activation_checkpointing=true"
    if zero.stage < 2:
        return "zero=stage2"
    if zero.stage == 2 and zero.offload_optimizer == "none":
        return "zero=stage2_offload"
    if zero.stage < 3:
        return "zero=stage3"
    if zero.offload_optimizer == "none" or zero.offload_param == "none":
        return "zero=stage3_offload"
    if zero.offload_param != "nvme":
        return "zero=infinity zero.nvme_path=/path/on/a/fast/disk"
    return "more or larger devices, or a shorter data.seq_len"
