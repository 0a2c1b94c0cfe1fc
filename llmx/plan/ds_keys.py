"""The keys DeepSpeed reads, so that ``zero.extra`` can be checked without importing it.

DeepSpeed silently ignores an unknown top-level key. A test compares these sets with the
installed DeepSpeed's own models (``tests/unit/test_plan_ds_config.py``).
"""

from __future__ import annotations

ZERO_OPTIMIZATION = frozenset(
    """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights
    elastic_checkpoint offload_param offload_optimizer sub_group_size cpu_offload_use_pin_memory
    stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
    legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
    zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
    pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings leaf_module
    zenflow compute_grad_norm enable_sanity_checks parameter_alignment
    save_muon_momentum_buffer_in_memory
    """.split()
)

FP16 = frozenset(
    """
    enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
    consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads
    """.split()
)

BF16 = frozenset(
    """
    enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
    bf16_optimizer_states
    """.split()
)

SECTIONS = {"zero_optimization": ZERO_OPTIMIZATION, "fp16": FP16, "bf16": BF16}

TOP_LEVEL = frozenset(
    """
    zero_optimization fp16 bf16 activation_checkpointing aio checkpoint comms_logger
    communication_data_type compile csv_monitor data_efficiency data_types
    disable_allgather dump_state eigenvalue flops_profiler gradient_allreduce_op
    gradient_predivide_factor memory_breakdown prescale_gradients
    seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel
    tensorboard timers torch_autocast use_data_before_expert_parallelism wall_clock_breakdown
    disable_python_gc zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """.split()
)

OWNED = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "optim.clip_norm",
    "optimizer": "optim.kind",
    "scheduler": "optim.schedule",
    "wandb": "tracking=wandb",
    "data_types": "zero.grad_accum_dtype",
}
"""Computed by llmx from one source of truth: key -> the setting to use."""

OWNED_ZERO = {
    "stage": "zero=stage0 ... stage3",
    "offload_optimizer": "zero.offload_optimizer",
    "offload_param": "zero.offload_param",
    "zero_hpz_partition_size": "zero.hpz_partition_size",
}

RETIRED = {
    "amp": "DeepSpeed 0.19 has no apex AMP; set precision=fp16 or precision=bf16.",
    "bfloat16": "The section is called bf16; set precision=bf16.",
    "elasticity": "Removed from DeepSpeed; change hardware.* and resume at the same global batch.",
    "curriculum_learning": "Removed from DeepSpeed; order the data before training.",
    "compression_training": "Removed from DeepSpeed; compress the exported model instead.",
    "sparse_gradients": "Removed from DeepSpeed, with nothing in its place.",
    "nebula": "Removed from DeepSpeed; checkpoints are llmx's own.",
}
RETIRED_ZERO = {
    "cpu_offload": "Deprecated; set zero.offload_optimizer=cpu.",
    "cpu_offload_params": "Deprecated; set zero.offload_param=cpu.",
    "cpu_offload_param": "Deprecated; set zero.offload_param=cpu.",
    "mics_shard_size": "MiCS was removed; use zero=stage3_zeropp (hpZ).",
    "mics_hierarchical_params_gather": "MiCS was removed; use zero=stage3_zeropp (hpZ).",
    "fp16_opt_level": "Removed; it belonged to apex AMP.",
}
