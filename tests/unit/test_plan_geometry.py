"""Parameter counts against transformers' own models, built without weights."""

from __future__ import annotations

import pytest
import yaml

from llmx.config.groups import conf_dir
from llmx.plan.geometry import geometry

KNOWN = ["tiny", "gpt2", "llama2_7b", "llama3_8b", "qwen3_8b", "opt_1_3b", "llama_1_7b"]


@pytest.mark.parametrize("name", KNOWN)
def test_parameter_count_is_that_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())
    shape = geometry(model["kind"], model["config"])
    assert shape is not None
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model["kind"], **model["config"])
        )
    assert shape.num_parameters == sum(p.numel() for p in built.parameters())


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
