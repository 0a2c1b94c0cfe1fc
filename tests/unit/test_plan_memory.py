"""Sizes of a network: parameters against transformers' own models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from llmx.config import ModelConfig
from llmx.config.groups import CONF
from llmx.models.network_config import network_config, plain_values
from llmx.plan.geometry import geometry, model_geometry
from llmx.plan.types import MemoryPlan
from tests.published_configs import FAMILIES


@pytest.mark.parametrize(("capacity", "said"), [(1.38, "1.38"), (40.0, "40"), (139.8, "140")])
def test_what_a_device_has_is_said_as_exactly_as_what_it_needs(capacity: float, said: str) -> None:
    used = MemoryPlan("gpu", 995, 1, 1, 1, 1, 1, 0, capacity_gib=capacity)
    assert f"gpu: 1000.0 GiB predicted, {said} GiB available" in used.warning


KNOWN = ["tiny", "gpt2", "llama2_7b", "llama3_8b", "qwen3_8b", "opt_1_3b", "llama_1_7b"]
MASKED = ["bert_tiny", "bert_base", "megatron_bert_3_9b"]


@pytest.mark.parametrize("name", [*KNOWN, *MASKED])
def test_parameter_count_is_that_of_transformers(name: str) -> None:
    model = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    shape = geometry(model["kind"], model["config"])
    config = AutoConfig.for_model(model["kind"], **model["config"])
    auto = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(config)
    assert shape.num_parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("name", ["llama3.2", "mistral", "qwen3", "gpt2", "opt-350m"])
def test_the_parameters_of_a_published_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]))
    biases = {"attention_bias": True} if name in ("llama3.2", "qwen3") else {}
    model = ModelConfig(path=str(tmp_path), config=biases)
    config = network_config(model)
    shape = model_geometry(replace(model, resolved=plain_values(config)))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert shape.num_parameters == sum(p.numel() for p in built.parameters())


def test_an_encoder_is_not_taken_for_a_causal_model() -> None:
    values = {
        "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    shape = geometry("bert", values)
    assert not shape.causal
    assert shape.flops_per_token(64) - shape.flops_per_token(0) == 12 * 2 * 8 * 64


def test_vocabulary_is_padded_from_scratch() -> None:
    config = {"vocab_size": 100, "n_embd": 8, "n_layer": 1, "n_positions": 16}
    padded, plain = geometry("gpt2", config, vocab_multiple=64), geometry("gpt2", config)
    assert padded.vocab_size == 128
    assert padded.num_parameters - plain.num_parameters == 28 * 8


def test_unknown_architecture_has_no_geometry() -> None:
    assert geometry("mamba", {"hidden_size": 8}) is None
    assert geometry("llama", {"hidden_size": 8}) is None
