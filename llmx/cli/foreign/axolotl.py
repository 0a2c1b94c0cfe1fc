"""axolotl: the YAML of ``axolotl train``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmx.cli.foreign import trainer
from llmx.cli.foreign.convert import (
    Converter,
    Refused,
    Settings,
    Source,
    choice,
    first_record,
    form,
    part_of,
    words_of,
)

LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
TEMPLATES = {
    "tokenizer_default": "auto",
    "chatml": "chatml",
    "tokenizer_default_fallback_chatml": "auto",
    "alpaca": "alpaca",
    "llama3": "llama3",
}
TURN_KEYS = {"role": ("role", "from"), "content": ("content", "value")}
READ = (
    "path", "type", "name", "split", "data_files", "ds_type", "chat_template", "field_messages",
    "field_chosen", "field_rejected", "field", "message_property_mappings", "message_field_role",
    "message_field_content", "roles", "roles_to_train", "train_on_eos", "field_tools",
    "trust_remote_code",
)  # fmt: skip
"""Keys of a data set that are read."""


def targets(value: Any, source: Source) -> Settings | str:
    names = words_of(source.get("lora_target_modules"))
    return {"adapter.targets": ["all-linear"] if source.get("lora_target_linear") else names}


def method(value: Any, source: Source) -> Settings | str:
    if source.get("reward_model"):
        return {"task.kind": "reward"}
    if value and value not in LOSSES:
        raise Refused(f"its rewards are not read. Set rl to one of {', '.join(LOSSES)}.")
    return {"task.kind": "dpo", "task.options.loss": LOSSES[value]} if value else "off"


def template(name: str) -> Settings:
    """The settings of a chat template by its name."""
    if name in TEMPLATES:
        return {"data.template": TEMPLATES[name]}
    raise Refused(
        f"{name} is not known to render the same tokens here. Set chat_template to "
        "tokenizer_default for the tokenizer's own (look at it: python -m llmx data preview=3 ...)."
    )


def trackers(value: Any, source: Source) -> Settings | str:
    keys = {"wandb": ("use_wandb", "wandb_project"), "tensorboard": ("use_tensorboard",),
            "mlflow": ("use_mlflow",)}  # fmt: skip
    kinds = [kind for kind, names in keys.items() if any(source.get(name) for name in names)]
    settings: Settings = {"tracking.kinds": kinds}
    if source.get("wandb_project"):
        settings["tracking.project"] = source["wandb_project"]
    return settings


# --- Data


def data(value: Any, source: Source) -> Settings | str:
    parts = [value] if isinstance(value, Mapping) else list(value)
    sources = [_one(part, source) for part in parts]
    shared = {key: item for _, settings in sources for key, item in settings.items()}
    for _, settings in sources:
        if settings != shared:
            raise Refused("its data sets are rendered in different ways. Import one of them.")
    shared["data.over_long"] = "truncate"
    packs = source.get("sample_packing")
    shared["data.packing"] = "best_fit" if packs else "none"
    if len(sources) == 1:
        return shared | {f"data.{key}": item for key, item in sources[0][0].items()}
    return shared | {"data.sources": [part for part, _ in sources]}


def eval_data(value: Any, source: Source) -> Settings | str:
    if len(value) != 1:
        raise Refused("one source is evaluated on. Add data.eval_path=FILE.")
    return {"data.eval_path": _path(value[0])}


def _path(part: Mapping[str, Any]) -> str:
    files = part.get("data_files")
    if isinstance(files, str) or (isinstance(files, list) and len(files) == 1):
        return files if isinstance(files, str) else str(files[0])
    if files:
        raise Refused("one file of data_files is read. Add data.path=GLOB.")
    return str(part["path"])


def _one(part: Mapping[str, Any], source: Source) -> tuple[dict[str, Any], Settings]:
    """A data set as a source of ours, and what it sets for all of them."""
    if unread := [key for key, item in part.items() if key not in READ and item is not None]:
        raise Refused(f"{part.get('path')} has {unread[0]}, which is not read. Leave it out.")
    kind = part.get("type") if isinstance(part.get("type"), str) else "a prompt of its own"
    data_source: dict[str, Any] = {"path": _path(part)}
    for theirs, ours in (("name", "subset"), ("split", "split")):
        if part.get(theirs) and part[theirs] != "train":
            data_source[ours] = part[theirs]
    if source.get("rl") or source.get("reward_model"):
        if kind not in ("chat_template.default", "chat_template.argilla"):
            raise Refused(f"the prompts of type {kind} are not known. Add data.form=preference.")
        columns = {"conversations": part.get("field_messages", "messages"),
                   "chosen": part.get("field_chosen", "chosen"),
                   "rejected": part.get("field_rejected", "rejected")}  # fmt: skip
        data_source |= form("preference", columns)
        return data_source, {}
    if kind == "chat_template":
        return data_source | _chat(part), _chat_settings(part, source)
    if kind == "alpaca":
        record = first_record(data_source["path"])
        has_input = record is None or "input" in record  # as far as anybody can tell
        if has_input and "data.template" not in source.answered:
            raise Refused(
                "rows with an input have a prompt of their own there, which is not rendered here. "
                "Make messages of the rows; or add data.template=alpaca to train on instruction "
                "and input in two lines."
            )
        return data_source | {"form": "alpaca"}, {
            "data.template": "alpaca",
            "data.loss_on": "all" if source.get("train_on_inputs") else "assistant",
        }
    if kind in ("completion", "pretrain"):
        key = part.get("field") or "text"
        text = {"form": "text"} | ({"text_key": key} if key != "text" else {})
        return data_source | text, {"task.kind": "pretrain"}
    raise Refused(
        f"the prompts of type {kind} are not known. Make messages of the rows (type: "
        "chat_template), or add data.template=auto."
    )


def _chat(part: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict(part.get("message_property_mappings") or {})
    keys |= {name: part[f"message_field_{name}"] for name in TURN_KEYS
             if part.get(f"message_field_{name}")}  # fmt: skip
    for name, theirs in keys.items():
        if theirs not in TURN_KEYS.get(name, ()):
            raise Refused(f"turns with {name} in {theirs} are not read. Rename it in the rows.")
    return form("messages", {"messages": part.get("field_messages") or "messages"})


def _chat_settings(part: Mapping[str, Any], source: Source) -> Settings:
    if list(part.get("roles_to_train") or ["assistant"]) not in (["assistant"], ["gpt"]):
        raise Refused("roles_to_train: the assistant's turns are learned. Leave it out.")
    if part.get("train_on_eos", "turn") not in ("turn", None):
        raise Refused("train_on_eos: the end of each answer is learned. Leave it out.")
    settings: Settings = {"data.loss_on": "assistant"}
    name = part.get("chat_template") or source.get("chat_template") or "tokenizer_default"
    return settings | template(str(name))


AXOLOTL: dict[str, Converter] = {
    **trainer.COMMON,
    "adapter": choice(
        "adapter.kind",
        {"lora": "lora", "qlora": {"adapter.kind": "lora", "adapter.quantize": "nf4"}},
        "there is no such adapter. Set adapter to lora or qlora.",
    ),
    "lora_target_modules": targets,
    "lora_target_linear": targets,
    "load_in_4bit": part_of("adapter"),
    "rl": method,
    "reward_model": method,
    "optimizer": trainer.optimizer,
    "lr_scheduler": trainer.schedule,
    "cosine_min_lr_ratio": part_of("lr_scheduler"),
    "evals_per_epoch": lambda value, source: trainer.IN_STEPS.format("task.eval_every_steps"),
    "saves_per_epoch": lambda value, source: trainer.IN_STEPS.format("checkpoint.every_steps"),
    "sequence_len": trainer.length,
    "datasets": data,
    "pretraining_dataset": data,
    "test_datasets": eval_data,
    "val_set_size": trainer.held_out,
    "sample_packing": part_of("datasets"),
    "chat_template": part_of("datasets"),
    "train_on_inputs": part_of("datasets"),
    "wandb_project": trackers,
    "use_wandb": trackers,
    "use_tensorboard": trackers,
    "use_mlflow": trackers,
    "bfloat16": trainer.precision,
    "float16": trainer.precision,
    "float32": trainer.precision,
    **dict.fromkeys(
        "flash_attention sdp_attention eager_attention flex_attention xformers_attention".split(),
        choice("model.attention", {True: "auto"}),
    ),
    **dict.fromkeys(
        "liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy".split(),
        trainer.COMMON["use_liger_kernel"],
    ),
}
