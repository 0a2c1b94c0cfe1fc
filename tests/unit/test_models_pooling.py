"""One vector a text: as sentence-transformers pools it, packed or padded; how a published model
pools; backbones from published models with a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from llmx.config import ModelConfig
from llmx.data import collate
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod
from llmx.models.load import load_weights
from llmx.models.model import BACKBONE, Model
from llmx.models.pooling import (
    POOLING_FILE,
    POOLINGS,
    pooled,
    pooler_names,
    pooling_config,
    published_pooling,
)
from tests.rundirs import TINY_LLAMA
from tests.unit.test_models_classification import BERT
from tests.unit.test_models_model import SEQUENCES, batch_of
from tests.unit.test_models_model import model_of as plain_model_of


def config_of(kind: str, **more: Any) -> Any:
    values = BERT if kind == "bert" else {**TINY_LLAMA, "vocab_size": 1100}
    return AutoConfig.for_model(kind, **{**values, **more})


def backbone(kind: str) -> Any:
    torch.manual_seed(3)
    return AutoModel.from_config(config_of(kind)).eval()


def model_of(network: Any, method: AttentionMethod) -> Model:
    return plain_model_of(network, method.layout, method=method, head=BACKBONE)


def theirs(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """Of one sequence alone, by sentence-transformers."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    mode = {"last": "lasttoken"}.get(pooling, pooling)
    features = {"token_embeddings": hidden, "attention_mask": torch.ones(hidden.shape[:2])}
    found: torch.Tensor = Pooling(hidden.shape[-1], mode)(features)["sentence_embedding"][0]
    return found


METHODS = {
    "llama packed": ("llama", AttentionMethod("sdpa", "mask", "packed")),
    "llama in one line": ("llama", AttentionMethod("sdpa", "cu_seq_lens", "packed")),
    "llama padded": ("llama", AttentionMethod("sdpa", "none", "padded")),
    "bert packed": ("bert", AttentionMethod("sdpa", "mask", "packed", causal=False)),
    "bert padded": ("bert", AttentionMethod("sdpa", "padding_mask", "padded", causal=False)),
}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("how", sorted(METHODS))
def test_a_sequence_has_the_vector_that_it_has_alone(how: str, pooling: str) -> None:
    kind, method = METHODS[how]
    network = backbone(kind)
    with torch.no_grad():
        alone = [network(input_ids=torch.tensor([one])).last_hidden_state for one in SEQUENCES]
    wanted = torch.stack([theirs(hidden, pooling) for hidden in alone])
    model = model_of(network, method)
    if how == "llama in one line":  # its kernels are given elsewhere: hidden states alone here
        batch = batch_of("packed")
        lines = model_of(network, METHODS["llama packed"][1])
        inputs, _ = lines.inputs(batch)
        hidden = network(**inputs).last_hidden_state
        found = pooled(hidden.reshape(1, -1, hidden.shape[-1]), batch["segment_ids"], pooling)
    else:
        found = model.embeddings(batch_of(method.layout), pooling=pooling)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()


def test_a_batch_without_a_sequence_has_a_graph() -> None:
    network = backbone("llama")
    model = model_of(network, METHODS["llama packed"][1])
    found = model.embeddings(collate([], seq_len=8, pad_id=0, layout="packed"), pooling="mean")
    assert found.shape == (0, network.config.hidden_size)
    found.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in network.parameters())


def test_how_a_published_model_pools(tmp_path: Path) -> None:
    place = tmp_path / POOLING_FILE
    place.parent.mkdir()
    assert published_pooling(None) is None
    assert published_pooling(str(tmp_path)) is None
    for pooling in POOLINGS:
        place.write_text(json.dumps(pooling_config(pooling, width=8)))
        assert published_pooling(str(tmp_path)) == pooling
    for modes in ("lasttoken", ["lasttoken"]):  # as sentence-transformers 6 writes it
        place.write_text(json.dumps({"embedding_dimension": 8, "pooling_mode": modes}))
        assert published_pooling(str(tmp_path)) == "last"
    place.write_text(json.dumps({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}))
    with pytest.raises(ValueError, match="max and cls"):
        published_pooling(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "auto"), [("llama", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)]
)
def test_a_backbone_takes_the_weights_of_a_model_with_a_head(
    kind: str, auto: Any, tmp_path: Path
) -> None:
    """The head is left out; BERT's pooler, which a masked language model lacks, is drawn."""
    torch.manual_seed(1)
    published = auto.from_config(config_of(kind))
    published.save_pretrained(tmp_path)
    network = backbone(kind)
    source = ModelConfig(kind="hf", init="pretrained", path=str(tmp_path))
    names = pooler_names(network)
    assert len(names) == (2 if kind == "bert" else 0)
    assert load_weights(network, source, seed=1, head=BACKBONE) == names
    wanted = dict(published.base_model.named_parameters())
    for name, parameter in network.named_parameters():
        if name not in names:
            torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=0)
    # A layer that the network lacks is no head.
    shallow = AutoModel.from_config(config_of(kind, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="weights that .* does not"):
        load_weights(shallow, source, seed=1, head=BACKBONE)
