"""The only writer of DeepSpeed's JSON. Every value explicit, never ``"auto"``.

``python -m llmx plan ...`` writes it to ``RUN_DIR/ds_config.json``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llmx.config.accelerators import ACCELERATORS
from llmx.config.build import shown
from llmx.config.schema import ModelConfig, OptimConfig, ZeroConfig
from llmx.errors import ConfigError, did_you_mean
from llmx.plan.geometry import model_geometry
from llmx.plan.types import Plan


def bucket_sizes(model: ModelConfig, zero: ZeroConfig, accelerator: str) -> dict[str, int]:
    """Elements of the communication buckets: from the model's width, unless given.

    DeepSpeed's default of 5e8 costs about 9 GB with ``overlap_comm``; the square of the
    width is one large matrix, which is what keeps the network busy.
    """
    geometry = model_geometry(model)
    square = geometry.hidden_size**2 if geometry else 4096**2
    reduce = min(max(square, 2_000_000), 200_000_000)
    hidden = geometry.hidden_size if geometry else 4096
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
    if problems := list(extra_problems(extra, config)):
        raise ConfigError("\n".join(problems))
    merged = dict(config)
    for key, value in extra.items():
        section = merged.get(key)
        merged[key] = section | value if isinstance(section, dict) else value
    return merged


# --- zero.extra ----------------------------------------------------------------------------------

# A key is taken where it has its effect in llmx and leaves the plan right: each was tried at the
# stages that stand beside it (``same_training`` in ``tests/programs/engines.py``). Every other key
# of DeepSpeed 0.19.8 stands in ``REFUSED`` with its reason; a test compares both tables with what
# the installed DeepSpeed reads (``tests/unit/test_plan_ds_config.py``). Nothing here imports it.

FLAG = "true or false"
WHOLE = "a whole number of at least 0"
COUNT = "a whole number of at least 1"
NUMBER = "a number of at least 0"
LEAVES = "lists of texts under classes, names or name_suffixes"


@dataclass(frozen=True)
class Taken:
    """A key of ``zero.extra``."""

    values: str | tuple[str, ...] = FLAG
    """One of the kinds above, or the words that it takes."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """The ZeRO stages at which DeepSpeed reads it."""
    needs: str = ""
    """``fp16`` (the run's precision) or ``nvme`` (something is offloaded there); empty: nothing."""
    logs: bool = False
    """It only writes into DeepSpeed's log, at level info."""


SHARDED, GRADIENTS, PARAMETERS = (1, 2, 3), (1, 2), (3,)

TAKEN = {
    "communication_data_type": Taken(("fp32", "fp16", "bf16")),
    "disable_python_gc": Taken(),
    "log_level": Taken(("debug", "info", "warning", "error", "critical")),
    "memory_breakdown": Taken(logs=True),
    "wall_clock_breakdown": Taken(logs=True),
    "fp16.consecutive_hysteresis": Taken(FLAG, SHARDED, "fp16"),
    "fp16.hysteresis": Taken(COUNT, SHARDED, "fp16"),
    "fp16.initial_scale_power": Taken(WHOLE, needs="fp16"),
    "fp16.loss_scale": Taken(NUMBER, needs="fp16"),
    "fp16.loss_scale_window": Taken(COUNT, needs="fp16"),
    "fp16.min_loss_scale": Taken(COUNT, needs="fp16"),
    "aio.block_size": Taken(COUNT, needs="nvme"),
    "aio.intra_op_parallelism": Taken(COUNT, needs="nvme"),
    "aio.overlap_events": Taken(needs="nvme"),
    "aio.queue_depth": Taken(COUNT, needs="nvme"),
    "aio.single_submit": Taken(needs="nvme"),
    "zero_optimization.contiguous_gradients": Taken(stages=SHARDED),
    "zero_optimization.enable_sanity_checks": Taken(stages=PARAMETERS),
    "zero_optimization.ignore_unused_parameters": Taken(stages=(2,)),
    "zero_optimization.leaf_module": Taken(LEAVES, stages=PARAMETERS),
    "zero_optimization.log_trace_cache_warnings": Taken(stages=PARAMETERS),
    "zero_optimization.memory_efficient_linear": Taken(stages=PARAMETERS),
    "zero_optimization.parameter_alignment": Taken(stages=GRADIENTS),
    "zero_optimization.reduce_scatter": Taken(stages=SHARDED),
    "zero_optimization.round_robin_gradients": Taken(stages=GRADIENTS),
    "zero_optimization.stage3_allgather_sequential": Taken(stages=PARAMETERS),
    "zero_optimization.stage3_model_persistence_threshold": Taken(WHOLE, stages=PARAMETERS),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Taken(stages=PARAMETERS),
    "zero_optimization.use_multi_rank_bucket_allreduce": Taken(stages=GRADIENTS),
}
"""By its place in DeepSpeed's configuration."""

_PARALLEL = (
    "every rank of llmx is a data-parallel one, and the batch is counted so; there is no tensor, "
    "sequence, expert or pipeline parallelism. Use zero=stage3 for a model that does not fit."
)
_CHECKPOINTS = "llmx writes checkpoints of its own. Set checkpoint.*."
_TRACKERS = "a second record beside metrics.jsonl. Use tracking=all, or tracking.kinds."
_COMPUTED = "llmx computes this; set {} instead."
_LOSS = (
    "llmx scales the loss so that DeepSpeed's mean over the ranks is that over target tokens; this "
    "would change the gradient. Leave it out; in fp16 the loss scale avoids overflows."
)
_MASTER = (
    "llmx keeps master weights and optimizer state in fp32; the plan and the checkpoints count on "
    "it. For less memory set zero.offload_optimizer=cpu."
)
_PRECISION = "set precision=fp32, bf16 or fp16 instead."
_UNUSED_OPTIMIZER = "llmx gives DeepSpeed its optimizer. Set optim.kind."
_ONLY_DEEPSPEED = "belongs to DeepSpeed's own checkpoints. llmx writes its own: checkpoint.*."
_NO_COMPILE = (
    "acts in DeepSpeed's engine.compile(), which llmx does not call. Set model.compile=true."
)

REFUSED = {
    "activation_checkpointing": "acts in DeepSpeed's own layers only. Set "
    "model.activation_checkpointing=selective or full.",
    "amp": "DeepSpeed 0.19 has no apex AMP; set precision=fp16 or precision=bf16.",
    "autotuning": "starts runs of its own. Plan first (python -m llmx plan), or sweep "
    "batch.micro_batch.",
    "bf16": "llmx writes this section. " + _PRECISION.capitalize(),
    "bf16.bf16_master_weights_and_grads": _MASTER,
    "bf16.bf16_optimizer_states": _MASTER,
    "bf16.check_grad_overflow": "without the check a gradient that overflowed goes into the "
    "weights and the next checkpoint. Leave it out.",
    "bf16.enabled": _PRECISION.capitalize(),
    "bf16.immediate_grad_update": "the memory plan does not know it. Leave it out, or set "
    "zero.grad_accum_dtype=precision to need less memory.",
    "bfloat16": "The section is called bf16; set precision=bf16.",
    "checkpoint": _CHECKPOINTS,
    "comet": _TRACKERS,
    "comms_logger": "its summary is printed by a call that llmx does not make. Use "
    "zero.extra.wall_clock_breakdown=true with zero.extra.log_level=info.",
    "compile": _NO_COMPILE,
    "compression_training": "Removed from DeepSpeed; compress the exported model instead.",
    "csv_monitor": _TRACKERS,
    "curriculum_learning": "Removed from DeepSpeed; order the data before training.",
    "data_efficiency": "acts in DeepSpeed's data loader. llmx has its own: data.*.",
    "data_types": _COMPUTED.format("zero.grad_accum_dtype"),
    "dataloader_drop_last": "acts in DeepSpeed's data loader. Set data.last_batch=drop.",
    "datastates_ckpt": _CHECKPOINTS,
    "disable_allgather": "DeepSpeed 0.19.8 reads it but never uses it. Leave it out.",
    "dump_state": "prints what ds_config.json in the run directory says. Read it there.",
    "eigenvalue": "Removed from DeepSpeed, with nothing in its place.",
    "elasticity": "Removed from DeepSpeed; change hardware.* and resume at the same global batch.",
    "expert_parallel": _PARALLEL,
    "flops_profiler": "it counts modules, and not the loss and attention of llmx. mfu in "
    "metrics.jsonl is computed by llmx.",
    "fp16.auto_cast": "llmx gives the model inputs of the right type already. Leave it out.",
    "fp16.enabled": _PRECISION.capitalize(),
    "fp16.fp16_master_weights_and_grads": _MASTER,
    "gradient_accumulation_steps": _COMPUTED.format("batch.accumulation"),
    "gradient_allreduce_op": _LOSS,
    "gradient_clipping": _COMPUTED.format("optim.clip_norm"),
    "gradient_predivide_factor": _LOSS,
    "graph_harvesting": "Removed from DeepSpeed, with nothing in its place.",
    "hybrid_engine": "serves reinforcement learning with DeepSpeed's inference kernels, which "
    "llmx does not use. Leave it out.",
    "managed_gradient_accumulation": _COMPUTED.format("batch.accumulation"),
    "nebula": "Removed from DeepSpeed; checkpoints are llmx's own.",
    "optimizer": _COMPUTED.format("optim.kind"),
    "pipeline": _PARALLEL,
    "prescale_gradients": _LOSS,
    "progressive_layer_drop": "Removed from DeepSpeed, with nothing in its place.",
    "quantize_training": "Removed from DeepSpeed, with nothing in its place.",
    "scheduler": _COMPUTED.format("optim.schedule"),
    "seq_parallel_communication_data_type": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "sparse_attention": "Removed from DeepSpeed. Set model.attention.",
    "sparse_gradients": "Removed from DeepSpeed, with nothing in its place.",
    "steps_per_print": "DeepSpeed's lines would be a second, different record. Set "
    "task.log_every_steps.",
    "tensor_parallel": _PARALLEL,
    "tensorboard": "Use tracking=tensorboard.",
    "timers": "its throughput is that of DeepSpeed's batch, not of llmx's. tokens_per_s is in "
    "metrics.jsonl.",
    "torch_autocast": _PRECISION.capitalize(),
    "train_batch_size": _COMPUTED.format("batch.global_batch"),
    "train_micro_batch_size_per_gpu": _COMPUTED.format("batch.micro_batch"),
    "use_data_before_expert_parallelism": _PARALLEL,
    "vocabulary_size": "DeepSpeed only warns by it. Set model.pad_vocab_to_multiple_of.",
    "wandb": _COMPUTED.format("tracking=wandb"),
    "weight_quantization": "acts in DeepSpeed's inference only. Set zero.quantized_weights=true "
    "for less traffic.",
    "zero_allow_untested_optimizer": _UNUSED_OPTIMIZER,
    "zero_force_ds_cpu_optimizer": "PyTorch's fused AdamW updates an offloaded optimizer. Set "
    "optim.kind=cpu_adam for DeepSpeed's.",
    "aio.use_gds": "needs DeepSpeed's GPUDirect extension, which llmx neither builds nor checks. "
    "Leave it out.",
    "zero_optimization.allgather_bucket_size": "set zero.allgather_bucket_size instead.",
    "zero_optimization.allgather_partitions": "DeepSpeed 0.19.8 reads it but never uses it. "
    "Leave it out.",
    "zero_optimization.compute_grad_norm": "llmx clips by the norm and logs it. Leave it out.",
    "zero_optimization.cpu_offload": "Deprecated; set zero.offload_optimizer=cpu.",
    "zero_optimization.cpu_offload_param": "Deprecated; set zero.offload_param=cpu.",
    "zero_optimization.cpu_offload_params": "Deprecated; set zero.offload_param=cpu.",
    "zero_optimization.cpu_offload_use_pin_memory": "Deprecated; set zero.pin_memory.",
    "zero_optimization.elastic_checkpoint": _ONLY_DEEPSPEED,
    "zero_optimization.fp16_opt_level": "Removed; it belonged to apex AMP.",
    "zero_optimization.legacy_stage1": "Removed from DeepSpeed, which refuses it.",
    "zero_optimization.load_from_fp32_weights": _ONLY_DEEPSPEED,
    "zero_optimization.mics_hierarchical_params_gather": "MiCS was removed; use "
    "zero=stage3_zeropp (hpZ).",
    "zero_optimization.mics_shard_size": "MiCS was removed; use zero=stage3_zeropp (hpZ).",
    "zero_optimization.offload_optimizer": "set zero.offload_optimizer instead.",
    "zero_optimization.offload_param": "set zero.offload_param instead.",
    "zero_optimization.overlap_comm": "set zero.overlap_comm instead.",
    "zero_optimization.override_module_apply": "llmx initialises weights itself, without "
    "nn.Module.apply. Leave it out.",
    "zero_optimization.pipeline_loading_checkpoint": _ONLY_DEEPSPEED,
    "zero_optimization.reduce_bucket_size": "set zero.reduce_bucket_size instead.",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "belongs to the Muon optimizer, which "
    "llmx does not have. Set optim.kind.",
    "zero_optimization.stage": "set zero=stage0 ... stage3 instead.",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "llmx exports the model itself, "
    "parameter by parameter. Set task.save_model.",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "llmx exports the model itself, "
    "parameter by parameter. Set task.save_model.",
    "zero_optimization.stage3_max_live_parameters": "set zero.max_live_parameters instead.",
    "zero_optimization.stage3_max_reuse_distance": "set zero.max_reuse_distance instead.",
    "zero_optimization.stage3_module_granularity_threshold": "DeepSpeed 0.19.8 fails with it on "
    "transformers' layers. Name the layers: zero_optimization.leaf_module.",
    "zero_optimization.stage3_param_persistence_threshold": "set "
    "zero.param_persistence_threshold instead.",
    "zero_optimization.stage3_prefetch_bucket_size": "set zero.prefetch_bucket_size instead.",
    "zero_optimization.sub_group_size": "set zero.sub_group_size instead.",
    "zero_optimization.zenflow": "updates weights with an optimizer of its own, whose learning "
    "rate and state llmx cannot set or save. Set zero.offload_optimizer=cpu.",
    "zero_optimization.zero_hpz_partition_size": "set zero.hpz_partition_size instead.",
    "zero_optimization.zero_quantized_gradients": "set zero.quantized_gradients instead.",
    "zero_optimization.zero_quantized_nontrainable_weights": "llmx trains every parameter, so "
    "there is nothing to quantize. Set zero.quantized_weights=true for less traffic.",
    "zero_optimization.zero_quantized_weights": "set zero.quantized_weights instead.",
    "zero_optimization.zeropp_loco_param": "Removed from DeepSpeed; set "
    "zero.quantized_gradients=true.",
}
"""Place -> reason, and where the setting is in llmx."""

SECTIONS = frozenset(place.split(".")[0] for place in TAKEN if "." in place) | {"bf16"}
"""Sections of which single keys are taken or refused."""


def extra_problems(extra: dict[str, Any], config: dict[str, Any]) -> Iterable[str]:
    """The problems of ``zero.extra``: one line for each key, with the reason and the fix.

    ``config``: the configuration that it is merged into; it has the stage, the precision and what
    is offloaded.
    """
    for key, value in extra.items():
        if key in SECTIONS and isinstance(value, dict):
            for name, setting in value.items():
                yield from _problem(f"{key}.{name}", setting, config, extra)
        elif key in SECTIONS and key not in REFUSED:
            yield f"zero.extra.{key}={shown(value)}: must be a mapping of DeepSpeed's keys."
        else:
            yield from _problem(key, value, config, extra)


def _problem(
    place: str, value: Any, config: dict[str, Any], extra: dict[str, Any]
) -> Iterable[str]:
    where = f"zero.extra.{place}"
    section, _, name = place.rpartition(".")
    # DeepSpeed takes its own field names, too: prefetch_bucket_size for stage3_prefetch_...
    alias = f"zero_optimization.stage3_{name}"
    if section == "zero_optimization" and place not in TAKEN and place not in REFUSED:
        if alias in TAKEN:
            yield f"{where}: write it as {alias}."
            return
        place = alias if alias in REFUSED else place
    if place in REFUSED:
        yield f"{where}: {REFUSED[place]}"
        return
    accepted = TAKEN.get(place)
    if accepted is None:
        names = [
            known_place.rpartition(".")[2]
            for known_place in TAKEN
            if known_place.rpartition(".")[0] == section
        ]
        names += [] if section else SECTIONS
        yield (
            f"{where}: DeepSpeed has no such key{'' if section else ' and would ignore it'}."
            f"{did_you_mean(name, names)}"
        )
    elif not _fits(value, accepted.values):
        words = accepted.values
        if not isinstance(words, str):
            words = f"one of {', '.join(words)}"
        yield f"{where}={shown(value)}: must be {words}."
    else:
        yield from _no_effect(where, value, accepted, config, extra)


def _no_effect(
    where: str, value: Any, accepted: Taken, config: dict[str, Any], extra: dict[str, Any]
) -> Iterable[str]:
    zero = config["zero_optimization"]
    leave = f"Leave it out, or take it out of the recipe: ~{where}"
    if zero["stage"] not in accepted.stages:
        stages = " and ".join(map(str, accepted.stages))
        yield (
            f"{where}: has an effect at stage {stages} only (this is stage {zero['stage']}). "
            f"{leave}"
        )
    if accepted.needs == "fp16" and not config["fp16"]["enabled"]:
        yield f"{where}: has an effect with precision=fp16 only. {leave}"
    offloads = [zero.get("offload_optimizer", {}), zero.get("offload_param", {})]
    if accepted.needs == "nvme" and not any(
        offload.get("device") == "nvme" for offload in offloads
    ):
        yield f"{where}: has an effect with an offload to NVMe only (zero=infinity). {leave}"
    if accepted.logs and value and extra.get("log_level") not in ("debug", "info"):
        yield (
            f"{where}: is written to DeepSpeed's log at level info, and llmx keeps that log at "
            "warning. Set zero.extra.log_level=info, too."
        )


def _fits(value: Any, values: str | tuple[str, ...]) -> bool:
    if isinstance(values, tuple):
        return value in values
    if values == FLAG:
        return isinstance(value, bool)
    if values == LEAVES:
        return isinstance(value, dict) and all(
            key in ("classes", "names", "name_suffixes")
            and isinstance(members, list)
            and all(isinstance(text, str) for text in members)
            for key, members in value.items()
        )
    kinds = (int, float) if values == NUMBER else int
    least = 1 if values == COUNT else 0
    return isinstance(value, kinds) and not isinstance(value, bool) and least <= value < 2**53
