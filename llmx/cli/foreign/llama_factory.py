"""LLaMA-Factory: a YAML of ``llamafactory-cli train`` with its ``dataset_info.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmx.cli.foreign import trainer
from llmx.cli.foreign.convert import (
    Converter,
    Refused,
    Settings,
    Source,
    choice,
    form,
    part_of,
    words_of,
)
from llmx.config.yaml_files import read_text
from llmx.errors import ConfigError

STAGES: dict[str, Any] = {
    "sft": "sft",
    "pt": "pretrain",
    "rm": "reward",
    "dpo": "dpo",
    "kto": {"task.kind": "dpo", "task.options.loss": "kto"},
}
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TEMPLATES: dict[str, Settings] = {
    "alpaca": {"data.template": "alpaca"},
    "chatml": {"data.template": "chatml"},
    "llama3": {"data.template": "llama3"},
    "qwen": {"data.template": "chatml", "data.system": QWEN_SYSTEM},
    "qwen3_nothink": {"data.template": "chatml"},
}
"""Those that render the same tokens here; of every other one it is not known."""
TURN_KEYS = {"role_tag": ("role", "from"), "content_tag": ("content", "value")}
TURN_ROLES = {
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system",),
}


def _of_stage(stages: str, converter: Converter) -> Converter:
    return lambda value, source: (
        converter(value, source) if source["stage"] in stages.split() else "not in this stage"
    )


def _preference(key: str) -> Converter:
    return _of_stage("dpo kto", lambda value, source: {f"task.options.{key}": value})


def targets(value: Any, source: Source) -> Settings | str:
    names = words_of(value)
    return {"adapter.targets": ["all-linear"] if names == ["all"] else names}


def quantize(value: Any, source: Source) -> Settings | str:
    bits = source.get("quantization_bit")
    if bits not in (None, 4):
        raise Refused("weights of 8 bits are not trained beside. Add adapter.quantize=nf4.")
    return {"adapter.quantize": source.get("quantization_type", "nf4")} if bits else "off"


def template(value: Any, source: Source) -> Settings | str:
    if value is not None and value not in TEMPLATES and source["stage"] != "pt":
        raise Refused(
            f"{value} is not known to render the same tokens here. Add data.template=auto for the "
            "tokenizer's own chat template (look at it: python -m llmx data preview=3 ...)."
        )
    settings = TEMPLATES.get(value, {"data.template": "auto"})
    system = source.get("default_system")
    return settings | ({"data.system": system} if system else {})


def loss_on(value: Any, source: Source) -> Settings | str:
    if source.get("train_on_prompt"):
        return {"data.loss_on": "all"}
    return {"data.loss_on": "last" if source.get("mask_history") else "assistant"}


def packing(value: Any, source: Source) -> Settings | str:
    packs = source.get("packing") or source.get("neat_packing")
    if source["stage"] == "pt":
        return {"data.packing": "none" if source.get("packing") is False else "concat"}
    return {"data.packing": "best_fit" if packs else "none"}


# --- Data


def data(value: Any, source: Source) -> Settings | str:
    parts = [_one(name, source) for name in words_of(value)]
    limit = source.get("max_samples")
    parts = [{**part, "max_rows": limit} if limit else part for part in parts]
    common: Settings = {"data.over_long": "truncate"}
    if source.get("mix_strategy", "concat") != "concat":
        raise Refused("data sets are concatenated. Leave mix_strategy out.")
    if len(parts) == 1:
        return common | {f"data.{key}": item for key, item in parts[0].items()}
    return common | {"data.sources": parts}


def eval_data(value: Any, source: Source) -> Settings | str:
    names = words_of(value)
    if len(names) != 1:
        raise Refused("one source is evaluated on. Add data.eval_path=FILE.")
    return {"data.eval_path": _one(names[0], source)["path"]}


def _one(name: str, source: Source) -> dict[str, Any]:
    """A data set of ``dataset_info.json`` as a source of ours."""
    directory = Path(str(source["dataset_dir"]))
    if str(directory) == "ONLINE":
        return {"path": name, "form": "alpaca"}
    file = directory / "dataset_info.json"
    if not file.is_file():
        raise Refused(
            f"{file} is not here. Start the import where LLaMA-Factory is started, or add "
            "data.path=FILE."
        )
    entry = _info(file).get(name)
    if not isinstance(entry, dict):
        raise Refused(f"{file} has no {name}. Add it there, or add data.path=FILE.")
    part: dict[str, Any] = {"path": _path(entry, directory)}
    if part["path"] is None:
        raise Refused(f"{name} is neither a file nor on the Hub. Add data.path=FILE.")
    for theirs, ours in (("subset", "subset"), ("split", "split"), ("num_samples", "max_rows")):
        if entry.get(theirs):
            part[ours] = entry[theirs]
    return part | _format(name, entry, source)


def _info(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_text(file))
    except ValueError as error:
        raise ConfigError(f"{file}: is not valid JSON ({error}). Correct it.") from error
    return values if isinstance(values, dict) else {}


def _path(entry: Mapping[str, Any], directory: Path) -> str | None:
    if "hf_hub_url" in entry:
        return f"hub:{entry['hf_hub_url']}"
    return str(directory / entry["file_name"]) if "file_name" in entry else None


def _format(name: str, entry: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """``form`` and ``columns`` of an entry."""
    columns, tags = dict(entry.get("columns") or {}), dict(entry.get("tags") or {})
    wrong = [f"{tag}={tags[tag]}" for tag, accepted in (*TURN_KEYS.items(), *TURN_ROLES.items())
             if tag in tags and tags[tag] not in accepted]  # fmt: skip
    if wrong or any(columns.get(media) for media in ("images", "videos", "audios")):
        unread = wrong[0] if wrong else "images, audio or video"
        raise Refused(f"{name} has {unread}, which is not read. Convert its rows to messages.")
    shared = {key: columns[key] for key in ("system", "tools", "history") if columns.get(key)}
    if columns.get("kto_tag"):
        shared["desirable"] = columns["kto_tag"]
    if entry.get("formatting", "alpaca") == "sharegpt":
        turns = columns.get("messages", "conversations")
        kind = "preference" if entry.get("ranking") else "sharegpt"
        chosen = {key: columns[key] for key in ("chosen", "rejected") if key in columns}
        return form(kind, {"conversations": turns, **chosen, **shared})
    prompt = columns.get("prompt", "instruction")
    if source["stage"] == "pt":
        return {"form": "text"} | ({"text_key": prompt} if prompt != "text" else {})
    if entry.get("ranking"):
        pair = {key: columns.get(key, key) for key in ("chosen", "rejected")}
        return form("preference", {"prompt": prompt, **pair, **shared})
    answer = columns.get("response", "output")
    if columns and not columns.get("query"):  # a column "input" of the rows is not read
        return form("prompt_response", {"prompt": prompt, "response": answer, **shared})
    query = columns.get("query", "input")
    return form("alpaca", {"instruction": prompt, "input": query, "output": answer, **shared})


ATTENTION = {
    "auto": "auto", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3",
    "disabled": "eager",
}  # fmt: skip
LLAMA_FACTORY: dict[str, Converter] = {
    **trainer.COMMON,
    "stage": choice(
        "task.kind", STAGES, f"Its rewards are not read. Set one of {', '.join(STAGES)}."
    ),
    "finetuning_type": choice(
        "adapter.kind", {"lora": "lora", "full": "none"}, "Set finetuning_type to lora or full."
    ),
    "lora_alpha": lambda value, source: {"adapter.alpha": value or 2 * source["lora_rank"]},
    "lora_target": targets,
    "additional_target": lambda value, source: {"adapter.modules_to_save": words_of(value)},
    "quantization_bit": quantize,
    "quantization_type": quantize,
    "cutoff_len": trainer.length,
    "dataset": data,
    "dataset_dir": part_of("dataset"),
    "max_samples": part_of("dataset"),
    "eval_dataset": eval_data,
    "val_size": trainer.held_out,
    "template": template,
    "default_system": part_of("template"),
    "train_on_prompt": _of_stage("sft", loss_on),
    "mask_history": _of_stage("sft", loss_on),
    "packing": packing,
    "neat_packing": packing,
    "flash_attn": choice("model.attention", ATTENTION, "Add model.attention=auto."),
    "enable_liger_kernel": trainer.COMMON["use_liger_kernel"],
    "disable_gradient_checkpointing": choice(
        "model.activation_checkpointing", {True: "none", False: "full"}
    ),
    "gradient_checkpointing": part_of("disable_gradient_checkpointing"),
    "pure_bf16": trainer.precision,
    "add_tokens": lambda value, source: {"model.add_tokens": words_of(value)},
    "add_special_tokens": lambda value, source: {"model.add_special_tokens": words_of(value)},
    "train_from_scratch": choice("model.init", {True: "scratch"}),
    "pref_loss": _of_stage(
        "dpo",
        choice(
            "task.options.loss",
            {name: name for name in ("sigmoid", "hinge", "ipo", "orpo", "simpo")},
        ),
    ),
    "pref_beta": _preference("beta"),
    "pref_ftx": _preference("sft_weight"),
    "simpo_gamma": _preference("gamma"),
    "dpo_label_smoothing": _preference("label_smoothing"),
    "kto_chosen_weight": _preference("desirable_weight"),
    "kto_rejected_weight": _preference("undesirable_weight"),
    "use_dft_loss": choice("task.options.dft", {True: True}),
}
