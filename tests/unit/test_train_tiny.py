"""Tiny configs: the same architecture with every kind of layer, small enough for seconds."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from llmx.models.tiny import tiny_config
from tests.architectures import architectures, full_config, small_config


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "mixtral", "jamba"])
def test_every_kind_of_layer_is_kept(name: str) -> None:
    full, small = full_config(name), small_config(name)
    assert type(small) is type(full)
    assert small.num_hidden_layers < full.num_hidden_layers
    assert small.hidden_size == 64
    kinds = getattr(full, "layer_types", None)
    if kinds is not None:
        assert set(small.layer_types) == set(kinds)
        assert len(small.layer_types) == small.num_hidden_layers


def test_a_window_becomes_one_that_a_short_row_crosses() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=4096)
    assert tiny_config(config).sliding_window == 4
    assert tiny_config(config, window=64).sliding_window == 64


def test_small_configs_are_there_for_all_that_transformers_knows() -> None:
    names = architectures()
    assert len(names) >= 100
    assert small_config(names[0]).vocab_size <= 96
