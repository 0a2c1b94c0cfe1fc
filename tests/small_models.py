"""Causal language models of 32 dimensions, by architecture: the real classes, without dropout."""

from __future__ import annotations

from typing import Any

import torch

from llmx.config import Experiment
from tests.rundirs import PARITY_MODELS

KINDS = sorted(PARITY_MODELS)


def small_model(kind: str, *, attention: str = "sdpa", vocab_size: int = 90, **more: Any) -> Any:
    """A model with weights of a fixed seed, a little larger than usual so that all is felt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**PARITY_MODELS[kind], "vocab_size": vocab_size, **more})
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, None
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONVERTED: dict[str, dict[str, Any]] = {
    "mixtral": {**_SMALL, "num_local_experts": 4},
    "qwen2_moe": {**_SMALL, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_SMALL, **_EXPERTS, "num_experts": 4, "head_dim": 8},
    "olmoe": {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 2},
    "deepseek_v3": {
        **_SMALL,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_neox": {**_SMALL, "eos_token_id": 2, "bos_token_id": 1},
    "qwen3_5_text": {
        **_SMALL,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Architectures whose weights lie in files otherwise than in memory, small."""


def converted_model(kind: str, *, vocab_size: int = 90, **more: Any) -> Any:
    """A model of ``CONVERTED`` with weights of a fixed seed; no two of its tensors are alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**CONVERTED[kind], "vocab_size": vocab_size, **more})
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def network_of(exp: Experiment, config: Any, **how: Any) -> Any:
    """What a rank builds, on a CPU."""
    from llmx.models.factory import build_model

    known = {"precision": "fp32", "ds_config": {"zero_optimization": {"stage": 0}}, **how}
    cpu = torch.device("cpu")
    return build_model(exp.model, exp.seed, config, device=cpu, implementation="sdpa", **known)


def same_weights(model: Any, reference: Any) -> None:
    """Assert that two models have the same parameters (tied ones too) and buffers, bit for bit."""
    ours, theirs = (
        {**dict(one.named_parameters(remove_duplicate=False)), **dict(one.named_buffers())}
        for one in (model, reference)
    )
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, different
