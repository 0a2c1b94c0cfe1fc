"""The only writer of DeepSpeed's JSON. Every value explicit, never ``"auto"``.

``python -m llmx plan ...`` writes it to ``RUN_DIR/ds_config.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from llmx.config.accelerators import ACCELERATORS
from llmx.config.build import shown
from llmx.config.model_rules import whole_number
from llmx.config.schema import ModelConfig, OptimConfig, ZeroConfig
from llmx.errors import ConfigError, did_you_mean
from llmx.plan.types import Plan


def bucket_sizes(model: ModelConfig, zero: ZeroConfig, accelerator: str) -> dict[str, int]:
    """Elements of the communication buckets: from the model's width, unless given.

    DeepSpeed's default of 5e8 costs about 9 GB with ``overlap_comm``; the square of the
    width is one large matrix, which is what keeps the network busy.
    """
    hidden = whole_number(model.network, "hidden_size", "n_embd", "d_model") or 4096
    reduce = min(max(hidden**2, 2_000_000), 200_000_000)
    gpu = ACCELERATORS[accelerator].is_gpu
    overlap = gpu if zero.overlap_comm is None else zero.overlap_comm
    return {
        "reduce": zero.reduce_bucket_size or reduce,
        # DeepSpeed takes even sizes only.
        "allgather": -(-(zero.allgather_bucket_size or zero.reduce_bucket_size or reduce) // 2) * 2,
        "prefetch": _given(zero.prefetch_bucket_size, int(0.9 * reduce)),
        "persistence": _given(zero.param_persistence_threshold, 10 * hidden),
        "overlap": int(overlap),
    }


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def ds_config(
    model: ModelConfig, zero: ZeroConfig, optim: OptimConfig, plan: Plan
) -> dict[str, Any]:
    """The configuration that ``deepspeed.initialize`` gets for this plan.

    DeepSpeed asserts ``train_batch = micro x accumulation x world``. With unequal micro
    batches no such micro exists, so it is given a consistent triple with micro 1: it uses it
    for nothing but that assertion, and the loop's own slices are the truth. A rank with fewer
    micro steps tells its engine so (``llmx.train.engine``).
    """
    micro = set(plan.batch.micro_batches)
    micro_batch = micro.pop() if len(micro) == 1 and not plan.batch.sizes else 1
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "train_batch_size": micro_batch * plan.batch.accumulation * plan.world_size,
        "gradient_clipping": float(optim.clip_norm),
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        # Its own throughput lines would be a second, wrong truth.
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
        # Waits for the device twice in every micro step.
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "data_types": {"grad_accum_dtype": plan.grad_accum_dtype},
        "bf16": {"enabled": plan.precision == "bf16"},
        "fp16": _fp16(plan.precision),
        # The optimizer is PyTorch's unless asked for: no compiler needed on any host. DeepSpeed
        # would refuse it for an offload, where it expects its own; PyTorch's is fused there, too.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(model, zero, plan),
    }
    return merge_extra(config, zero.extra)


def _fp16(precision: str) -> dict[str, Any]:
    return {
        "enabled": precision == "fp16",
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1.0,
    }


def _zero(model: ModelConfig, zero: ZeroConfig, plan: Plan) -> dict[str, Any]:
    sizes = bucket_sizes(model, zero, plan.accelerator)
    section: dict[str, Any] = {
        "stage": zero.stage,
        "contiguous_gradients": True,
        "overlap_comm": bool(sizes["overlap"]),
        "reduce_scatter": True,
        "reduce_bucket_size": sizes["reduce"],
        "allgather_partitions": True,
        "allgather_bucket_size": sizes["allgather"],
    }
    if zero.offload_optimizer != "none":
        section["offload_optimizer"] = _offload(zero, zero.offload_optimizer)
    if zero.stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": sizes["prefetch"],
            "stage3_param_persistence_threshold": sizes["persistence"],
            "stage3_max_live_parameters": zero.max_live_parameters,
            "stage3_max_reuse_distance": zero.max_reuse_distance,
            "sub_group_size": zero.sub_group_size,
            # The export gathers parameter by parameter; this would build it whole on rank 0.
            "stage3_gather_16bit_weights_on_model_save": False,
            "zero_hpz_partition_size": zero.hpz_partition_size,
            "zero_quantized_weights": zero.quantized_weights,
            "zero_quantized_gradients": zero.quantized_gradients,
        }
        if zero.offload_param != "none":
            section["offload_param"] = _offload(zero, zero.offload_param)
    return section


def _offload(zero: ZeroConfig, device: str) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device, "pin_memory": zero.pin_memory}
    if device == "nvme":
        section["nvme_path"] = zero.nvme_path
    return section


def merge_extra(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """``zero.extra`` merged in; raises ConfigError with every key that llmx does not take."""
    if problems := list(extra_problems(extra)):
        raise ConfigError("\n".join(problems))
    merged = dict(config)
    for key, value in extra.items():
        section = merged.get(key)
        merged[key] = section | value if isinstance(section, dict) else value
    return merged


# --- zero.extra ----------------------------------------------------------------------------------

# A key is taken where it has its effect in llmx and leaves the plan, the gradient and the
# checkpoints right: each was tried with DeepSpeed 0.19.8 (``same_training`` in
# ``tests/programs/engines.py``). DeepSpeed itself checks the values, when the ranks start. A test
# compares the names with what the installed DeepSpeed reads. Nothing here imports it.

TAKEN = frozenset(
    f"{section}{name}"
    for section, names in {
        "": "communication_data_type disable_python_gc log_level memory_breakdown "
        "wall_clock_breakdown",
        "fp16.": "consecutive_hysteresis hysteresis initial_scale_power loss_scale "
        "loss_scale_window min_loss_scale",
        "aio.": "block_size intra_op_parallelism overlap_events queue_depth single_submit",
        "zero_optimization.": "contiguous_gradients enable_sanity_checks ignore_unused_parameters "
        "leaf_module log_trace_cache_warnings memory_efficient_linear parameter_alignment "
        "reduce_scatter round_robin_gradients stage3_allgather_sequential "
        "stage3_model_persistence_threshold stage3_use_all_reduce_for_fetch_params "
        "use_multi_rank_bucket_allreduce",
    }.items()
    for name in names.split()
)
"""Keys that ``zero.extra`` may set, by their place in DeepSpeed's configuration."""
SECTIONS = frozenset(place.split(".")[0] for place in TAKEN if "." in place)

INSTEAD = {
    "activation_checkpointing": "model.activation_checkpointing=selective or full",
    "amp": "precision=bf16 or fp16",
    "bf16": "precision=bf16",
    "bfloat16": "precision=bf16",
    "checkpoint": "checkpoint.*",
    "compile": "model.compile=true",
    "csv_monitor": "tracking=csv",
    "data_types": "zero.grad_accum_dtype",
    "dataloader_drop_last": "data.last_batch=drop",
    "elasticity": "hardware.* of a resume",
    "fp16.enabled": "precision=fp16",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "optim.clip_norm",
    "optimizer": "optim.kind",
    "pipeline": "zero=stage3",
    "scheduler": "optim.schedule",
    "sequence_parallel_size": "zero=stage3",
    "sparse_attention": "model.attention",
    "steps_per_print": "task.log_every_steps",
    "tensor_parallel": "zero=stage3",
    "tensorboard": "tracking=tensorboard",
    "torch_autocast": "precision=fp32, bf16 or fp16",
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "vocabulary_size": "model.pad_vocab_to_multiple_of",
    "wandb": "tracking=wandb",
    "zero_force_ds_cpu_optimizer": "optim.kind=cpu_adam",
    "zero_optimization.cpu_offload": "zero.offload_optimizer=cpu",
    "zero_optimization.cpu_offload_param": "zero.offload_param=cpu",
    "zero_optimization.mics_shard_size": "zero=stage3_zeropp",
    "zero_optimization.stage": "zero=stage0, stage1, stage2 or stage3",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "task.save_model",
    "zero_optimization.zenflow": "zero.offload_optimizer=cpu",
}
"""Place in DeepSpeed's configuration -> what to set in llmx, where it has another name."""
OWN_KEYS = frozenset(field.name for field in fields(ZeroConfig)) - {"extra"}


def extra_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    """One line for each key of ``zero.extra`` that llmx does not take, with the fix."""
    for key, value in extra.items():
        if key not in SECTIONS:
            yield from _problem(key)
        elif isinstance(value, dict):
            for name in value:
                yield from _problem(f"{key}.{name}")
        else:
            yield f"zero.extra.{key}={shown(value)}: must be a mapping of DeepSpeed's keys."


def _problem(place: str) -> Iterator[str]:
    if place in TAKEN:
        return
    section, _, name = place.rpartition(".")
    own = name.removeprefix("stage3_").removeprefix("zero_")
    if place in INSTEAD:
        fix = f"is not taken from here. Set {INSTEAD[place]} instead."
    elif section == "zero_optimization" and own in OWN_KEYS:
        fix = f"is not taken from here. Set zero.{own} instead."
    elif f"{section}.stage3_{name}" in TAKEN:
        fix = f"write it as {section}.stage3_{name}."
    else:
        names = [taken.rpartition(".")[2] for taken in TAKEN if taken.rpartition(".")[0] == section]
        if not section:
            names += SECTIONS
        fix = (
            "is not a key of DeepSpeed that llmx takes: it would have no effect here, or make the "
            f"plan, the gradient or the checkpoints wrong.{did_you_mean(name, names)} Leave it "
            f"out. {f'zero.extra.{section}'.rstrip('.')} takes {', '.join(sorted(names))}."
        )
    yield f"zero.extra.{place}: {fix}"
