"""The size of an adapter and its names, from the config's values alone.

The modules of the architectures that are planned, by their names in transformers; compared with
the library's own in ``tests/unit/test_plan_adapter.py``. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from llmx.config.build import shown
from llmx.config.model_rules import (
    added_tokens,
    is_named,
    matching,
    no_such_module,
    output_head_target,
    short_names,
)
from llmx.config.schema import ALL_LINEAR, AdapterConfig, ModelConfig
from llmx.errors import did_you_mean
from llmx.plan.geometry import Geometry, model_geometry

CAUSAL_LM, CLASSIFICATION, BACKBONE = "causal_lm", "sequence_classification", "backbone"
"""Heads, as ``llmx.models.spec`` calls them."""


@dataclass(frozen=True)
class Modules:
    """The modules of a network that have weights."""

    linear: dict[str, tuple[int, int]]
    """Name -> (width in, width out), without the output head."""
    others: dict[str, int]
    """Name -> parameters: embeddings (that of tokens first), norms, the output head."""
    with_any_head: bool = True
    """Whether names are the same whatever the network ends in; a BERT's depend on it, and these
    are those of the masked language model."""


@dataclass(frozen=True)
class AdapterSize:
    """The size of an adapter, in parameters."""

    added: int
    """The small matrices."""
    trained: int
    """The added ones and the modules of the model that are trained whole."""
    quantized: int = 0
    """Frozen weights that are kept in 4 bits."""


def network_modules(model: ModelConfig) -> Modules | None:
    """The modules of the experiment's model; None where only building it would tell."""
    kind, config = model.architecture, model.network
    shape = model_geometry(model)
    if shape is None:
        return None
    if kind == "gpt2":
        return _gpt2(shape, config)
    if kind == "opt":
        if int(config.get("word_embed_proj_dim") or shape.hidden_size) != shape.hidden_size:
            return None
        return _opt(shape, config)
    if shape.block == "bert":
        return _bert(shape, config) if kind == "bert" else None
    return _llama(shape, config) if shape.block == "llama" else None


def adapter_size(model: ModelConfig, adapter: AdapterConfig) -> AdapterSize | None:
    """The parameters that ``adapter`` adds and trains; None without one, or where the modules are
    not known."""
    modules = network_modules(model) if adapter.kind != "none" else None
    if modules is None:
        return None
    targets = adapter.targets
    names = list(modules.linear) if ALL_LINEAR in targets else matching(modules.linear, targets)
    added = 0
    for name in names:
        width_in, width_out = modules.linear[name]
        added += adapter.rank * (width_in + width_out) + (width_out if adapter.dora else 0)
    whole_modules = list(adapter.modules_to_save)
    if added_tokens(model):
        whole_modules += ["lm_head", next(iter(modules.others))]
    saved = matching([*modules.linear, *modules.others], whole_modules)
    saved_size = sum(
        modules.others[name] if name in modules.others else _product(modules.linear[name])
        for name in saved
    )
    quantized = sum(
        _product(widths)
        for name, widths in modules.linear.items()
        if adapter.quantize != "none" and name not in saved
    )
    return AdapterSize(added, added + saved_size, quantized)


def trained_parameters(model: ModelConfig, adapter: AdapterConfig) -> int | None:
    """Parameters that are trained beside frozen ones (``adapter``, ``model.freeze``); None where
    all are, or where the modules are not known."""
    if (size := adapter_size(model, adapter)) is not None:
        return size.trained
    shape, modules = model_geometry(model), network_modules(model) if model.freeze else None
    if shape is None or modules is None:
        return None
    linear = {name: _product(widths) for name, widths in modules.linear.items()}
    # Biases of linear layers count as trained: they are a thousandth.
    frozen = sum(
        elements
        for name, elements in {**linear, **modules.others}.items()
        if any(fnmatchcase(f"{name}.weight", pattern) for pattern in model.freeze)
    )
    return max(1, shape.num_parameters - frozen)


def target_problems(
    model: ModelConfig, adapter: AdapterConfig, *, head: str = CAUSAL_LM
) -> Iterator[str]:
    """One message for each name of ``adapter`` that no module has, where they are known. ``head``:
    what the network ends in (``llmx.models.spec``); empty: not known, so any will do."""
    modules = network_modules(model) if adapter.kind != "none" else None
    if modules is None:
        return
    linear, other_names = _named(modules, head)
    for target in adapter.targets:
        if is_named("lm_head", target) and "lm_head" in other_names:
            yield output_head_target(target)
        elif target != ALL_LINEAR and not matching(linear, [target]):
            yield no_such_module("adapter.targets", target, linear, "linear layer")
    names = [*linear, *other_names]
    for target in adapter.modules_to_save:
        if not matching(names, [target]):
            yield no_such_module("adapter.modules_to_save", target, names, "module with weights")


def freeze_problems(model: ModelConfig, *, head: str = CAUSAL_LM) -> Iterator[str]:
    """One message for each pattern of ``model.freeze`` that no parameter matches, where they are
    known. ``head``: as of ``target_problems``."""
    modules = network_modules(model) if model.freeze else None
    if modules is None:
        return
    module_names = [name for short in _named(modules, head) for name in short]
    if not head:
        module_names += [name for short in _named(modules, BACKBONE) for name in short]
    parameters = [f"{name}.{kind}" for name in module_names for kind in ("weight", "bias")]
    for pattern in model.freeze:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            short = short_names(module_names)
            yield (
                f"model.freeze: {shown(pattern)} matches no parameter of the model."
                f"{did_you_mean(pattern.strip('*.')[:100], short)} Names are like "
                f"{parameters[0]}, and a star stands for any characters: '*.{short[0]}.*'. It has "
                f"{', '.join(short[:40])}{', ...' if len(short) > 40 else ''}."
            )


def _named(modules: Modules, head: str) -> tuple[list[str], list[str]]:
    """Names of the linear layers and of the others, as a network with this head has them."""
    linear, other_names = list(modules.linear), list(modules.others)
    if not modules.with_any_head:  # BERT's: also the pooler, and the head of a classifier
        linear, other_names = [*linear, "bert.pooler.dense"], [*other_names, "classifier"]
    elif head != CAUSAL_LM:
        other_names = [name for name in other_names if name != "lm_head" or not head]
        other_names += ["score"] if head in ("", CLASSIFICATION) else []
    if head == BACKBONE:  # is not inside anything
        linear = [name.partition(".")[2] for name in linear]
        other_names = [name.partition(".")[2] for name in other_names]
    return linear, other_names


def _product(widths: tuple[int, int]) -> int:
    return widths[0] * widths[1]


def _llama(shape: Geometry, config: dict[str, Any]) -> Modules:
    hidden, ffn, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    linear: dict[str, tuple[int, int]] = {}
    sizes = {"model.embed_tokens": vocab * hidden}
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}"
        linear[f"{layer}.self_attn.q_proj"] = (hidden, shape.query_size)
        linear[f"{layer}.self_attn.k_proj"] = (hidden, shape.kv_size)
        linear[f"{layer}.self_attn.v_proj"] = (hidden, shape.kv_size)
        linear[f"{layer}.self_attn.o_proj"] = (shape.query_size, hidden)
        linear[f"{layer}.mlp.gate_proj"] = (hidden, ffn)
        linear[f"{layer}.mlp.up_proj"] = (hidden, ffn)
        linear[f"{layer}.mlp.down_proj"] = (ffn, hidden)
        if shape.qk_norm:
            head = shape.query_size // shape.num_heads
            sizes[f"{layer}.self_attn.q_norm"] = sizes[f"{layer}.self_attn.k_norm"] = head
        sizes[f"{layer}.input_layernorm"] = hidden
        sizes[f"{layer}.post_attention_layernorm"] = hidden
    sizes["model.norm"] = hidden
    sizes["lm_head"] = 0 if config.get("tie_word_embeddings") else vocab * hidden
    return Modules(linear, sizes)


def _gpt2(shape: Geometry, config: dict[str, Any]) -> Modules:
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    linear: dict[str, tuple[int, int]] = {}
    sizes = {
        "transformer.wte": shape.vocab_size * hidden,
        "transformer.wpe": int(config.get("n_positions") or 1024) * hidden,
    }
    for number in range(shape.num_layers):
        layer = f"transformer.h.{number}"
        sizes[f"{layer}.ln_1"] = sizes[f"{layer}.ln_2"] = 2 * hidden
        linear[f"{layer}.attn.c_attn"] = (hidden, 3 * hidden)
        linear[f"{layer}.attn.c_proj"] = (hidden, hidden)
        linear[f"{layer}.mlp.c_fc"] = (hidden, ffn)
        linear[f"{layer}.mlp.c_proj"] = (ffn, hidden)
    sizes["transformer.ln_f"] = 2 * hidden
    sizes["lm_head"] = 0  # tied
    return Modules(linear, sizes)


def _opt(shape: Geometry, config: dict[str, Any]) -> Modules:
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    linear: dict[str, tuple[int, int]] = {}
    sizes = {
        "model.decoder.embed_tokens": shape.vocab_size * hidden,
        "model.decoder.embed_positions": (int(config["max_position_embeddings"]) + 2) * hidden,
        "model.decoder.final_layer_norm": 2 * hidden,
    }
    for number in range(shape.num_layers):
        layer = f"model.decoder.layers.{number}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            linear[f"{layer}.self_attn.{name}"] = (hidden, hidden)
        linear[f"{layer}.fc1"] = (hidden, ffn)
        linear[f"{layer}.fc2"] = (ffn, hidden)
        sizes[f"{layer}.self_attn_layer_norm"] = 2 * hidden
        sizes[f"{layer}.final_layer_norm"] = 2 * hidden
    sizes["lm_head"] = 0  # tied
    return Modules(linear, sizes)


def _bert(shape: Geometry, config: dict[str, Any]) -> Modules:
    hidden, ffn, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    start = "bert.embeddings"
    positions = int(config.get("max_position_embeddings") or 512)
    linear: dict[str, tuple[int, int]] = {}
    sizes = {
        f"{start}.word_embeddings": vocab * hidden,
        f"{start}.position_embeddings": positions * hidden,
        f"{start}.token_type_embeddings": int(config.get("type_vocab_size") or 2) * hidden,
        f"{start}.LayerNorm": 2 * hidden,
    }
    for number in range(shape.num_layers):
        layer = f"bert.encoder.layer.{number}"
        for name in ("query", "key", "value"):
            linear[f"{layer}.attention.self.{name}"] = (hidden, hidden)
        linear[f"{layer}.attention.output.dense"] = (hidden, hidden)
        linear[f"{layer}.intermediate.dense"] = (hidden, ffn)
        linear[f"{layer}.output.dense"] = (ffn, hidden)
        sizes[f"{layer}.attention.output.LayerNorm"] = 2 * hidden
        sizes[f"{layer}.output.LayerNorm"] = 2 * hidden
    head = "cls.predictions"
    linear[f"{head}.transform.dense"] = (hidden, hidden)
    sizes[f"{head}.transform.LayerNorm"] = 2 * hidden
    tied = config.get("tie_word_embeddings", True)
    sizes[f"{head}.decoder"] = 0 if tied else vocab * hidden
    sizes[head] = vocab  # a bias
    return Modules(linear, sizes, with_any_head=False)
