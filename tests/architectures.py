"""A small config of every causal architecture that ``transformers`` knows.

Each is what the class gives by default, with values where the default cannot be built, shrunk by
``llmx.models.tiny`` to about 100,000 parameters: seconds for all of them.

    for name in architectures():
        model = AutoModelForCausalLM.from_config(small_config(name))
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

VALUES: dict[str, dict[str, Any]] = {
    # Defaults of these classes miss values that every published model of theirs has.
    "bert": {"is_decoder": True},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
            },
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256,
        "indexer_budget": 16, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip

FAMILIES = (
    "cohere2", "deepseek_v3", "falcon", "gemma3_text", "glm4", "gpt2", "gpt_oss", "llama",
    "llama4_text", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe",
    # No way of cutting the sequence, by a state, by positions or by the padding's id.
    "bart", "bloom", "deepseek_v4", "granitemoehybrid", "jamba", "mamba2", "qwen3_5_text",
    "qwen3_next", "roberta",
)  # fmt: skip
"""Those that every landing is tested with; ``make nightly`` takes all of ``architectures()``."""

ENCODERS = (
    "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "xmod", "bert-generation",
)  # fmt: skip
"""Encoders, that are causal as decoders only."""

LEFT_OUT = {
    "blt": "its patcher and its byte tables tie widths that no config names",
    "dbrx": "its attention reads a value that its config no longer has",
    **dict.fromkeys(("dots3_note", "dots3_note_text"), "each layer has widths of its own"),
    "gemma3n": "needs timm",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "takes the config of its decoder alone"),
    "qwen4_exp": "the same network as qwen4_exp_text, whose values its default misses",
}
"""What ``AutoModelForCausalLM`` names and cannot build on its own, and why."""


def each_family() -> list[Any]:
    """Parameters of a test: every architecture, those beyond ``FAMILIES`` by night."""
    return [
        pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.nightly)
        for name in architectures()
    ]


@functools.cache
def architectures() -> tuple[str, ...]:
    """Every ``model_type`` that ``AutoModelForCausalLM`` builds, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(LEFT_OUT)))


def full_config(model_type: str) -> Any:
    """The config of the class, at its published size."""
    from transformers import CONFIG_MAPPING

    values = dict(VALUES.get(model_type, {}))
    if model_type in ENCODERS:
        values["is_decoder"] = True
    return CONFIG_MAPPING[model_type](**values)


def small_config(model_type: str) -> Any:
    """The same, shrunk: every kind of layer, a vocabulary of 96 (95 is padding)."""
    from llmx.models.tiny import tiny_config

    return tiny_config(full_config(model_type), per_kind=2 if model_type.startswith("zamba") else 1)
