"""Layer-wise learning rates and those of named parts: which factor each parameter gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmx.config import Experiment, experiment_from_dict
from llmx.errors import ConfigError
from llmx.models.adapter import add_adapter
from llmx.train.engine import optimizer as learning_rates
from llmx.train.engine.optimizer import LR_SCALE, build_optimizer, lr_scales
from tests.small_models import small_model


def experiment(adapter: dict[str, Any] | None = None, **optim: Any) -> Experiment:
    values: dict[str, Any] = {
        "optim": {"lr": 0.01, **optim},
        "adapter": adapter or {},
        "model": {"kind": "hf", "path": "/nowhere"},
    }
    return experiment_from_dict(values)


def scales(exp: Experiment, networks: list[Any]) -> dict[int, float]:
    return lr_scales(exp.optim, exp.adapter, networks)


def factors(network: Any, exp: Experiment) -> dict[str, float]:
    """Of each trained parameter, by its first name."""
    found = scales(exp, [network])
    return {n: found.get(id(p), 1.0) for n, p in network.named_parameters() if p.requires_grad}


def bert() -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "bert", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=90,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def test_one_rate_for_all_makes_no_groups() -> None:
    network = small_model("llama")
    assert scales(experiment(), [network]) == {}
    assert scales(experiment(layer_decay=1.0), [network]) == {}


@pytest.mark.parametrize(
    ("kind", "embedding", "layer", "head"),
    [
        ("llama", "model.embed_tokens.weight", "model.layers.{}.mlp.up_proj.weight", "lm_head"),
        ("gpt2", "transformer.wpe.weight", "transformer.h.{}.mlp.c_fc.bias", "transformer.ln_f"),
        ("opt", "model.decoder.embed_positions.weight", "model.decoder.layers.{}.fc1.weight",
         "model.decoder.final_layer_norm"),
    ],
)  # fmt: skip
def test_each_layer_has_that_much_less_than_the_one_above(
    kind: str, embedding: str, layer: str, head: str
) -> None:
    network = small_model(kind, **({"tie_word_embeddings": False} if kind == "llama" else {}))
    found = factors(network, experiment(layer_decay=0.5))
    count = network.config.num_hidden_layers
    assert found[embedding] == 0.5 ** (count + 1)
    for number in range(count):
        assert found[layer.format(number)] == 0.5 ** (count - number)
    assert all(factor == 1.0 for name, factor in found.items() if name.startswith(head))


def test_the_norm_of_the_embeddings_is_below_the_layers_and_the_pooler_above() -> None:
    found = factors(bert(), experiment(layer_decay=0.5))
    assert found["bert.embeddings.LayerNorm.weight"] == 0.5**4
    assert found["bert.encoder.layer.2.output.dense.bias"] == 0.5
    assert found["bert.pooler.dense.weight"] == found["classifier.weight"] == 1.0


def test_a_head_that_is_the_embedding_has_its_rate() -> None:
    network = small_model("llama", tie_word_embeddings=True)
    found = scales(experiment(layer_decay=0.5), [network])
    count = network.config.num_hidden_layers
    assert found[id(network.lm_head.weight)] == 0.5 ** (count + 1)


def test_patterns_multiply_and_an_adapter_keeps_its_own_rate() -> None:
    adapter = {"kind": "lora", "rank": 2, "targets": ["all-linear"], "lr": 0.1,
               "modules_to_save": ["embed_tokens"]}  # fmt: skip
    exp = experiment(adapter, layer_decay=0.5, lr_scale={"*.mlp.*": 3.0, "*.up_proj.*": 2.0})
    network = small_model("llama", tie_word_embeddings=False)
    add_adapter(
        network,
        exp.model,
        exp.adapter,
        exp.seed,
        ds_config={"zero_optimization": {"stage": 0}},
        dtype=torch.float32,
        head="causal_lm",
    )
    count = network.config.num_hidden_layers
    found = factors(network, exp)
    first = "model.layers.0.{}.lora_A.default.weight"
    assert found[first.format("self_attn.q_proj")] == 0.5**count
    assert found[first.format("mlp.down_proj")] == 3 * 0.5**count
    assert found[first.format("mlp.up_proj")] == 6 * 0.5**count
    assert found["model.embed_tokens.weight"] == pytest.approx(0.1 * 0.5 ** (count + 1))
    optimizer = build_optimizer(network, exp.optim, accelerator="cpu", apart=scales(exp, [network]))
    grouped = {
        id(p): group.get(LR_SCALE, 1.0) for group in optimizer.param_groups for p in group["params"]
    }
    assert grouped == {id(p): found[n] for n, p in network.named_parameters() if p.requires_grad}


def test_a_pattern_that_matches_nothing_names_what_there_is() -> None:
    network = small_model("llama")
    with pytest.raises(ConfigError, match=r"optim.lr_scale: \*.embed_tokenz.\* matches none of"):
        scales(experiment(lr_scale={"*.embed_tokenz.*": 0.5}), [network])
    network.requires_grad_(False)
    network.lm_head.requires_grad_(True)
    with pytest.raises(ConfigError, match="trained parameters: "):
        scales(experiment(lr_scale={"*.mlp.*": 0.5}), [network])


def test_a_network_without_layers_has_none_to_decay() -> None:
    with pytest.raises(ConfigError, match="no numbered layers"):
        scales(experiment(layer_decay=0.5), [torch.nn.Linear(2, 2)])


@pytest.mark.parametrize(
    "wrong", [{"layer_decay": 0}, {"layer_decay": 1.5}, {"lr_scale": {"a": 0}}]
)
def test_factors_are_in_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        experiment(**wrong)


def test_a_network_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of its parameters: with 80 layers that took 10 s of every start."""
    seen: list[Any] = []

    class Counted(learning_rates.LayerDecay):
        def __init__(self, network: Any, optim: Any) -> None:
            seen.append(network)
            super().__init__(network, optim)

    monkeypatch.setattr(learning_rates, "LayerDecay", Counted)
    networks = [small_model("llama"), small_model("gpt2")]
    scales(experiment(layer_decay=0.5), networks)
    assert seen == networks
