"""Predicted tokens/s of a plan, for an order of candidates alone. Pure.

Which of two configurations is tried first (``python -m llmx tune``), advised, or taken (``auto``).
"""

from __future__ import annotations

from llmx.config.schema import Experiment
from llmx.plan.by_device import checkpointing_on
from llmx.plan.geometry import model_geometry
from llmx.plan.types import Plan

NOMINAL_TFLOPS = {"cuda": 100.0, "cpu": 0.1}
EFFICIENCY = 0.4
LAYER_S = {"cuda": 3e-4, "cpu": 1e-4}
"""Of a layer, forward and back, however few tokens it is given."""
LINK_BYTES_PER_S = {"cuda": 50e9, "cpu": 2e9}
"""Between the ranks of a host; between hosts a tenth."""
MEMORY_BYTES_PER_S = {"cuda": 1000e9, "cpu": 10e9}
HOST_BYTES_PER_S = 12e9
"""Between a GPU and its host's RAM, and of an update on the host's processors."""
RECOMPUTED = {"none": 1.0, "selective": 1.1, "full": 4 / 3}


def tokens_per_s(exp: Experiment, plan: Plan) -> float:
    """By the predicted time of a step, else by rules of thumb. It puts candidates in an order, and
    promises nothing."""
    found = plan.time.tokens_per_s if plan.time is not None else 0.0
    found = found or _by_rules_of_thumb(exp, plan)
    # Of buckets the plan knows no better than llmx's own choice.
    return found if exp.zero.reduce_bucket_size is None else found / 1.001


def _by_rules_of_thumb(exp: Experiment, plan: Plan) -> float:
    """Computing, what is computed again, the traffic of each ZeRO stage, the update, an offload:
    where the speed of a device is not known (CPU ranks)."""
    zero, world, accelerator = exp.zero, plan.world_size, plan.accelerator
    shape = model_geometry(exp.model)
    count = float(plan.num_parameters or 1e9)
    trained = float(plan.num_trained or count)
    width = 4 if plan.precision == "fp32" else 2
    peak = plan.peak_tflops / world or NOMINAL_TFLOPS[accelerator]
    layers = shape.num_layers if shape else 24
    per_token = 6.0 * count
    if shape is not None:
        per_token = shape.flops_per_token(plan.batch.seq_len, trained=plan.num_trained)
    again, samples = max(
        ((RECOMPUTED[checkpointing_on(exp, rank.device)], rank.micro_batch) for rank in plan.ranks),
        key=lambda one: one[0] * one[1],
    )
    tokens = samples * plan.batch.seq_len
    micro_step = again * per_token * tokens / (peak * 1e12 * EFFICIENCY)
    micro_step += again * layers * LAYER_S[accelerator]
    steps = plan.batch.accumulation

    traffic = 0.0
    if world > 1:
        link = LINK_BYTES_PER_S[accelerator] / (10.0 if len(plan.hosts) > 1 else 1.0)
        times = {0: 2.0, 1: 2.0, 2: 1.0 + steps, 3: 3.0 * steps}[zero.stage]
        carried = trained if zero.stage < 3 else (2 * count + trained) / 3
        traffic = times * width * carried / link
    shard = trained / (world if zero.stage >= 1 else 1)
    if zero.offload_optimizer == "none":
        update = 20.0 * shard / MEMORY_BYTES_PER_S[accelerator]
    else:
        update = (20.0 + 2 * width) * shard / HOST_BYTES_PER_S
        update += 4.0 * shard * steps / HOST_BYTES_PER_S
    if zero.offload_param != "none":
        update += 2.0 * width * count / world * steps / HOST_BYTES_PER_S
    seconds = steps * micro_step + traffic + update
    return plan.batch.tokens_per_step / seconds
