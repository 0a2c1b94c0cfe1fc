"""The Hugging Face config of a network: a published ``config.json`` and typed values, read once.

A config class rewrites what it reads: ``rope_theta`` beside ``rope_scaling`` becomes
``rope_parameters``, old names of activations and layer kinds become new ones, missing values follow
from others. So typed values are merged into the file before the class reads it, in the file's own
spelling, and each of them is looked for in the result.

The control process, which loads no transformers, asks for it in a process of its own
(``llmx.compose.networks``):

    python -m llmx.models.network_config REQUEST ANSWER
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmx.config import ModelConfig
from llmx.config.build import shown
from llmx.config.model_rules import LANGUAGE_SECTION
from llmx.errors import ConfigError, did_you_mean

ROPE = ("rope_parameters", "rope_scaling")
"""Names of the mapping of rotary embeddings: of transformers 5, and of 4."""
IN_ROPE = ("rope_theta", "partial_rotary_factor")
"""Values that stand in that mapping, or beside it."""
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers")
READ_BY_ALL = (
    "attention_chunk_size", "id2label", "init_std", "initializer_range", "is_decoder", "label2id",
    "layer_types", "max_position_embeddings", "num_labels", "output_router_logits",
    "problem_type", "sliding_window", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
"""Values that transformers or llmx reads of every architecture, outside its own module."""
SET_ELSEWHERE = {
    "dtype": "precision decides it",
    "torch_dtype": "precision decides it",
    "model_type": "the file of model.path decides it",
    "architectures": "the task decides it",
    "use_cache": "training keeps no cache",
    "transformers_version": "the installed version is written",
    "vocab_size": "the tokenizer decides it, and model.add_tokens adds rows",
}
"""Values that llmx sets itself, and what decides them."""


def network_config(model: ModelConfig) -> Any:
    """The Hugging Face config of ``model``, before anything is set from the tokenizer.

    Raises:
        ConfigError: a typed value cannot be used.
        OSError, ValueError: there is no config that transformers can read.
    """
    from transformers import AutoConfig

    if model.path is None or (model.kind != "hf" and model.init == "scratch"):
        return AutoConfig.for_model(model.kind, **model.config)
    if model.resolved:
        config = config_from(model.resolved)
        config._name_or_path = model.path
        return config
    config, problems = read_config(model)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def read_config(model: ModelConfig) -> tuple[Any, list[str]]:
    """The config of ``model.path`` with the values of ``model.config``, and one message for each
    of them that cannot be used.

    Raises OSError and ValueError where transformers cannot read the file.
    """
    from transformers import AutoConfig, PreTrainedConfig

    path = str(model.path)
    file, _ = PreTrainedConfig.get_config_dict(path, revision=model.revision)
    network = _Network(_class_of(model, file), file)
    if not model.config:
        options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        return AutoConfig.from_pretrained(path, **options), []
    unknown = network.unknown(model.config)
    typed = {key: value for key, value in model.config.items() if key not in unknown}
    merged = network.merged(typed)
    try:
        config = network.read(merged)
    except Exception as error:  # a config class raises anything
        overrides = " ".join(f"model.config.{key}={shown(value)}" for key, value in typed.items())
        reason = str(error).rpartition("Error: ")[2].rstrip(".")
        refused = (
            f"{overrides}: {network.kind.__name__} refuses the config with this: {reason}. Type "
            "what goes with it, or leave it out."
        )
        return None, [*unknown.values(), refused]
    problems = [*unknown.values(), *network.without_effect(typed, merged, config)]
    config._name_or_path = model.path
    return config, problems


def plain_values(config: Any) -> dict[str, Any]:
    """Every value of a config as JSON and YAML take it: infinity under a name."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def config_from(values: dict[str, Any]) -> Any:
    """The inverse of ``plain_values``, for a class of transformers."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[values["model_type"]]
    return kind.from_dict(kind._decode_special_floats(copy.deepcopy(values)))


def _class_of(model: ModelConfig, file: dict[str, Any]) -> Any:
    """The config class of a ``config.json``."""
    from transformers import CONFIG_MAPPING, AutoConfig

    brings_code = "AutoConfig" in file.get("auto_map", {}) and model.trust_remote_code
    if brings_code or "model_type" not in file:  # an old file, known by the directory's name
        config = AutoConfig.from_pretrained(
            str(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        return type(config)
    kind = str(file["model_type"])
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"its model_type {shown(kind)} is none that the installed transformers knows. Update "
            "transformers, or set model.trust_remote_code=true if the directory brings code."
        )
    return CONFIG_MAPPING[kind]


class _Network:
    """A config class, and the published values that it reads."""

    def __init__(self, kind: Any, file: dict[str, Any]) -> None:
        self.kind, self.file = kind, file
        self.is_wrapper = LANGUAGE_SECTION in getattr(kind, "sub_configs", {})
        self.text_kind = self._text_kind() if self.is_wrapper else kind

    def _text_kind(self) -> Any:
        """The class of the language model's config: a wrapper takes one of several, by the
        ``model_type`` in the file."""
        from transformers import CONFIG_MAPPING

        section = self.file.get(LANGUAGE_SECTION)
        name = str(section.get("model_type")) if isinstance(section, dict) else ""
        kind: Any = self.kind.sub_configs[LANGUAGE_SECTION]
        if dataclasses.is_dataclass(kind):
            return kind
        return CONFIG_MAPPING[name] if name in CONFIG_MAPPING else type(self.kind().text_config)

    def read(self, values: dict[str, Any]) -> Any:
        return self.kind.from_dict(copy.deepcopy(values))

    def unknown(self, typed: dict[str, Any]) -> dict[str, str]:
        """Typed keys that are no values of this network's to choose, each with its message."""
        names = _names(self.text_kind) | _names(self.kind) | set(self.file)
        if self.is_wrapper:
            names |= set(self.file.get(LANGUAGE_SECTION) or ())
        problems = {}
        for key, value in typed.items():
            where = f"model.config.{shown(key)}={shown(value)}"
            if key in SET_ELSEWHERE and value != self.file.get(key):
                problems[key] = f"{where}: has no effect: {SET_ELSEWHERE[key]}. Leave it out."
            elif key not in names and _is_fixed(self.text_kind):
                problems[key] = (
                    f"{where}: {self.text_kind.__name__} has no such value."
                    f"{did_you_mean(key[:100], sorted(names))} Correct the name, or leave it out."
                )
        return problems

    def merged(self, typed: dict[str, Any]) -> dict[str, Any]:
        """The file with the typed values, in the file's spelling."""
        values = copy.deepcopy(self.file)
        for key, value in typed.items():
            for kind, part in self._places(key, values):
                _put(part, key, value, kind)
        file_parts = self._parts(copy.deepcopy(self.file))
        for (kind, part), (_, file_part) in zip(self._parts(values), file_parts, strict=True):
            _leave_out_derived(part, file_part, typed, kind)
        return values

    def _parts(self, values: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
        """The class and the values of each config in the file: the language model's first, which
        some wrappers have among their own (Qwen2.5-VL)."""
        if not self.is_wrapper:
            return [(self.kind, values)]
        text = values.get(LANGUAGE_SECTION)
        return [(self.text_kind, text if isinstance(text, dict) else values), (self.kind, values)]

    def _places(self, key: str, values: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
        """The parts that a key is put into: the first that knows it; tied embeddings are a value
        of all."""
        parts = self._parts(values)
        if key == "tie_word_embeddings":
            return parts
        return next(([part] for part in parts if key in _names(part[0])), parts[:1])

    def without_effect(
        self, typed: dict[str, Any], merged: dict[str, Any], config: Any
    ) -> Iterator[str]:
        """Yield a message for each typed value that the class does not take over, or that nothing
        of the network reads."""
        for key, value in typed.items():
            kind, _ = self._places(key, merged)[0]
            part = config if kind is self.kind else config.get_text_config()
            where, name = f"model.config.{shown(key)}={shown(value)}", type(part).__name__
            layers = getattr(part, "layer_types", None)
            result = _value_in(part, key)
            others_differ = self._others_differ(key, typed, config, part)
            if key not in _names(kind) and others_differ:
                continue  # an old name, that the class makes others of
            if not _holds(result, value):
                yield (
                    f"{where}: has no effect: {name} makes {shown(result)} of it. Type the value "
                    "that decides it, or leave it out."
                )
            elif key in WINDOWS and value and layers and "sliding_attention" not in layers:
                yield (
                    f"{where}: has no effect: no layer of this {name} has a sliding window. Type "
                    "model.config.layer_types as well, or leave it out."
                )
            elif others_differ is False and _is_fixed(kind) and not _is_read(kind, key):
                family = name.removesuffix("Config")
                yield f"{where}: has no effect: no layer of {family} reads it. Leave it out."

    def _others_differ(
        self, key: str, typed: dict[str, Any], config: Any, part: Any
    ) -> bool | None:
        """Whether other values of the config follow from a typed one; None where nothing differs
        without it, or where the file cannot be read without it."""
        rest = {name: value for name, value in typed.items() if name != key}
        try:
            before = self.read(self.merged(rest)).to_dict()
        except Exception:  # a config class raises anything
            return None
        after = config.to_dict()
        if part is not config:
            before, after = before[LANGUAGE_SECTION], after[LANGUAGE_SECTION]
        keys = before.keys() | after.keys()
        differing = {name for name in keys if before.get(name) != after.get(name)}
        names = _spellings(type(part), key) | ({*ROPE} if key in (*ROPE, *IN_ROPE) else set())
        return bool(differing - names) if differing else None


def _names(kind: Any) -> set[str]:
    """Every key that a config class takes."""
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    if "rope_parameters" in names:
        names |= {*ROPE, *IN_ROPE}
    return names | {"num_labels"}


def _is_fixed(kind: Any) -> bool:
    """Whether its keys are those of its fields; code of the Hub may read any."""
    return str(kind.__module__).startswith("transformers.")


def _spellings(kind: Any, key: str) -> set[str]:
    """The key and its other names."""
    name = kind.attribute_map.get(key, key)
    return {name, *(alias for alias, target in kind.attribute_map.items() if target == name)}


def _put(part: dict[str, Any], key: str, value: Any, kind: Any) -> None:
    """Set a typed value in a part of the file, where the file has it."""
    rope = next((part[name] for name in ROPE if isinstance(part.get(name), dict)), None)
    if key in IN_ROPE and rope is not None:
        if any(isinstance(entry, dict) for entry in rope.values()):
            raise ConfigError(
                f"model.config.{key}={shown(value)}: the rotary embeddings of this model differ by "
                f"kind of layer. Type which: 'model.config.rope_parameters="
                f"{{{next(iter(rope))}: {{{key}: {shown(value)}}}}}'."
            )
        if key in rope:
            rope[key] = value
            return
    if key in ROPE:
        spelling = next((name for name in ROPE if name in part), key)
        part[spelling] = _rope(rope or {}, value)
        return
    field = kind.attribute_map.get(key, key)
    published = [part.pop(name) for name in _spellings(kind, key) if name in part]
    defaults = [f.default for f in dataclasses.fields(kind) if f.name == field]
    old = next(iter([*published, *defaults]), None)
    part[field] = _joined(old, value)


def _joined(old: Any, typed: Any) -> Any:
    """A typed value in the place of an old one: numbers in its type, on which config classes
    insist, and mappings entry by entry."""
    if isinstance(old, dict) and isinstance(typed, dict):
        return {**old, **{key: _joined(old.get(key), value) for key, value in typed.items()}}
    return float(typed) if isinstance(old, float) and type(typed) is int else typed


def _rope(file: dict[str, Any], typed: dict[str, Any] | None) -> dict[str, Any] | None:
    """The mapping of rotary embeddings with typed values. Another type of scaling replaces the
    file's, but for the base frequency."""
    base = {key: file[key] for key in IN_ROPE if key in file}
    if not typed:
        return {**base, "rope_type": "default"} if base else None
    if any(isinstance(entry, dict) for entry in (*file.values(), *typed.values())):
        return {
            key: _rope(file.get(key) or {}, typed[key]) if key in typed else file[key]
            for key in {**file, **typed}
        }
    kind = typed.get("rope_type", typed.get("type"))
    is_same_kind = kind is None or kind == file.get("rope_type", file.get("type"))
    joined: dict[str, Any] = _joined(file if is_same_kind else base, typed)
    return joined


def _leave_out_derived(
    part: dict[str, Any], file_part: dict[str, Any], typed: dict[str, Any], kind: Any
) -> None:
    """Leave out lists by layer that the class makes of the file's other values by itself: it makes
    them anew of those that are typed."""
    names = _names(kind)
    for key, value in file_part.items():
        if not isinstance(value, list) or key in typed or key not in names:
            continue
        rest = {name: file_part[name] for name in file_part if name != key}
        try:
            derived = _value_in(kind.from_dict(copy.deepcopy(rest)), key)
            published = _value_in(kind.from_dict(copy.deepcopy(file_part)), key)
        except Exception:  # the class cannot do without it
            continue
        if isinstance(derived, list) and derived == published:
            part.pop(key, None)


def _value_in(config: Any, key: str) -> Any:
    """A value of a config as a typed one is compared with it: of rotary embeddings that differ by
    kind of layer, a list."""
    if key not in (*ROPE, *IN_ROPE):
        value: Any = getattr(config, key, None)
        return value.to_dict() if hasattr(value, "to_dict") else value
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    if key in ROPE:
        return rope if len(kinds) == 1 else [*kinds, rope]
    values = [entry.get(key) for entry in kinds]
    return values[0] if len(values) == 1 else values


def _holds(result: Any, typed: Any) -> bool:
    """Whether a value of the config is the typed one, or one of a list is; of a mapping, whether
    it has its entries."""
    if isinstance(typed, dict) and isinstance(result, dict):
        entries = {str(key): value for key, value in result.items()}
        return all(
            _holds(entries.get("rope_type" if key == "type" else str(key)), value)
            for key, value in typed.items()
        )
    if isinstance(result, list | tuple) and not isinstance(typed, list):
        return any(_holds(entry, typed) for entry in result)
    if isinstance(typed, list):
        return isinstance(result, list | tuple) and list(result) == typed
    if typed is None and isinstance(result, dict):
        return result.get("rope_type") in (None, "default")
    return bool(result == typed)


def _is_read(kind: Any, key: str) -> bool:
    """Whether the module of the network reads a value of its config, or a property of the config
    does. What is only read as the config is made shows in other values."""
    names = _spellings(kind, key)
    if key in (*ROPE, "rope_theta") or names & set(READ_BY_ALL):
        return True
    pattern = re.compile(rf"[.\"']({'|'.join(map(re.escape, names))})\b")
    files = list(Path(inspect.getfile(kind)).parent.glob("modeling_*.py"))
    reader = inspect.getsource(kind.__post_init__)
    config_classes = [base for base in kind.__mro__ if base.__name__.endswith("Config")]
    properties = [inspect.getsource(base).replace(reader, "") for base in config_classes[:-1]]
    texts = [*properties, *(file.read_text(encoding="utf-8") for file in files)]
    # Some architectures have no module of their own, but parts of others'.
    return not files or any(pattern.search(text) for text in texts)


def main(request: Path, answer: Path) -> None:
    """Answer a request of the control process: the config as plain values, or what is wrong."""
    values = json.loads(request.read_text(encoding="utf-8"))
    reply: dict[str, Any] = {}
    try:
        config, problems = read_config(ModelConfig(**values))
        reply = {"problems": problems} if problems else {"config": plain_values(config)}
    except ConfigError as error:
        reply = {"problems": [str(error)]}
    except Exception as error:  # a config class raises anything
        reply = {"unreadable": " ".join(str(error).split()) or repr(error)}
    answer.write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
