"""The keys of other training tools, by what they are called here: the one table for messages ("Here
it is optim.lr."), for ``python -m llmx import`` and for docs/coming-from.md.

A tool has keys that are mapped, keys without effect here (with the reason), and keys that are
refused (with the reason and the fix) unless they are off. What a value becomes, where it is not the
same value, is said by ``llmx.cli.foreign``. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A training tool, or one of its commands."""

    title: str
    defaults_of: str
    """The version that ``defaults`` are from."""
    mapped: Mapping[str, str]
    """Our key -> names there."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Reason -> names there."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reason and fix -> names there."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Name there -> how it differs here."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Its own defaults, which are written out where they decide what is trained."""
    marks: str = ""
    """Keys that no other tool has: a file is recognised by them."""


TRAINER = Tool(
    "Transformers' Trainer",
    "transformers 5.23",
    mapped={
        "optim.lr": "learning_rate",
        "optim.kind": "optim",
        "optim.weight_decay": "weight_decay",
        "optim.betas": "adam_beta1 adam_beta2",
        "optim.eps": "adam_epsilon",
        "optim.clip_norm": "max_grad_norm",
        "optim.schedule": "lr_scheduler_type",
        "optim.min_lr_ratio": "lr_scheduler_kwargs",
        "optim.warmup_steps": "warmup_steps num_warmup_steps",
        "optim.warmup_fraction": "warmup_ratio",
        "batch.micro_batch": "per_device_train_batch_size",
        "batch.accumulation": "gradient_accumulation_steps",
        "task.epochs": "num_train_epochs",
        "task.steps": "max_steps",
        "task.log_every_steps": "logging_steps",
        "task.eval_every_steps": "eval_strategy evaluation_strategy eval_steps",
        "task.options.neftune_alpha": "neftune_noise_alpha",
        "checkpoint.every_steps": "save_steps save_strategy",
        "checkpoint.keep.last": "save_total_limit",
        "checkpoint.keep.best": "load_best_model_at_end",
        "checkpoint.metric": "metric_for_best_model",
        "precision": "bf16 fp16",
        "deterministic": "full_determinism",
        "seed": "seed train_sampling_strategy",
        "name": "run_name",
        "tracking.kinds": "report_to",
        "data.last_batch": "dataloader_drop_last",
        "model.path": "model_name_or_path",
        "model.tokenizer": "tokenizer_name",
        "model.revision": "model_revision",
        "model.trust_remote_code": "trust_remote_code",
        "model.attention": "attn_implementation",
        "model.activation_checkpointing": "gradient_checkpointing activation_checkpointing",
        "model.liger_kernel": "use_liger_kernel",
        "model.compile": "torch_compile",
        "data.path": "dataset_name train_file",
        "data.subset": "dataset_config dataset_config_name",
        "data.eval_path": "validation_file",
        "data.eval_fraction": "validation_split_percentage",
        "data.max_rows": "max_train_samples",
        "data.seq_len": "block_size",
        "zero.stage": "deepspeed deepspeed_config",
    },
    no_effect={
        "a run has a directory of its own below outputs/ (run_dir=DIR sets one)": "output_dir "
        "logging_dir overwrite_output_dir",
        "a run trains, and evaluates where there is held-out data": "do_train do_eval do_predict",
        "it does not change what is trained": "dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "per_device_eval_batch_size eval_accumulation_steps gradient_checkpointing_kwargs "
        "activation_checkpointing_kwargs torch_compile_backend torch_compile_mode tf32 "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend use_cache "
        "ddp_static_graph torch_empty_cache_steps local_rank low_cpu_mem_usage use_fast_tokenizer "
        "bf16_full_eval fp16_full_eval batch_eval_metrics eval_do_concat_batches "
        "eval_use_gather_object dataloader_multiprocessing_context preprocessing_num_workers "
        "dataset_num_proc cache_dir "
        "overwrite_cache average_tokens_across_devices liger_kernel_config",
        "ranks wait launch.comm_timeout_s (4 hours) for each other": "ddp_timeout",
        "the console and metrics.jsonl have every logged step": "logging_first_step disable_tqdm "
        "logging_strategy log_level log_level_replica log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics debug "
        "include_for_metrics",
        "a checkpoint always has what a resumed run needs": "save_only_model save_safetensors "
        "save_on_each_node ignore_data_skip enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint",
        "columns are read by the format of the rows": "remove_unused_columns label_names "
        "prediction_loss_only length_column_name",
        "samples are shuffled by seed": "data_seed",
        "the model is not uploaded: hf upload NAME RUN_DIR/model": "push_to_hub hub_model_id "
        "hub_strategy hub_private_repo hub_token hub_revision hub_always_push",
        "checkpoint.mode: the direction follows from the metric": "greater_is_better",
        "evaluation before and after training is always made": "eval_on_start eval_delay",
        "it belongs to the tracker's own settings": "project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id",
    },
    refused={
        "a checkpoint of another program cannot be resumed. Train on from its weights: name them "
        "as the model": "resume_from_checkpoint",
        "ranks are sharded by ZeRO here, not FSDP. Leave it out, and add zero=stage3": "fsdp "
        "fsdp_config",
        "the batch is not searched for while training. Leave it out, and add "
        "batch.micro_batch=auto": "auto_find_batch_size",
        "no task has it for next tokens. Leave it out": "label_smoothing_factor",
        "batches of rows of like length are not drawn; data.packing=best_fit wastes no padding. "
        "Leave it out": "group_by_length",
        "this optimizer's options are not taken. Leave it out": "optim_args optim_target_modules",
        "there is only data parallelism here. Leave it out": "parallelism_config",
        "accelerate has no part in a run. Leave it out": "accelerator_config",
        "CPU ranks are chosen by the machine. Leave it out, and add hardware=cpu2": "use_cpu "
        "no_cuda",
    },
    remarks={
        "seed": "the same number draws other numbers here",
        "num_train_epochs": "a step may span two epochs here; there each epoch ends with a step",
        "warmup_steps": "the first update has lr / steps here, 0 there",
        "warmup_ratio": "the first update has lr / steps here, 0 there",
    },
    defaults={
        "learning_rate": 5e-5, "optim": "adamw_torch_fused", "weight_decay": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear", "warmup_steps": 0, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "logging_steps": 500,
        "save_steps": 500, "bf16": False, "gradient_checkpointing": False, "seed": 42,
        "dataloader_drop_last": False, "eval_strategy": "no",
    },
    marks="train_file block_size validation_file",
)  # fmt: skip

_LORA = {
    "adapter.rank": "lora_r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "lora_target_modules",
    "adapter.modules_to_save": "lora_modules_to_save",
    "adapter.quantize": "load_in_4bit bnb_4bit_quant_type",
}
_NO_8BIT = (
    "weights of 8 bits are not trained beside. Leave it out; or use 4 bits (adapter.quantize=nf4)"
)


def _of_trainer(tool: Tool, *, defaults: bool = True) -> Tool:
    """A tool that also takes the keys of ``TrainingArguments``, and its defaults."""
    names = {name for table in (tool.mapped, tool.no_effect, tool.refused)
             for value in table.values() for name in value.split()}  # fmt: skip

    def merged(base: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
        unclaimed = {key: " ".join(n for n in value.split() if n not in names)
                     for key, value in base.items()}  # fmt: skip
        keys = [*own, *(key for key in unclaimed if key not in own)]
        texts = {key: f"{own.get(key, '')} {unclaimed.get(key, '')}".strip() for key in keys}
        return {key: text for key, text in texts.items() if text}

    return Tool(
        tool.title,
        tool.defaults_of,
        merged(TRAINER.mapped, tool.mapped),
        merged(TRAINER.no_effect, tool.no_effect),
        merged(TRAINER.refused, tool.refused),
        {**TRAINER.remarks, **tool.remarks},
        {**(TRAINER.defaults if defaults else {}), **tool.defaults},
        tool.marks,
    )


_TRL_MAPPED = {
    **_LORA,
    "adapter.kind": "use_peft",
    "adapter.rslora": "use_rslora",
    "adapter.dora": "use_dora",
    "adapter.double_quant": "use_bnb_nested_quant",
    "data.split": "dataset_train_split",
    "data.seq_len": "max_length max_seq_length",
    "data.over_long": "truncation_mode",
}
_TRL_NO_EFFECT = {
    "weights of a run in bf16 or fp16 have a master copy in fp32": "dtype torch_dtype",
    "rows of the Hub are streamed": "dataset_streaming",
    "it does not change what is trained": "activation_offloading padding_free pad_to_multiple_of "
    "bnb_4bit_quant_storage lora_task_type pad_token shuffle_dataset ignore_bias_buffers "
    "precompute_ref_batch_size eval_packing",
    "held-out rows are data.eval_path, or some of data.path": "dataset_test_split",
}
_TRL_REFUSED = {
    _NO_8BIT: "load_in_8bit",
    "it changes the network or its loss in a way that is not known here. Leave it out": ""
    "model_init_kwargs router_aux_loss_coef lora_target_parameters",
    "the template is the tokenizer's own. Save the tokenizer with the template, and name it as "
    "tokenizer_name": "chat_template_path eos_token",
    "mixtures are not read from this key. Leave it out, and add "
    "'data.sources=[{path: A}, {path: B}]'": "datasets",
    "rows are prepared here. Leave it out": "dataset_kwargs",
}
_TRL_DEFAULTS = {
    "bf16": True, "gradient_checkpointing": True, "logging_steps": 10, "use_peft": False,
    "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None,
    "max_length": 1024, "dataset_train_split": "train",
}  # fmt: skip

_BREAK = "there the line break behind an answer is learned, too"
_PAIR = (
    "a sample holds both answers; a longer one loses its prompt's beginning here, the end of its "
    "answers there"
)

TRL_SFT = _of_trainer(
    Tool(
        "TRL (trl sft)",
        "TRL 1.16",
        mapped={
            **_TRL_MAPPED,
            "data.packing": "packing packing_strategy",
            "data.loss_on": "completion_only_loss assistant_only_loss",
            "data.text_key": "dataset_text_field",
            "task.options.dft": "loss_type",
        },
        no_effect=_TRL_NO_EFFECT,
        refused=_TRL_REFUSED,
        defaults={
            **_TRL_DEFAULTS, "learning_rate": 2e-5, "packing": False, "completion_only_loss": None,
            "truncation_mode": "keep_start",
        },
        remarks={"completion_only_loss": f"{_BREAK}, of a completion of turns"},
        marks="dataset_text_field completion_only_loss assistant_only_loss packing_strategy "
        "eval_packing",
    )
)  # fmt: skip
TRL_DPO = _of_trainer(
    Tool(
        "TRL (trl dpo)",
        "TRL 1.16",
        mapped={
            **_TRL_MAPPED,
            "task.options.loss": "loss_type",
            "task.options.beta": "beta",
            "task.options.label_smoothing": "label_smoothing",
            "task.options.dropout": "disable_dropout",
        },
        no_effect={
            **_TRL_NO_EFFECT,
            "log-probabilities of the reference are always computed once, before training": ""
            "precompute_ref_log_probs",
        },
        refused={
            **_TRL_REFUSED,
            "task=dpo has no such term. Leave it out": "loss_weights ld_alpha use_weighting "
            "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps discopop_tau "
            "f_divergence_type f_alpha_divergence_coef max_prompt_length max_completion_length",
            "the reference is the model that training begins with. Leave it out": ""
            "ref_model_name_or_path",
        },
        remarks={"max_length": _PAIR, "dataset_name": f"{_BREAK}, of answers that are turns"},
        defaults={
            **_TRL_DEFAULTS, "learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid",
            "label_smoothing": 0.0, "disable_dropout": True,
        },
        marks="precompute_ref_log_probs beta f_divergence_type sync_ref_model",
    )
)  # fmt: skip
TRL_REWARD = _of_trainer(
    Tool(
        "TRL (trl reward)",
        "TRL 1.16",
        mapped=_TRL_MAPPED,
        no_effect={**_TRL_NO_EFFECT, "task=reward trains without dropout": "disable_dropout"},
        refused={
            **_TRL_REFUSED,
            "task=reward has no such term. Leave it out": "center_rewards_coefficient",
        },
        defaults={**_TRL_DEFAULTS, "learning_rate": 1e-4},
        marks="center_rewards_coefficient",
    )
)

LLAMA_FACTORY = _of_trainer(
    Tool(
        "LLaMA-Factory",
        "LLaMA-Factory 0.9.4",
        mapped={
            "task.kind": "stage",
            "adapter.kind": "finetuning_type",
            "adapter.rank": "lora_rank",
            "adapter.alpha": "lora_alpha",
            "adapter.dropout": "lora_dropout",
            "adapter.targets": "lora_target",
            "adapter.modules_to_save": "additional_target",
            "adapter.rslora": "use_rslora",
            "adapter.dora": "use_dora",
            "adapter.quantize": "quantization_bit quantization_type",
            "adapter.double_quant": "double_quantization",
            "data.path": "dataset dataset_dir",
            "data.eval_path": "eval_dataset",
            "data.eval_fraction": "val_size",
            "data.template": "template",
            "data.system": "default_system",
            "data.seq_len": "cutoff_len",
            "data.loss_on": "train_on_prompt mask_history",
            "data.packing": "packing neat_packing",
            "data.max_rows": "max_samples",
            "model.attention": "flash_attn",
            "model.liger_kernel": "enable_liger_kernel",
            "model.activation_checkpointing": "disable_gradient_checkpointing",
            "model.add_tokens": "add_tokens",
            "model.add_special_tokens": "add_special_tokens",
            "model.init": "train_from_scratch",
            "precision": "pure_bf16",
            "task.options.loss": "pref_loss",
            "task.options.beta": "pref_beta",
            "task.options.sft_weight": "pref_ftx",
            "task.options.gamma": "simpo_gamma",
            "task.options.label_smoothing": "dpo_label_smoothing",
            "task.options.desirable_weight": "kto_chosen_weight",
            "task.options.undesirable_weight": "kto_rejected_weight",
            "task.options.dft": "use_dft_loss",
            "task.early_stopping.patience": "early_stopping_steps",
            "tracking.project": "swanlab_project",
        },
        no_effect={
            "it does not change what is trained": "use_reentrant_gc preprocessing_batch_size "
            "resize_vocab upcast_layernorm upcast_lmhead_output print_param_status use_kv_cache "
            "offload_folder tokenized_path buffer_size tool_format media_dir "
            "freeze_vision_tower freeze_multi_modal_projector use_unsloth_gc split_special_tokens "
            "ignore_pad_token_for_loss image_max_pixels image_min_pixels video_max_pixels "
            "video_min_pixels infer_backend infer_dtype streaming",
            "report.html and loss.png have the curves": "plot_loss",
            "metrics.jsonl has tokens_per_s": "include_effective_tokens_per_second include_mfu",
            "generation is measured by task.eval_generate": "predict_with_generate eval_num_beams "
            "max_new_tokens top_p temperature",
            "log in with hf auth login": "hf_hub_token",
            "it belongs to the tracker's own settings": "swanlab_workspace swanlab_run_name "
            "swanlab_mode swanlab_api_key swanlab_logdir",
            "a chat template decides it": "enable_thinking",
        },
        refused={
            "there is no such method of training here. Set finetuning_type to lora or full": ""
            "use_llama_pro use_galore use_apollo use_badam use_adam_mini pissa_init shift_attn "
            "mixture_of_depths loraplus_lr_ratio use_mca freeze_trainable_layers "
            "freeze_trainable_modules freeze_extra_modules fp8 oft_rank use_eaft_loss",
            "an adapter is not trained on. Merge it into its model first, and name that": ""
            "adapter_name_or_path create_new_adapter",
            "data sets are concatenated. Leave it out, and give weights in data.sources": ""
            "interleave_probs",
            "the reference is the model that training begins with. Leave it out": "ref_model "
            "ref_model_adapters ref_model_quantization_bit pref_bco_weight ld_alpha",
            "it is made here by its own key. Leave it out, and add optim=muon": "use_muon",
            "trackers are named by one key. Leave it out, and add tracking=swanlab": "use_swanlab",
            "positions are those of the model. Leave it out, and add "
            "'model.config={rope_scaling: ...}'": "rope_scaling",
            "data sets are evaluated together. Leave it out": "eval_on_each_dataset",
            "its kernels are not used. Leave it out": "use_unsloth use_v1_kernels",
            "samples are always shuffled. Leave it out": "disable_shuffling",
            "the rows start as the mean of the others. Leave it out": "new_special_tokens_config "
            "init_special_tokens",
            "the router's loss is that of the model's config. Leave it out": "moe_aux_loss_coef",
        },
        remarks={
            "cutoff_len": "a longer row loses the end of its conversation here, the end of each "
            "turn there",
            "lora_target": "all linear layers but the output head",
            "template": _BREAK,
            "pref_ftx": "the mean over the tokens of each answer here",
        },
        defaults={
            "stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "lora_alpha": None,
            "lora_dropout": 0.0, "lora_target": "all", "cutoff_len": 2048, "template": None,
            "train_on_prompt": False, "packing": None, "disable_gradient_checkpointing": False,
            "pref_loss": "sigmoid", "pref_beta": 0.1, "dataset_dir": "data",
        },
        marks="cutoff_len finetuning_type stage neat_packing lora_target pref_loss",
    )
)  # fmt: skip

AXOLOTL = _of_trainer(
    Tool(
        "axolotl",
        "axolotl 0.13",
        mapped={
            **_LORA,
            "adapter.kind": "adapter",
            "adapter.targets": "lora_target_modules lora_target_linear",
            "adapter.rslora": "peft_use_rslora",
            "adapter.dora": "peft_use_dora",
            "task.kind": "rl reward_model",
            "model.path": "base_model",
            "model.tokenizer": "tokenizer_config",
            "model.revision": "revision_of_model",
            "model.attention": "flash_attention sdp_attention eager_attention flex_attention "
            "xformers_attention",
            "model.liger_kernel": "liger_rope liger_rms_norm liger_glu_activation "
            "liger_fused_linear_cross_entropy",
            "model.add_tokens": "tokens",
            "data.path": "datasets pretraining_dataset",
            "data.eval_path": "test_datasets",
            "data.eval_fraction": "val_set_size",
            "data.seq_len": "sequence_len",
            "data.packing": "sample_packing",
            "data.template": "chat_template",
            "data.system": "default_system_message",
            "data.loss_on": "train_on_inputs",
            "data.deduplicate": "dataset_exact_deduplication",
            "batch.micro_batch": "micro_batch_size",
            "task.epochs": "num_epochs",
            "task.eval_every_steps": "evals_per_epoch",
            "task.early_stopping.patience": "early_stopping_patience",
            "task.options.beta": "rl_beta orpo_alpha",
            "task.options.gamma": "simpo_gamma",
            "task.options.sft_weight": "rpo_alpha",
            "task.options.label_smoothing": "dpo_label_smoothing",
            "task.options.desirable_weight": "kto_desirable_weight",
            "task.options.undesirable_weight": "kto_undesirable_weight",
            "optim.kind": "optimizer",
            "optim.schedule": "lr_scheduler",
            "optim.min_lr_ratio": "cosine_min_lr_ratio",
            "optim.decay_end_fraction": "cosine_constant_lr_ratio",
            "checkpoint.every_steps": "saves_per_epoch",
            "tracking.kinds": "wandb_project use_wandb use_tensorboard use_mlflow",
            "tracking.entity": "wandb_entity",
            "name": "wandb_name",
        },
        no_effect={
            "transformers finds the class": "model_type tokenizer_type is_llama_derived_model "
            "is_mistral_derived_model is_qwen_derived_model tokenizer_use_fast tokenizer_legacy",
            "prepared data has a cache of its own": "dataset_prepared_path dataset_processes "
            "dataset_keep_in_memory shuffle_merged_datasets skip_prepare_dataset",
            "it does not change what is trained": "pad_to_sequence_len eval_sample_packing strict "
            "lora_on_cpu gc_steps eval_batch_size eval_table_size eval_max_new_tokens ddp plugins "
            "sample_packing_group_size sample_packing_bin_size lora_fan_in_fan_out max_prompt_len "
            "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp "
            "lora_mlp_kernel lora_qkv_kernel lora_o_kernel cut_cross_entropy device device_map "
            "hf_use_auth_token profiler_steps resize_token_embeddings_to_32x world_size",
            "a loss that is not finite, or jumps, ends a run: task.on_divergence, "
            "task.spike_factor": "loss_watchdog_threshold loss_watchdog_patience",
            "it belongs to the tracker's own settings": "wandb_watch wandb_log_model wandb_mode "
            "wandb_run_id mlflow_experiment_name mlflow_tracking_uri",
            "padding is by position, and the end of an answer is the template's": "special_tokens",
        },
        refused={
            "there is only data parallelism here. Leave it out": "sequence_parallel_degree "
            "context_parallel_size tensor_parallel_size",
            _NO_8BIT: "load_in_8bit",
            "an adapter is not trained on. Merge it into its model first, and name that": ""
            "lora_model_dir",
            "there is no such method of training here. Leave it out": "relora gptq qat fp8 peft "
            "unfrozen_parameters s2_attention use_pose peft_layers_to_transform loftq_config "
            "loraplus_lr_ratio lora_target_parameters curriculum_sampling process_reward_model "
            "num_labels lr_groups embedding_lr embedding_lr_scale trl vllm quantization "
            "dpo_use_weighting cpo_alpha adam_beta3 adam_epsilon2 fix_untrained_tokens",
            "the global batch is counted from micro_batch_size. Leave it out, and add "
            "batch.global_batch=N": "batch_size",
            "the template is the tokenizer's own. Save the tokenizer with the template, and name "
            "it as tokenizer_config": "chat_template_jinja eot_tokens",
        },
        remarks={
            "num_epochs": TRAINER.remarks["num_train_epochs"],
            "sequence_len": "a longer conversation loses its end here; there it is dropped",
            "sample_packing": "rows of a sample do not attend to each other",
            "lora_target_linear": "all linear layers but the output head",
        },
        defaults={
            "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "weight_decay": 0.0,
            "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
            "num_epochs": 1.0, "gradient_accumulation_steps": 1, "micro_batch_size": 1,
            "sequence_len": 512, "bf16": "auto", "gradient_checkpointing": False, "seed": 42,
            "train_on_inputs": False, "sample_packing": False, "dataloader_drop_last": False,
            "warmup_ratio": 0.03,
        },
        marks="base_model micro_batch_size sequence_len sample_packing num_epochs",
    ),
    defaults=False,
)  # fmt: skip

DEEPSPEED_CHAT = Tool(
    "DeepSpeed-Chat, step 1",
    "DeepSpeedExamples of 2025",
    mapped={
        "data.path": "data_path",
        "data.max_rows": "data_split",
        "model.path": "model_name_or_path",
        "data.seq_len": "max_seq_len",
        "batch.micro_batch": "per_device_train_batch_size",
        "batch.accumulation": "gradient_accumulation_steps",
        "optim.lr": "learning_rate",
        "optim.weight_decay": "weight_decay",
        "optim.schedule": "lr_scheduler_type",
        "optim.warmup_steps": "num_warmup_steps",
        "task.epochs": "num_train_epochs",
        "seed": "seed",
        "model.activation_checkpointing": "gradient_checkpointing",
        "zero.stage": "zero_stage",
        "zero.offload_optimizer": "offload",
        "precision": "dtype",
        "tracking.kinds": "enable_tensorboard",
    },
    no_effect={
        "a run has a directory of its own below outputs/ (run_dir=DIR sets one)": "output_dir",
        "it does not change what is trained": "deepspeed per_device_eval_batch_size local_rank "
        "data_output_path print_loss tensorboard_path",
    },
    refused={
        "its LoRA is not that of peft: it has no scale, and trains beside whole weights. Leave it "
        "out, and add adapter=lora": "lora_dim lora_module_name only_optimize_lora "
        "lora_learning_rate",
        "dropout is that of the model's config. Leave it out, and add "
        "'model.config={attention_dropout: 0.1}'": "dropout",
        "the loss is computed in fp32 always. Leave it out": "compute_fp32_loss",
        "its SFT data are whole files. Leave it out": "sft_only_data_path "
        "add_eot_token eot_token",
    },
    remarks={"num_train_epochs": "every token is learned once an epoch, padding is not"},
    defaults={
        "max_seq_len": 512, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3, "weight_decay": 0.0, "lr_scheduler_type": "cosine",
        "num_warmup_steps": 0, "num_train_epochs": 1, "seed": 1234, "zero_stage": 0,
        "dtype": "fp16", "gradient_checkpointing": False, "data_split": "2,4,4",
    },
    marks="data_split zero_stage max_seq_len num_warmup_steps lora_module_name",
)  # fmt: skip

DEEPSPEED = Tool(
    "DeepSpeed's JSON",
    "DeepSpeed 0.19",
    mapped={
        "batch.global_batch": "train_batch_size",
        "batch.micro_batch": "train_micro_batch_size_per_gpu",
        "batch.accumulation": "gradient_accumulation_steps",
        "optim.clip_norm": "gradient_clipping",
        "optim.kind": "optimizer.type",
        "optim.lr": "optimizer.params.lr",
        "optim.betas": "optimizer.params.betas",
        "optim.eps": "optimizer.params.eps",
        "optim.weight_decay": "optimizer.params.weight_decay",
        "optim.schedule": "scheduler.type",
        "optim.warmup_steps": "scheduler.params.warmup_num_steps",
        "precision": "bf16.enabled fp16.enabled",
        "zero.stage": "zero_optimization.stage",
        "zero.offload_optimizer": "zero_optimization.offload_optimizer.device",
        "zero.offload_param": "zero_optimization.offload_param.device",
        "zero.nvme_path": "zero_optimization.offload_optimizer.nvme_path "
        "zero_optimization.offload_param.nvme_path",
        "zero.pin_memory": "zero_optimization.offload_optimizer.pin_memory "
        "zero_optimization.offload_param.pin_memory",
        "zero.overlap_comm": "zero_optimization.overlap_comm",
        "zero.reduce_bucket_size": "zero_optimization.reduce_bucket_size",
        "zero.allgather_bucket_size": "zero_optimization.allgather_bucket_size",
        "zero.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
        "zero.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
        "zero.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
        "zero.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
        "zero.sub_group_size": "zero_optimization.sub_group_size",
        "zero.hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
        "zero.quantized_weights": "zero_optimization.zero_quantized_weights",
        "zero.quantized_gradients": "zero_optimization.zero_quantized_gradients",
    },
    no_effect={
        "": "steps_per_print wall_clock_breakdown zero_allow_untested_optimizer dump_state "
        "zero_force_ds_cpu_optimizer zero_optimization.allgather_partitions "
        "zero_optimization.stage3_gather_16bit_weights_on_model_save "
        "zero_optimization.stage3_gather_fp16_weights_on_model_save comms_logger flops_profiler "
        "tensorboard csv_monitor wandb comet monitor_config comms_config autotuning "
        "activation_checkpointing zero_optimization.elastic_checkpoint "
        "zero_optimization.load_from_fp32_weights dataloader_drop_last "
        "zero_optimization.offload_optimizer.fast_init fp16.auto_cast "
        "zero_optimization.offload_optimizer.pipeline_read checkpoint "
        "zero_optimization.offload_optimizer.pipeline_write scheduler.params.warmup_type "
        "zero_optimization.offload_optimizer.buffer_count "
        "zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size "
        "zero_optimization.offload_param.max_in_cpu optimizer.params.torch_adam "
        "optimizer.params.adam_w_mode scheduler.params.warmup_min_lr "
        "scheduler.params.warmup_max_lr scheduler.params.total_num_steps "
        "zero_optimization.round_robin_gradients",
    },
    defaults={"zero_optimization.stage": 0},
    marks="zero_optimization train_micro_batch_size_per_gpu",
)

LAUNCHERS = Tool(
    "torchrun, deepspeed, accelerate launch",
    "PyTorch 2.13, DeepSpeed 0.19, accelerate 1.15",
    mapped={
        "hardware.slots": "num_gpus nproc_per_node num_processes",
        "hardware.path": "hostfile",
        "launch.master_port": "master_port main_process_port",
        "zero.stage": "deepspeed_config_file zero_stage",
    },
    no_effect={
        "rank 0 is on the first host": "master_addr main_process_ip node_rank machine_rank "
        "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone local_addr",
        "agents start the ranks; docs/cluster.md has other transports": "launcher launcher_args "
        "force_multi no_ssh_check ssh_port enable_each_rank_log log_dir redirects tee role "
        "max_restarts monitor_interval no_local_rank bind_cores_to_rank save_pid use_deepspeed "
        "multi_gpu no_python module dynamo_backend same_network",
    },
    refused={
        "hosts are listed in a hostfile or a hardware file. Give a hostfile, or add hardware=NAME "
        "and leave it out": "nnodes num_nodes num_machines include exclude",
        "the script's own flags say it. Leave it out, and add precision=bf16": "mixed_precision",
        "accelerate's config file is not read. Leave it out, and give its DeepSpeed JSON as "
        "--deepspeed": "config_file",
    },
)

TOOLS: dict[str, Tool] = {
    "llama-factory": LLAMA_FACTORY,
    "axolotl": AXOLOTL,
    "trl-sft": TRL_SFT,
    "trl-dpo": TRL_DPO,
    "trl-reward": TRL_REWARD,
    "trainer": TRAINER,
    "deepspeed-chat": DEEPSPEED_CHAT,
    "deepspeed-json": DEEPSPEED,
}
"""``--from`` -> the tool."""

_OTHERS = {
    "model.path=...": "model_name model_id pretrained_model",
    "model.tokenizer": "tokenizer_name_or_path tokenizer_path",
    "model.attention": "flash_attention use_flash_attention",
    "model.activation_checkpointing=full": "gradient_checkpointing",
    "data.path=...": "dataset dataset_path datasets train_data dataset_dir data_path",
    "data.eval_path": "eval_file test_file",
    "data.eval_samples": "val_size eval_size val_set_size",
    "data.seq_len": "max_seq_len sequence_length model_max_length context_length max_prompt_length",
    "data.packing": "pack",
    "data.text_key": "text_column",
    "data.max_rows": "num_samples max_samples",
    "data.num_workers": "preprocessing_num_workers dataset_num_proc num_proc "
    "dataloader_num_workers",
    "task.kind": "finetuning_task",
    "task.options.beta": "dpo_beta",
    "task.options.loss": "loss_type rl",
    "task.options.rewards": "reward reward_funcs",
    "task.epochs": "n_epochs max_epochs epoch",
    "task.steps": "num_steps train_steps num_train_steps max_train_steps iterations",
    "task.log_every_steps": "log_interval",
    "task.eval_every_steps": "eval_interval",
    "optim.lr": "lr",
    "optim.schedule": "scheduler",
    "optim.clip_norm": "grad_clip clip_grad gradient_clipping",
    "optim.betas": "beta1 beta2",
    "optim.eps": "epsilon",
    "optim=adamw": "optimizer",
    "batch.micro_batch": "train_batch_size_per_gpu per_device_batch_size",
    "batch.global_batch": "batch_size global_batch_size",
    "batch.accumulation": "grad_accum grad_accumulation",
    "adapter.rank": "r",
    "adapter.targets": "target_modules lora_targets",
    "adapter=lora": "use_peft use_lora lora finetuning_type peft",
    "adapter=qlora": "load_in_4bit quantization_bit qlora",
    "zero=stage2": "deepspeed deepspeed_config",
    "hardware.slots": "gpus n_gpus num_gpus_per_node ngpus devices",
    "hardware.hosts": "nodes nnodes num_nodes",
    "launch.master_port": "main_process_port",
    "launch.detach=true, typed on that host (ssh HOST)": "supervisor",
    "checkpoint.every_steps": "save_interval save_every",
    "precision=bf16": "bf16",
    "precision=fp16": "fp16",
    "precision": "torch_dtype dtype",
    "run_dir": "output_dir out_dir save_dir",
    "name": "run_name",
    "tracking=wandb": "report_to wandb",
    "tracking.project": "wandb_project",
}
"""Names that no tool above has, and keys that a message answers with a value."""


def names_by_key() -> dict[str, str]:
    """Their name (the last part of a dotted one) -> our key, over all tools."""
    answers: dict[str, str] = {}
    for table in (_OTHERS, *(tool.mapped for tool in (*TOOLS.values(), LAUNCHERS))):
        for key, names in table.items():
            for name in names.split():
                answers.setdefault(name.rpartition(".")[2], key)
    return answers
