"""Small models, and the bytes that their forward pass keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from tests.live_memory import LiveMemory

_LLAMA: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 32},
    "gpt2": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "attn_pdrop": 0.0,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
    "opt": {
        "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 512, "dropout": 0.1,
    },
    "bert": {
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 512,
        "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip
"""A tiny network of each architecture that a plan knows."""
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        **_LLAMA, "intermediate_size": 96, "num_local_experts": 4, "output_router_logits": True,
    },
}  # fmt: skip

VOCABULARY = 256


def small_model(kind: str, *, dtype: torch.dtype, **config: Any) -> Any:
    """A causal LM in training mode, scaled_dot_product_attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    values = {"vocab_size": VOCABULARY, **special, **{**SMALL, **WITH_EXPERTS}[kind], **config}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **values), dtype=dtype, attn_implementation="sdpa"
    )
    return model.train()


def small_inputs(*, batch: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (batch, length), generator=generator),
        "position_ids": torch.arange(length)[None].expand(batch, length),
    }


def saved_bytes(model: Any, inputs: dict[str, Any]) -> tuple[int, torch.Tensor]:
    """Bytes that a forward pass without the head leaves behind for the backward pass, its output
    included; and that output."""
    with LiveMemory() as memory:
        memory.take([*model.parameters(), *model.buffers(), *inputs.values()])
        before = memory.live
        output = model.base_model(**inputs, use_cache=False)[0]
        return memory.live - before, output
