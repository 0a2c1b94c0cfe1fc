"""Transformers' ``TrainingArguments`` and what is built on them: run_clm, TRL's commands, and
DeepSpeed-Chat's first step, whose names are the same."""

from __future__ import annotations

from typing import Any

from llmx.cli.foreign.convert import (
    Converter,
    Refused,
    Settings,
    Source,
    choice,
    first_record,
    part_of,
    words_of,
)
from llmx.config.foreign import TRL_DPO, TRL_REWARD
from llmx.config.plugins import TRACKERS

OPTIMIZERS: dict[str, str] = {
    name: kind
    for kind, names in {
        "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw "
        "paged_adamw_32bit paged_adamw adamw_torch_npu_fused",
        "adam8bit": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit",
        "lion": "lion_32bit paged_lion_32bit lion",
        "sgd": "sgd",
    }.items()
    for name in names.split()
}
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_restarts", "polynomial": "polynomial",
    "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
HELD_OUT = (
    "val_size eval_dataset validation_split_percentage validation_file val_set_size test_datasets"
)
IN_STEPS = "is counted in steps here: set {}=N"


def _kind(source: Source) -> str:
    return OPTIMIZERS.get(str(source.get("optimizer", source.get("optim"))), "")


def optimizer(value: Any, source: Source) -> Settings | str:
    if not (kind := _kind(source)):
        raise Refused(
            "there is no such optimizer, or another one has its name. Add optim.kind=adamw, or "
            "another of docs/training.md."
        )
    # 8-bit moments are not sharded.
    return {"optim.kind": kind} | ({"zero.stage": 0} if kind == "adam8bit" else {})


def betas(value: Any, source: Source) -> Settings | str:
    return {"optim.betas": [source.get("adam_beta1", 0.9), source.get("adam_beta2", 0.999)]}


def schedule(value: Any, source: Source) -> Settings | str:
    name, options = str(value), dict(source.get("lr_scheduler_kwargs") or {})
    if name not in SCHEDULES:
        raise Refused(
            "there is no such schedule. Add optim.schedule=cosine, or another of docs/training.md."
        )
    settings: Settings = {"optim.schedule": SCHEDULES[name]}
    floor = source.get("cosine_min_lr_ratio") or options.pop("min_lr_rate", 0.0)
    if "min_lr" in options:
        floor = options.pop("min_lr") / source["learning_rate"]
    if name == "polynomial":
        floor = options.pop("lr_end", 1e-7) / source["learning_rate"]
        settings["optim.decay_power"] = options.pop("power", 1.0)
    if name == "cosine_with_restarts":
        settings["optim.cycles"] = options.pop("num_cycles", 1)
    if options:
        raise Refused(f"lr_scheduler_kwargs has {', '.join(options)}. Leave it out.")
    return settings | {"optim.min_lr_ratio": floor}


def warmup(value: Any, source: Source) -> Settings | str:
    steps, fraction = source.get("warmup_steps") or 0, source.get("warmup_ratio") or 0
    if 0 < steps < 1:  # what transformers 5 calls a ratio
        steps, fraction = 0, steps
    if source.get("lr_scheduler", source.get("lr_scheduler_type")) == "constant":
        steps = fraction = 0
    if fraction and not steps:
        return {"optim.warmup_fraction": fraction}
    return {"optim.warmup_steps": int(steps)}


def evaluation(value: Any, source: Source) -> Settings | str:
    strategy = source.get("eval_strategy", source.get("evaluation_strategy", "steps"))
    steps = source.get("eval_steps") or source.get("logging_steps", 500)
    is_held_out = any(source.get(name) for name in HELD_OUT.split())
    if strategy in ("no", False):
        return {"task.evaluate": False} if is_held_out else "off"
    if not is_held_out:
        raise Refused(
            "no rows are held out. Add task.eval_every_steps=N, and data.eval_fraction=0.01 or "
            "data.eval_path=FILE."
        )
    if strategy == "epoch" or steps < 1:
        return IN_STEPS.format("task.eval_every_steps")
    return {"task.eval_every_steps": int(steps)}


def saving(value: Any, source: Source) -> Settings | str:
    strategy, steps = source.get("save_strategy", "steps"), source.get("save_steps", 500)
    if strategy in ("no", False):
        return {"checkpoint.every_steps": None, "checkpoint.every_minutes": None}
    if strategy != "steps" or steps < 1:
        return IN_STEPS.format("checkpoint.every_steps") + " (a checkpoint every 30 minutes)"
    return {"checkpoint.every_steps": int(steps)}


def precision(value: Any, source: Source) -> Settings | str:
    if source.get("bf16") == "auto":
        return {"precision": "auto"}
    names = {"bf16": ("bf16", "bfloat16", "pure_bf16"), "fp16": ("fp16", "float16")}
    chosen = (kind for kind, keys in names.items() if any(source.get(key) for key in keys))
    return {"precision": next(chosen, "fp32")}


def trackers(value: Any, source: Source) -> Settings | str:
    kinds = [kind for kind in words_of(value) if kind.lower() not in ("none", "null")]
    if unknown := [kind for kind in kinds if kind not in TRACKERS.shipped]:
        shipped = ", ".join(TRACKERS.shipped)
        raise Refused(f"no tracker is called {unknown[0]}. Add tracking.kinds=[], or [{shipped}].")
    return {"tracking.kinds": kinds}


def held_out(value: Any, source: Source) -> Settings | str:
    if not value:
        return "off"
    return {"data.eval_fraction": value} if value < 1 else {"data.eval_samples": int(value)}


def length(value: Any, source: Source) -> Settings | str:
    """Tokens of a sample, which holds both answers of a pair; elsewhere each has as many."""
    is_trl = source.tool in (TRL_DPO, TRL_REWARD)
    losses = ("dpo", "rm", "ipo", "orpo", "simpo")
    is_pair = (
        is_trl or source.get("reward_model") or source.get("stage", source.get("rl")) in losses
    )
    return {"data.seq_len": 2 * value if is_pair else value}


def quantize(value: Any, source: Source) -> Settings | str:
    kind = source.get("bnb_4bit_quant_type", "nf4")
    return {"adapter.quantize": kind} if source.get("load_in_4bit") else "off"


ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
COMMON: dict[str, Converter] = {
    "optim": optimizer,
    "adam_beta1": betas,
    "adam_beta2": betas,
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs": part_of("the schedule"),
    "warmup_steps": warmup,
    "warmup_ratio": warmup,
    "max_steps": lambda value, source: {"task.steps": int(value)} if value > 0 else "off",
    "logging_steps": lambda value, source: {"task.log_every_steps": max(1, int(value))},
    "eval_strategy": evaluation,
    "evaluation_strategy": evaluation,
    "eval_steps": evaluation,
    "save_steps": saving,
    "save_strategy": saving,
    "load_best_model_at_end": choice("checkpoint.keep.best", {True: 1}),
    "metric_for_best_model": lambda value, source: {
        "checkpoint.metric": f"eval/{str(value).removeprefix('eval_')}"
    },
    "bf16": precision,
    "fp16": precision,
    "gradient_checkpointing": choice(
        "model.activation_checkpointing", {True: "full", False: "none", "offload": "full"}
    ),
    "dataloader_drop_last": choice("data.last_batch", {True: "drop", False: "short"}),
    "report_to": trackers,
    "model_revision": lambda value, source: (
        "as here" if value == "main" else {"model.revision": value}
    ),
    "attn_implementation": choice(
        "model.attention", {name: name for name in ATTENTION}, "Add model.attention=auto."
    ),
    "deepspeed": choice("zero.stage", {True: None}),
    "deepspeed_config": choice("zero.stage", {True: None}),
    "train_sampling_strategy": choice(
        "seed", {"random": None}, "samples are shuffled. Leave it out."
    ),
    "full_determinism": choice("deterministic", {True: True}),
    "use_liger_kernel": choice("model.liger_kernel", {True: True}),
}

# --- run_clm


def text_data(value: Any, source: Source) -> Settings | str:
    return {"data.path": value, "data.form": "text", "data.packing": "concat"}


TRAIN: dict[str, Converter] = {
    **COMMON,
    "train_file": text_data,
    "dataset_name": text_data,
    "validation_split_percentage": lambda value, source: {"data.eval_fraction": value / 100},
}

# --- TRL


def sft_data(value: Any, source: Source) -> Settings | str:
    """The data of ``trl sft``, with the format of its rows as far as they are here."""
    settings: Settings = {"data.path": value, "data.over_long": "truncate"}
    record = first_record(str(value)) or {}
    if "completion" in record:
        is_text = isinstance(record.get("prompt"), str)
        settings["data.form"] = "prompt_response"
        return settings | ({"data.template": "plain"} if is_text else {})
    if source.get("dataset_text_field", "text") in record:
        return settings | {"data.form": "text", "task.kind": "pretrain"}
    return settings


def loss_on(value: Any, source: Source) -> Settings | str:
    """Which tokens ``trl sft`` learns; by default it depends on the rows."""
    if source.get("assistant_only_loss"):
        return {"data.loss_on": "assistant"}
    record, only = first_record(str(source.get("dataset_name"))), source["completion_only_loss"]
    if only is None and record is None:
        raise Refused(
            "TRL learns completions alone of rows with prompt and completion, and every token of "
            "rows with messages; the rows are not on this machine. Add data.loss_on=last, or "
            "data.loss_on=all."
        )
    is_only = "completion" in (record or {}) if only is None else only
    return {"data.loss_on": "last" if is_only else "all"}


def trl_packing(value: Any, source: Source) -> Settings | str:
    if source["packing"] and source.get("packing_strategy") == "wrapped":
        raise Refused("completions are not cut. Add data.packing=best_fit.")
    return {"data.packing": "best_fit" if source["packing"] else "none"}


def lora_targets(value: Any, source: Source) -> Settings | str:
    # Without names, those that peft has for Llama, Qwen, Mistral and Gemma. A network that has no
    # such layers is refused by the plan.
    return {"adapter.targets": words_of(value) or ["q_proj", "v_proj"]}


def pairs(value: Any, source: Source) -> Settings | str:
    is_text = isinstance((first_record(str(value)) or {}).get("prompt"), str)
    template = {"data.template": "plain"} if is_text else {}
    return {"data.path": value, "data.form": "preference", **template}


_TRL: dict[str, Converter] = {
    **COMMON,
    "max_length": length,
    "use_peft": choice("adapter.kind", {True: "lora", False: "none"}),
    "lora_target_modules": lora_targets,
    "truncation_mode": choice(
        "data.over_long", {"keep_start": "truncate"}, "the end is cut off. Leave it out."
    ),
    "load_in_4bit": quantize,
    "bnb_4bit_quant_type": quantize,
    "dataset_train_split": lambda value, source: (
        "as here" if value == "train" else {"data.split": value}
    ),
}
SFT: dict[str, Converter] = {
    **_TRL,
    "dataset_name": sft_data,
    "completion_only_loss": loss_on,
    "assistant_only_loss": loss_on,
    "packing": trl_packing,
    "packing_strategy": trl_packing,
    "loss_type": choice("task.options.dft", {"dft": True, "nll": None, "chunked_nll": None}),
}
DPO: dict[str, Converter] = {
    **_TRL,
    "dataset_name": pairs,
    "loss_type": choice(
        "task.options.loss",
        {name: name for name in ("sigmoid", "robust", "hinge", "ipo", "sppo_hard", "nca_pair")},
    ),
    "disable_dropout": choice("task.options.dropout", {True: None, False: True}),
    "label_smoothing": lambda value, source: (
        {"task.options.label_smoothing": value} if value else "off"
    ),
}
REWARD: dict[str, Converter] = {**_TRL, "dataset_name": pairs}

# --- DeepSpeed-Chat

CHAT_DATA = ("Dahoas/rm-static", "Dahoas/full-hh-rlhf", "yitingxie/rlhf-reward-datasets")
"""Data sets whose rows have prompt, chosen and rejected, with the markup written out."""


def chat_data(value: Any, source: Source) -> Settings | str:
    names = value if isinstance(value, list) else [value]
    if unknown := [name for name in names if name not in CHAT_DATA]:
        raise Refused(
            f"{unknown[0]} has columns of its own. Leave it out, and add data.path=FILE with rows "
            "of prompt and response."
        )
    parts = [float(part) for part in words_of(source["data_split"])]
    weight = round(parts[0] / sum(parts), 6)
    return {
        "data.sources": [{"path": name, "weight": weight} for name in names],
        "data.form": "prompt_response", "data.columns": {"response": "chosen"},
        "data.ignore_columns": ["rejected"], "data.template": "plain", "data.loss_on": "all",
        "data.packing": "none", "data.over_long": "truncate", "optim.kind": "adamw",
        "optim.betas": [0.9, 0.95], "optim.clip_norm": 1.0,
    }  # fmt: skip


CHAT: dict[str, Converter] = {
    **COMMON,
    "data_path": chat_data,
    "data_split": part_of("data_path"),
    "num_warmup_steps": lambda value, source: {"optim.warmup_steps": int(value)},
    "offload": choice("zero.offload_optimizer", {True: "cpu"}),
    "enable_tensorboard": choice("tracking.kinds", {True: ["tensorboard"]}),
}
