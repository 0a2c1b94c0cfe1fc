"""Operations of a step: counted by hand and by PyTorch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from llmx.models.flops import ModelFlops, model_flops
from tests.rundirs import PARITY_MODELS
from tests.small_models import CONVERTED, small_model
from tests.unit.test_models_adapter import adapted, experiment

LENGTH = 40
COUNTED: dict[str, dict[str, Any]] = {
    **PARITY_MODELS,
    "qwen3": {**PARITY_MODELS["qwen3"], "head_dim": 24},
    **{kind: CONVERTED[kind] for kind in CONVERTED if kind != "qwen3_5_text"},
}
"""Dense, grouped queries, heads wider than the model, learned positions, tied, experts, latent
attention. Linear attention (qwen3_5) works along the sequence, which is not counted."""
BERT = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip


def counted(model: Any, length: int = LENGTH, **options: Any) -> int:
    """By PyTorch's counter: forward and backward pass of a row."""
    ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, **options).logits.float().logsumexp(-1).sum().backward()
    return counter.get_total_flops()


def of_step(flops: ModelFlops, *, square_tokens: int = LENGTH**2) -> float:
    return flops.of_step(tokens=LENGTH, target_tokens=LENGTH, square_tokens=square_tokens)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", sorted(COUNTED))
def test_operations_are_those_that_pytorch_counts(kind: str, tied: bool) -> None:
    dense = kind in PARITY_MODELS
    values = {**COUNTED[kind], "vocab_size": 90, "tie_word_embeddings": tied}
    more = {} if dense else {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **values), attn_implementation="eager", **more
    )
    # Eager attention computes all of the square, of which causal training needs half.
    ours = of_step(model_flops(model), square_tokens=2 * LENGTH**2)
    assert ours == pytest.approx(counted(model, use_cache=False), rel=0.01)


def test_an_encoder_attends_to_all_of_its_row() -> None:
    config = AutoConfig.for_model("megatron-bert", **BERT)
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    ours = of_step(model_flops(model, causal=False))
    assert ours == pytest.approx(counted(model), rel=0.01)


@pytest.mark.parametrize(("kind", "values"), [("bert", BERT), ("llama", PARITY_MODELS["llama"])])
def test_a_head_of_whole_sequences_is_not_counted_for_every_token(kind, values) -> None:
    """Neither a pooler, nor a classifier; they are one vector's work beside that of 400 tokens."""
    more = {"vocab_size": 90, "num_labels": 3, "max_position_embeddings": 400, "pad_token_id": 0}
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(kind, **{**values, **more}), attn_implementation="eager"
    )
    flops = model_flops(model, causal=False)
    ours = flops.of_step(tokens=400, target_tokens=1, square_tokens=400**2)
    assert ours == pytest.approx(counted(model, 400), rel=0.005)


def test_frozen_weights_beside_an_adapter_have_no_gradient_of_their_own() -> None:
    model = small_model("llama", attention="eager", tie_word_embeddings=True)
    whole = model_flops(model)
    adapted(model, experiment())
    model.enable_input_require_grads()  # the first layer, too, passes a gradient on
    flops = model_flops(model)
    assert flops.frozen_matrices == whole.matrices
    assert flops.frozen_head == whole.head == flops.head
    ours = of_step(flops, square_tokens=2 * LENGTH**2)
    assert ours == pytest.approx(counted(model, use_cache=False), rel=0.01)
    model.requires_grad_(False)  # a reference: counted by its forward part elsewhere
    assert model_flops(model).frozen_matrices == 0


@pytest.mark.parametrize("tied", [False, True])
def test_llama_by_hand(tied: bool) -> None:
    # Width 32: queries and output of 4 heads of 8, keys and values of 2; then 3 x 32 x 48.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    flops = model_flops(small_model("llama", tie_word_embeddings=tied))
    assert flops == ModelFlops(matrices=2 * layer, head=90 * 32, attention=((32.0, None),) * 2)
    assert flops.of_step(tokens=100, target_tokens=40, square_tokens=1000) == 6 * (
        2 * layer * 100 + 90 * 32 * 40 + 2 * 32 * 1000
    )


def test_a_window_is_no_more_than_it_sees() -> None:
    flops = ModelFlops(matrices=0, head=0, attention=((8.0, None), (8.0, 16)))
    for tokens, of_window in ((20, 8 * 400), (1000, 8 * 2 * 16 * 1000)):
        found = flops.of_step(tokens=tokens, target_tokens=0, square_tokens=tokens**2)
        assert found == 6 * (8 * tokens**2 + of_window)
