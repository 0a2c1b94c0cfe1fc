"""The rules of the model: its config, its adapter, and tokens that are added to its tokenizer.

The keys of ``model.config`` are those of Hugging Face's configs. The control process does not
import transformers, so the tables stand here; a test compares them with the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from llmx.config.build import shown
from llmx.config.fields import Range
from llmx.config.schema import ALL_LINEAR, AdapterConfig, ModelConfig, ZeroConfig
from llmx.errors import did_you_mean

LANGUAGE_SECTION = "text_config"
"""The part of a multi-modal model's config that describes its language model."""

_SIZES = {
    "hidden_size n_embd d_model word_embed_proj_dim head_dim": Range(1, 2**20),
    "intermediate_size ffn_dim n_inner": Range(1, 2**24),
    "num_hidden_layers n_layer num_attention_heads n_head num_key_value_heads": Range(1, 10_000),
    "num_experts num_local_experts num_experts_per_tok": Range(1, 10_000),
    "vocab_size": Range(1, 2**28),
    "max_position_embeddings n_positions n_ctx sliding_window": Range(1, 2**30),
    "max_window_layers": Range(0, 10_000),
}
_FLOATS = {
    "rms_norm_eps layer_norm_eps layer_norm_epsilon": Range(above=0, maximum=1),
    "initializer_range init_std": Range(0, 10),
    "rope_theta": Range(above=0, maximum=1e12),
    "attention_dropout dropout layerdrop attn_pdrop attention_probs_dropout_prob "
    "hidden_dropout_prob embd_pdrop resid_pdrop": Range(0, below=1),
}
SIZES = {name: limits for names, limits in _SIZES.items() for name in names.split()}
"""The range of each key that is a whole number."""
FLOATS = {name: limits for names, limits in _FLOATS.items() for name in names.split()}
"""The range of each key that is a number."""
FLAGS = (
    "attention_bias do_layer_norm_before enable_bias layer_norm_elementwise_affine mlp_bias "
    "reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights "
    "tie_word_embeddings use_cache use_sliding_window"
).split()

MAPPINGS = ("rope_parameters", "rope_scaling", "id2label", "label2id")

ACTIVATIONS = (
    "gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh "
    "hardswish laplace leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu "
    "sqrtsoftplus swish tanh xielu"
).split()
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")

_ANY = (
    "architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label "
    "is_encoder_decoder label2id output_attentions output_hidden_states pad_token_id problem_type "
    "return_dict tie_word_embeddings torch_dtype transformers_version use_cache vocab_size "
    "model_type _name_or_path hidden_size max_position_embeddings num_attention_heads "
    "num_hidden_layers "
)
_LLAMA = (
    "attention_bias attention_dropout head_dim hidden_act initializer_range intermediate_size "
    "mlp_bias num_key_value_heads pretraining_tp rms_norm_eps rope_parameters rope_scaling "
    "rope_theta "
)
_BERT = (
    "add_cross_attention attention_probs_dropout_prob hidden_act hidden_dropout_prob "
    "initializer_range intermediate_size is_decoder layer_norm_eps type_vocab_size "
)
_KEYS = {
    "llama": _LLAMA,
    "qwen3": f"{_LLAMA} layer_types max_window_layers sliding_window use_sliding_window",
    "gpt2": "activation_function add_cross_attention attn_pdrop embd_pdrop initializer_range "
    "layer_norm_epsilon n_ctx n_embd n_head n_inner n_layer n_positions reorder_and_upcast_attn "
    "resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj",
    "opt": "_remove_final_layer_norm activation_function attention_dropout do_layer_norm_before "
    "dropout enable_bias ffn_dim init_std layer_norm_elementwise_affine layerdrop "
    "word_embed_proj_dim",
    "bert": f"{_BERT} classifier_dropout",
    "megatron-bert": _BERT,
}
KEYS = {kind: (_ANY + keys).split() for kind, keys in _KEYS.items()}
"""Every key of the configs of the kinds that need no ``path``."""

_OPTIONAL = ("head_dim", "n_inner", "num_key_value_heads", "sliding_window", "word_embed_proj_dim")
"""Keys that may be null: the library computes them."""

_SAME_AS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
_ROTARY = ("llama", "mistral", "qwen2", "qwen3")
_SPLITS_HIDDEN_SIZE = ("llama", "mistral", "qwen2", "gpt2", "opt", "bert", "megatron-bert")
"""Architectures whose head is as wide as ``hidden_size / heads`` where ``head_dim`` is not set."""


def whole_number(config: dict[str, Any], *names: str) -> int | None:
    """The first of these values of a Hugging Face config that is a whole number; of a multi-modal
    model, its language model's."""
    values = (config.get(LANGUAGE_SECTION) or config).get
    return next((value for name in names if type(value := values(name)) is int), None)


def position_limit(config: dict[str, Any]) -> int | None:
    """The longest sequence the network takes, under the names that configs use."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")
    return whole_number(config, *names)


def length_problem(seq_len: int, limit: int | None, model: str) -> str:
    """The message for samples that are longer than a network takes; empty where they fit."""
    if limit is None or seq_len <= limit:
        return ""
    return (
        f"data.seq_len={seq_len}, but {model} takes at most {limit} positions. Set "
        f"data.seq_len={limit}."
    )


LANGUAGE_MODELS = {"causal_lm": "a causal language model", "masked_lm": "a masked language model"}
"""Heads over the vocabulary (``llmx.models.spec``), in words."""
WITHOUT_OUTPUT_HEAD = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "ForMultipleChoice",
)
"""Endings of the classes of transformers that have none."""


def model_config_problems(model: ModelConfig) -> Iterator[str]:
    """One message for each value of ``model.config`` that no network can be built from."""
    known_kind = model.kind != "hf"
    problems = 0
    for key, value in model.config.items():
        for problem in _value_problems(key, value, model, known_kind=known_kind):
            problems += 1
            yield problem
    if model.config and not problems:
        yield from _heads(model)


def head_problem(config: dict[str, Any], head: str, where: str, *, trained: bool = True) -> str:
    """Why published weights are not those of a language model; empty where they may be.

    Args:
        config: their ``config.json``.
        head: what the network is to end in (``llmx.models.spec``).
        where: ``model.path=DIR``.
        trained: the network is trained, so another task may be what was meant.
    """
    if head not in LANGUAGE_MODELS or config.get("auto_map"):  # code of its own may be anything
        return ""
    listed = config.get("architectures")
    class_name = str(listed[0]) if isinstance(listed, list) and listed else ""
    needed = LANGUAGE_MODELS[head]
    if class_name.endswith(WITHOUT_OUTPUT_HEAD):
        fix = "Give the model that it was trained from."
        if trained:
            fix += " As it is, task=classify and task=reward go on with it."
        return (
            f"{where} holds a {class_name}: a classifier or a reward model, without an output head "
            f"over the vocabulary, where {needed} is needed. {fix}"
        )
    if class_name.endswith("ForConditionalGeneration") and config.get("is_encoder_decoder"):
        return (
            f"{where} holds a {class_name}: an encoder with a decoder, where {needed} is needed. "
            "Give one."
        )
    other = "ForMaskedLM" if head == "causal_lm" else "ForCausalLM"
    if class_name.endswith(other) and not config.get("is_decoder"):
        fits = "task=mlm, task=classify or task=embed" if head == "causal_lm" else "task=pretrain"
        fix = f"Give one, or use {fits}." if trained else "Give one."
        return f"{where} holds a {class_name}, where {needed} is needed. {fix}"
    return ""


def quantized_problem(quantization: Any, where: str) -> str:
    """Why published weights cannot be trained as they are stored; empty where they can.
    ``quantization``: the ``quantization_config`` of their config."""
    if not quantization:
        return ""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    return (
        f"{where} holds quantized weights ({method}), which cannot be trained. Set model.path to "
        "the same model in bf16, or write it dequantized."
    )


def as_typed(config: dict[str, Any]) -> dict[str, Any]:
    """Numbers in the type that the library insists on: ``initializer_range=0`` as a float,
    ``vocab_size=1e5`` as a whole number."""
    typed = dict(config)
    for key, value in config.items():
        if key in FLOATS and type(value) is int:
            typed[key] = float(value)
        elif key in SIZES and type(value) is float and value.is_integer():
            typed[key] = int(value)
    return typed


def _value_problems(key: str, value: Any, model: ModelConfig, *, known_kind: bool) -> Iterator[str]:
    written = repr(value) if isinstance(value, float) else shown(value)
    where = f"model.config.{shown(key)}={written}"
    if known_kind:
        if key == "model_type" and value != model.kind:
            yield f"{where}: differs from model.kind={model.kind}. Leave it out, or set model.kind."
        elif key not in KEYS[model.kind]:
            yield (
                f"{where}: {model.kind} has no such value."
                f"{did_you_mean(key[:100], KEYS[model.kind])} Correct the name, or leave it out."
            )
    if value is None and (not known_kind or key in _OPTIONAL):
        return
    if not known_kind and isinstance(value, list | dict):
        # Some architectures give a value for each layer.
        return
    limits = SIZES.get(key) or FLOATS.get(key)
    if limits is not None:
        integral = key in SIZES
        right = isinstance(value, int if integral else int | float) and not isinstance(value, bool)
        if not right or not limits.holds(value):
            yield f"{where}: must be {'a whole number' if integral else 'a number'} {limits}."
    elif key in FLAGS and not isinstance(value, bool):
        yield f"{where}: must be true or false."
    elif key in MAPPINGS and value is not None and not isinstance(value, dict):
        yield f"{where}: must be a mapping, or null."
    elif key in ACTIVATION_KEYS and value not in ACTIVATIONS:
        yield (
            f"{where}: must be one of {', '.join(ACTIVATIONS)}."
            f"{did_you_mean(str(value)[:100], ACTIVATIONS)}"
        )


def _heads(model: ModelConfig) -> Iterator[str]:
    """Heads share out the width of the network; key-value heads share out the heads."""
    network = model.network.get(LANGUAGE_SECTION) or model.network
    config = {_SAME_AS.get(key, key): value for key, value in network.items()}
    kind = config.get("model_type") or model.architecture
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    width, shared = config.get("head_dim"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        yield (
            f"model.config.num_key_value_heads={shared} does not divide "
            f"num_attention_heads={heads}. Use a divisor, or {heads} for one each."
        )
    if width is None and kind in _SPLITS_HIDDEN_SIZE:
        if not isinstance(hidden, int) or not isinstance(heads, int):
            return
        if hidden % heads:
            below = hidden // heads * heads
            near = " or ".join(str(size) for size in (below, below + heads) if size > 0)
            yield (
                f"model.config: hidden_size={hidden} is not divisible by the {heads} attention "
                f"heads. Use hidden_size={near}, or another number of heads."
            )
            return
        width = hidden // heads
    if kind in _ROTARY and isinstance(width, int) and width % 2:
        yield (
            f"model.config: a head is {width} wide; rotary position embeddings need an even "
            "width. Change hidden_size, num_attention_heads or head_dim."
        )
    experts, active = config.get("num_experts"), config.get("num_experts_per_tok")
    experts = experts or config.get("num_local_experts")
    if isinstance(experts, int) and isinstance(active, int) and active > experts:
        yield (
            f"model.config.num_experts_per_tok={active} is more than the {experts} experts. "
            f"Use at most {experts}."
        )


def is_named(module: str, target: str) -> bool:
    """Whether ``target`` is this module's dotted name, or the end of it."""
    return module == target or module.endswith(f".{target}")


def matching(modules: Iterable[str], targets: Iterable[str]) -> list[str]:
    """The modules that one of ``targets`` names, in their order."""
    targets = list(targets)
    return [name for name in modules if any(is_named(name, target) for target in targets)]


def short_names(modules: Iterable[str]) -> list[str]:
    """The last parts of dotted names, each once, in their order: what a user would type."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def no_such_module(key: str, target: str, modules: Iterable[str], noun: str) -> str:
    """The message for a name that no module has. ``noun``: of ``modules``, in words."""
    names = short_names(modules)
    near = did_you_mean(target.rpartition(".")[2][:100], names)
    return (
        f"{key}: {shown(target)} names no {noun} of the model.{near} It has "
        f"{', '.join(names[:40])}{', ...' if len(names) > 40 else ''}."
    )


def output_head_target(target: str) -> str:
    """The message for the output head among the targets: it sees the target positions only, fused
    with the loss, and is often the embedding as well."""
    return (
        f"adapter.targets: {target} is the output head, which is not adapted. Train it whole with "
        f"adapter.modules_to_save=[{target}], or leave it out."
    )


def adapter_problems(adapter: AdapterConfig, model: ModelConfig) -> Iterator[str]:
    """One message for each broken rule between the fields."""
    if adapter.kind == "none":
        yield from _without_effect(adapter)
        return
    if model.init == "scratch":
        yield (
            f"adapter.kind={adapter.kind} with model.init=scratch: an adapter is trained beside "
            "pretrained weights, and random ones are kept nowhere. Set model=hf and model.path "
            "(the model/ of a run of yours will do), or adapter=none."
        )
    if not adapter.targets:
        yield (
            "adapter.targets is empty: nothing would be adapted. Set "
            f"adapter.targets=[{ALL_LINEAR}], or names of linear layers as [q_proj, v_proj]."
        )
    if ALL_LINEAR in adapter.targets and len(adapter.targets) > 1:
        yield (
            f"adapter.targets: {ALL_LINEAR} stands beside other names. Leave it alone in the list, "
            "or leave it out."
        )
    shared = [name for name in adapter.modules_to_save if name in adapter.targets]
    if shared:
        yield (
            f"adapter.modules_to_save: {shared[0]} is one of adapter.targets, too: it is "
            "adapted or trained whole. Take it out of one of them."
        )
    if model.freeze:
        yield (
            f"model.freeze={shown(model.freeze)} beside adapter.kind={adapter.kind}, which "
            "freezes the whole model. Leave model.freeze out."
        )


def quantize_problems(
    adapter: AdapterConfig, model: ModelConfig, zero: ZeroConfig, on_cpus: bool
) -> Iterator[str]:
    """One message for each reason why frozen weights cannot be kept in 4 bits."""
    if "none" in (adapter.kind, adapter.quantize):
        return
    key = f"adapter.quantize={adapter.quantize}"
    if on_cpus:
        yield (
            f"{key} trains on CUDA only: the kernels of bitsandbytes that unpack 4-bit weights "
            "fast are those for GPUs. Use adapter=lora on CPUs."
        )
    if zero.stage == 3:
        yield (
            f"{key} with zero.stage=3: ZeRO-3 shards parameters of the dtype of the run, and "
            "packed 4-bit weights are none; every rank would hold them whole all the same. Set "
            "zero=stage2, which shards the optimizer; or adapter=lora, whose 16-bit base "
            "zero=stage3 shards."
        )
    if model.compile:
        yield f"{key} with model.compile=true has not been tried. Set model.compile=false."
    if model.architecture == "gpt2":
        yield (
            f"{key}: the layers of a GPT-2 are stored transposed, and are not quantized. Use "
            "adapter=lora."
        )


def _without_effect(adapter: AdapterConfig) -> Iterator[str]:
    """One message for each option of an adapter that is described and not switched on."""
    defaults = AdapterConfig()
    for field in dataclasses.fields(AdapterConfig):
        value = getattr(adapter, field.name)
        if field.name != "kind" and value != getattr(defaults, field.name):
            yield (
                f"adapter.{field.name}={shown(value)} has no effect with adapter.kind=none. Add "
                "adapter=lora, or leave it out."
            )


ADD_TOKENS, ADD_SPECIAL = "model.add_tokens", "model.add_special_tokens"


def added_tokens(model: ModelConfig) -> list[str]:
    """All of them, in the order of their ids."""
    return [*model.add_tokens, *model.add_special_tokens]


def added_token_problems(model: ModelConfig) -> Iterator[str]:
    """One message for each that cannot be a token, or is there twice."""
    first: dict[str, str] = {}
    for key, tokens in ((ADD_TOKENS, model.add_tokens), (ADD_SPECIAL, model.add_special_tokens)):
        for token in tokens:
            if not token.strip():
                yield (
                    f"{key}: {shown(token)} is empty or nothing but white space, which every text "
                    "is full of. Leave it out."
                )
            elif token in first:
                yield f"{key}: {shown(token)} stands in {first[token]} already. Leave one out."
            first.setdefault(token, key)
