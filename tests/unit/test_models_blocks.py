"""A network with its first blocks alone is the smaller network; which networks have such blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
    T5Config,
)

from llmx.models.blocks import stack_of
from tests.small_models import CONVERTED

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
KINDS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "gpt2": GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=32),
    "opt": OPTConfig(
        vocab_size=32,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        word_embed_proj_dim=16,
    ),
    "bert": BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
    ),
}


def network_of(config: Any) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = AutoModel.from_config(config)
    return network.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_blocks_are_the_smaller_network(kind: str) -> None:
    network = network_of(KINDS[kind])
    stack = stack_of(network)
    assert stack is not None
    assert len(stack.blocks) == 3
    ids = torch.arange(8)[None]
    whole = network(ids).last_hidden_state
    weights = network.state_dict()
    config = {**KINDS[kind].to_dict(), "num_hidden_layers": 2, "layer_types": None}
    smaller = network_of(type(KINDS[kind]).from_dict(config))
    smaller.load_state_dict({name: weights[name] for name in smaller.state_dict()})
    stack.cut(2)
    assert len(list(network.parameters())) == len(list(smaller.parameters()))
    torch.testing.assert_close(
        network(ids).last_hidden_state, smaller(ids).last_hidden_state, rtol=0, atol=0
    )
    stack.cut(1)
    assert not torch.equal(network(ids).last_hidden_state, whole)
    stack.cut(3)  # of all blocks, however many are left
    assert torch.equal(network(ids).last_hidden_state, whole)
    stack.cut(1)
    stack.restore()
    assert torch.equal(network(ids).last_hidden_state, whole)
    assert list(network.state_dict()) == list(weights)


def test_blocks_that_differ_are_no_stack() -> None:
    """Every second block of Gemma 2 looks at a window of what came before."""
    assert stack_of(network_of(Gemma2Config(**SMALL))) is None
    network = network_of(KINDS["llama"])
    stack = stack_of(network)
    assert stack is not None
    for one in stack.blocks[2].parameters():
        one.requires_grad_(False)
    assert stack_of(network) is None


def test_the_first_blocks_may_be_others() -> None:
    """Those of DeepSeek V3 have no experts."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        **{**CONVERTED["deepseek_v3"], "num_hidden_layers": 5, "first_k_dense_replace": 2},
        vocab_size=32,
    )
    stack = stack_of(network_of(config))
    assert stack is not None
    assert stack.least == 3
    equal = stack_of(network_of(KINDS["llama"]))
    assert equal is not None
    assert equal.least == 1


def test_shared_weights_and_two_stacks_are_none() -> None:
    network = network_of(KINDS["llama"])
    stack = stack_of(network)
    assert stack is not None
    stack.blocks[1] = stack.blocks[0]
    assert stack_of(network) is None
    both = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    assert stack_of(network_of(both)) is None
