"""Causal language models of 32 dimensions, by architecture: the real classes, without dropout."""

from __future__ import annotations

from typing import Any

import torch

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
