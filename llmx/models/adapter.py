"""An adapter inside a network, and parameters that are not trained (``model.freeze``).

The layers are those of ``peft``, put into the network in place, so that it stays the class that it
is: attention, packing, the fused loss, activation checkpointing and generation work on it as ever.
Its base is frozen. First weights depend on the seed and the layer's name alone. Shown by
``python -m pytest tests/unit/test_models_adapter.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmx.config import ALL_LINEAR, AdapterConfig, ModelConfig
from llmx.config.model_rules import (
    added_tokens,
    matching,
    no_such_module,
    output_head_target,
    short_names,
)
from llmx.errors import ConfigError
from llmx.models.adapter_names import NAME, WEIGHTS_FILE, exported_name, read_quantization
from llmx.models.initialise import module_seed
from llmx.models.load import Checkpoint
from llmx.models.parameters import (
    matching_parameters,
    output_embedding,
    tower_parameters,
    vocabulary_parameters,
)
from llmx.models.pooling import head_names
from llmx.models.quantized import Quantization, QuantizedLinear, round_layers
from llmx.models.spec import BACKBONE, CAUSAL_LM, CLASSIFICATION

TASK_TYPES = {
    CAUSAL_LM: "CAUSAL_LM",
    CLASSIFICATION: "SEQ_CLS",
    BACKBONE: "FEATURE_EXTRACTION",
}
"""peft's word for a head; it has none for a masked language model."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of one network."""

    description: dict[str, Any]
    """``adapter_config.json``, as peft writes it."""
    trained: frozenset[str]
    """Names of the network's parameters that are trained, tied ones under all of their names."""
    quantization: dict[str, Any] | None = None
    """The values of transformers' ``BitsAndBytesConfig``, if its base is kept in 4 bits."""


def add_adapter(
    network: Any,
    model: ModelConfig,
    adapter: AdapterConfig,
    seed: int,
    *,
    ds_config: Mapping[str, Any],
    dtype: torch.dtype,
    head: str,
) -> Adapter:
    """Freeze ``network`` and put ``adapter`` into it. Collective under ZeRO-3, where the base
    is sharded already; the small matrices are whole until DeepSpeed shards them with the rest.

    Raises:
        ConfigError: a name of the adapter is that of no module, or of one that cannot be adapted.
    """
    targets = _targets(network, adapter, head=head)
    saved_modules = _modules_to_save(network, model, adapter, head=head)
    config = lora_config(network, model, adapter, targets, head=head)
    with _gathering(ds_config):
        _inject(config, network)
    network.requires_grad_(False)
    layers = _lora_layers(network)
    if set(layers) != set(targets):
        raise RuntimeError(f"peft adapted {len(layers)} layers of {len(targets)} that were chosen")
    for name, layer in layers.items():
        _prepare(layer, name=name, seed=seed, dtype=dtype, dora=adapter.dora)
    for name in saved_modules:
        network.get_submodule(name).requires_grad_(True)
    trained = {
        name for name, p in network.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    description = _description(config, network, saved_modules)
    quantization = Quantization.of(adapter)
    return Adapter(
        description,
        frozenset(trained),
        None if quantization is None else quantization.describe(network, dtype=dtype),
    )


def _lora_layers(network: nn.Module) -> dict[str, Any]:
    """The adapted layers by name."""
    kind = _peft().tuners.lora.LoraLayer
    return {name: module for name, module in network.named_modules() if isinstance(module, kind)}


def reach_line(network: nn.Module) -> str:
    """Which share of the weights an adapter reaches, where experts are not among them: it adapts
    linear layers, and fused experts are none. Empty without such."""
    layers = _lora_layers(network).values()
    others = {
        name: parameter
        for name, parameter in network.named_parameters()
        if ".lora_" not in name and ".base_layer." not in name
    }
    frozen = [name for name, parameter in others.items() if not parameter.requires_grad]
    if not any("experts" in name.split(".") for name in frozen):
        return ""
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in others.items()}
    adapted = sum(layer.in_features * layer.out_features for layer in layers)
    reached = adapted + sum(sizes.values()) - sum(sizes[name] for name in frozen)
    return (
        f"The adapter reaches {reached / (adapted + sum(sizes.values())):.1%} of the weights: it "
        "adapts linear layers, and the experts of this model stay frozen"
    )


def lora_config(
    network: nn.Module,
    model: ModelConfig,
    adapter: AdapterConfig,
    targets: list[str],
    *,
    head: str,
) -> Any:
    """peft's description of the adapter. Modules that are trained whole are added by
    ``_description``: peft would keep a second copy of each."""
    transposed = any(type(network.get_submodule(name)).__name__ == "Conv1D" for name in targets)
    path = Path(model.path or "").expanduser()
    return _peft().LoraConfig(
        task_type=TASK_TYPES.get(head),
        base_model_name_or_path=str(path.absolute()) if path.is_dir() else model.path,
        revision=None if path.is_dir() else model.revision,
        r=adapter.rank,
        # peft's files have whole numbers there where they can.
        lora_alpha=int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_names_for_peft(network, targets),
        fan_in_fan_out=transposed,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
    )


def _peft() -> Any:
    try:
        import peft
        import peft.tuners.lora
    except ImportError as error:
        raise ConfigError(
            f"adapter.kind=lora needs the package peft, which cannot be imported here ({error}). "
            "Run `pip install peft` in the Python of every host."
        ) from error
    return peft


def _own_head(network: Any, head: str) -> list[str]:
    """Modules of a classification head: new, and so trained whole."""
    if head != CLASSIFICATION:
        return []
    return sorted({name.rpartition(".")[0] for name in head_names(network)})


def is_linear(module: nn.Module) -> bool:
    """Whether a module can be adapted: a linear layer, or that of GPT-2, stored transposed."""
    kind = type(module)
    return kind in (nn.Linear, QuantizedLinear) or kind.__name__ == "Conv1D"


def _linear_layers(network: Any, *, head: str) -> list[str]:
    """Names of what ``all-linear`` adapts."""
    output, head_modules = output_embedding(network), _own_head(network, head)
    in_towers = {name.rpartition(".")[0] for name in tower_parameters(network)}
    return [
        name
        for name, module in network.named_modules()
        if is_linear(module)
        and module is not output
        and name not in head_modules
        and name not in in_towers
    ]


def _targets(network: Any, adapter: AdapterConfig, *, head: str) -> list[str]:
    linear = _linear_layers(network, head=head)
    if adapter.targets == [ALL_LINEAR]:
        return linear
    modules, output = dict(network.named_modules()), output_embedding(network)
    for target in adapter.targets:
        matches = matching(modules, [target])
        if any(modules[name] is output for name in matches):
            raise ConfigError(output_head_target(target))
        if not_linear := [name for name in matches if name not in linear]:
            raise ConfigError(
                f"adapter.targets: {not_linear[0]} is a {type(modules[not_linear[0]]).__name__}, "
                f"and only linear layers are adapted: {', '.join(short_names(linear))}. To train "
                "it whole, name it in adapter.modules_to_save."
            )
        if not matches:
            raise ConfigError(no_such_module("adapter.targets", target, linear, "linear layer"))
    return matching(linear, adapter.targets)


def _modules_to_save(
    network: Any, model: ModelConfig, adapter: AdapterConfig, *, head: str
) -> list[str]:
    """Modules that are trained whole, and those that share a weight with one of them."""
    with_weights = [
        name
        for name, module in network.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    patterns = [*adapter.modules_to_save, *_own_head(network, head)]
    for target in patterns:
        if not matching(with_weights, [target]):
            kind = "module with weights"
            raise ConfigError(no_such_module("adapter.modules_to_save", target, with_weights, kind))
    saved = matching(with_weights, patterns)
    if added_tokens(model):  # rows that begin as a mean would otherwise stay it
        tables = vocabulary_parameters(network)
        saved += [
            name
            for name in with_weights
            if any(id(p) in tables for p in network.get_submodule(name).parameters(recurse=False))
        ]
    weights = {id(p) for name in saved for p in network.get_submodule(name).parameters()}
    return [
        name
        for name in with_weights
        if name in saved
        or any(id(p) in weights for p in network.get_submodule(name).parameters(recurse=False))
    ]


def _names_for_peft(network: nn.Module, chosen: list[str]) -> list[str]:
    """The ends of the names of modules where these mean no others, else the whole names."""
    ends = short_names(chosen)
    modules = [name for name, _ in network.named_modules()]
    if matching(modules, ends) == chosen and not any(end.isdecimal() for end in ends):
        return sorted(ends)
    return sorted(chosen)


@contextlib.contextmanager
def _gathering(ds_config: Mapping[str, Any]) -> Iterator[None]:
    """Inside, peft gathers weights that ZeRO-3 has sharded where it reads them (DoRA does): it
    asks transformers, whose process-wide note of ZeRO-3 is otherwise not used."""
    if ds_config["zero_optimization"]["stage"] != 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    note = HfDeepSpeedConfig(dict(ds_config))  # known by a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del note


@torch.no_grad()
def _prepare(layer: Any, *, name: str, seed: int, dtype: torch.dtype, dora: bool) -> None:
    """First weights, drawn on the CPU as peft draws them: A uniform (He), B zero. In the dtype of
    the model; the optimizer has the fp32 copy."""
    first, second = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    drawn = torch.empty(first.shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(module_seed(seed, f".{name}.lora_A"))
    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    first.data = drawn.to(first.device, dtype)
    second.data = torch.zeros(second.shape, dtype=dtype, device=second.device)
    first.requires_grad_(True)
    second.requires_grad_(True)
    if not dora:
        return
    magnitude = layer.lora_magnitude_vector[NAME].weight
    magnitude.data = magnitude.data.to(dtype)
    magnitude.requires_grad_(True)
    base = layer.get_base_layer()
    if hasattr(base.weight, "ds_id"):
        import deepspeed

        # DoRA reads the weight of the layer inside it: ZeRO-3 must gather it for both.
        deepspeed.zero.register_external_parameter(layer, base.weight)
        deepspeed.zero.register_external_parameter(layer.lora_magnitude_vector[NAME], base.weight)


def _description(config: Any, network: nn.Module, saved_modules: list[str]) -> dict[str, Any]:
    """``adapter_config.json``: sets as sorted lists, so that the same adapter has the same file."""
    values = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    values["modules_to_save"] = _names_for_peft(network, saved_modules) or None
    values["inference_mode"] = True
    return {key: getattr(value, "value", value) for key, value in values.items()}


def inject_described(network: nn.Module, description: Mapping[str, Any]) -> None:
    """Put an adapter of this ``adapter_config.json`` into ``network``, its weights undefined."""
    peft = _peft()
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    values = {name: value for name, value in description.items() if name in fields}
    # Modules that are trained whole are those of the network itself.
    config = peft.LoraConfig(**{**values, "modules_to_save": None, "inference_mode": False})
    _inject(config, network)


def _inject(config: Any, network: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that are Conv1D, and of tied ones
        _peft().inject_adapter_in_model(config, network)


def load_adapted(directory: Path, source: ModelConfig) -> Any:
    """A causal LM of transformers with the adapter of ``directory`` in it, in the adapter's dtype.

    Args:
        source: the model that it was trained on.
    """
    from transformers import GenerationConfig

    from llmx.models.model import auto_class
    from llmx.models.network_config import network_config

    peft, config = _peft(), network_config(source)
    weights = Checkpoint([directory / WEIGHTS_FILE])
    base = auto_class(CAUSAL_LM, config).from_pretrained(
        str(Path(source.path or "").expanduser()),
        revision=source.revision or "main",
        config=config,
        dtype=weights.tensor(weights.names[0]).dtype,
        trust_remote_code=source.trust_remote_code,
    )
    if (quantized := read_quantization(directory)) is not None:
        round_layers(base, quantized)
    embedding = base.get_input_embeddings().weight
    for name in [name for name, parameter in base.named_parameters() if parameter is embedding]:
        shape = weights.shapes.get(exported_name(name), embedding.shape)
        if shape != embedding.shape:  # model.add_tokens has given it rows
            base.resize_token_embeddings(shape[0], mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        adapted = peft.PeftModel.from_pretrained(base, str(directory), autocast_adapter_dtype=False)
    model: Any = adapted.get_base_model()
    with contextlib.suppress(OSError, ValueError):
        model.generation_config = GenerationConfig.from_pretrained(str(directory))
    return model


@contextlib.contextmanager
def base_alone(network: nn.Module) -> Iterator[None]:
    """Inside, the network computes what its base does in an evaluation: without its adapter, and
    without dropout. Nothing is moved."""
    layers, was_training = _lora_layers(network).values(), network.training
    network.eval()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        network.train(was_training)


def freeze(network: nn.Module, patterns: list[str]) -> None:
    """Parameters whose names match are not trained (``model.freeze``), nor are the towers of a
    multi-modal model.

    Raises:
        ConfigError: a pattern matches nothing, or all is frozen.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    for name in tower_parameters(network):
        parameters[name].requires_grad_(False)
    for pattern in patterns:
        for name in matching_parameters("model.freeze", pattern, list(parameters), "parameters"):
            parameters[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in parameters.values()):
        raise ConfigError(
            "model.freeze: the patterns match every parameter, so nothing would be trained. "
            f"Leave one out of {', '.join(patterns)}."
        )
