"""Parameter counts against transformers' own models, built without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmx.config import ModelConfig
from llmx.config.groups import CONF
from llmx.models.network_config import network_config, plain_values
from llmx.plan.geometry import geometry, model_geometry
from tests.published_configs import FAMILIES

KNOWN = ["tiny", "gpt2", "llama2_7b", "llama3_8b", "qwen3_8b", "opt_1_3b", "llama_1_7b"]
MASKED = ["bert_tiny", "bert_base", "megatron_bert_3_9b"]


@pytest.mark.parametrize("name", [*KNOWN, *MASKED])
def test_parameter_count_is_that_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    model = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    shape = geometry(model["kind"], model["config"])
    assert shape is not None
    with torch.device("meta"):
        built = (AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM).from_config(
            AutoConfig.for_model(model["kind"], **model["config"])
        )
    assert shape.num_parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("name", ["llama3.2", "mistral", "qwen3", "gpt2", "opt-350m"])
def test_the_parameters_of_a_published_directory(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]))
    biases = {"attention_bias": True} if name in ("llama3.2", "qwen3") else {}
    model = ModelConfig(path=str(tmp_path), config=biases)
    config = network_config(model)
    shape = model_geometry(replace(model, resolved=plain_values(config)))
    assert shape is not None
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert shape.num_parameters == sum(p.numel() for p in built.parameters())


def test_an_encoder_is_not_taken_for_a_causal_model() -> None:
    values = {
        "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    shape = geometry("bert", values)
    assert shape is not None
    assert not shape.causal
    attention = shape.flops_per_token(64) - shape.flops_per_token(0)
    assert attention == 12 * 2 * 8 * 64


def test_vocabulary_is_padded_from_scratch() -> None:
    config = {"vocab_size": 100, "n_embd": 8, "n_layer": 1, "n_positions": 16}
    padded, plain = geometry("gpt2", config, vocab_multiple=64), geometry("gpt2", config)
    assert padded is not None
    assert plain is not None
    assert padded.vocab_size == 128
    assert padded.num_parameters - plain.num_parameters == 28 * 8


def test_unknown_architecture_has_no_geometry() -> None:
    assert geometry("mamba", {"hidden_size": 8}) is None
    assert geometry("llama", {"hidden_size": 8}) is None
