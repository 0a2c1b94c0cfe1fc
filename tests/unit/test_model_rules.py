"""Values of ``model.config`` that no network can be built from are refused before a launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.activations import ACT2FN

from llmx.config import ModelConfig
from llmx.config.model_rules import (
    ACTIVATIONS,
    FLAGS,
    FLOATS,
    KEYS,
    SIZES,
    as_typed,
    head_problem,
    model_config_problems,
)
from llmx.errors import ConfigError
from tests.composing import composed

LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("llama", {"hidden_size": "a"}, "hidden_size=a: must be a whole number from 1 to 1048576"),
        ("llama", {"hidden_size": 64.0}, "hidden_size=64.0: must be a whole number"),
        ("llama", {"hidden_size": True}, "hidden_size=true: must be a whole number"),
        ("llama", {"hidden_size": None}, "hidden_size=null: must be a whole number"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads=0: must be"),
        ("llama", {"vocab_size": 0}, "vocab_size=0"),
        ("llama", {"intermediate_size": -1}, "intermediate_size=-1"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps=-1: must be a number above 0 and at most 1"),
        ("llama", {"attention_dropout": 1}, "must be a number from 0 to below 1"),
        ("llama", {"tie_word_embeddings": "yes"}, "must be true or false"),
        ("llama", {"hidden_act": "silo"}, 'Did you mean "silu"'),
        ("llama", {"rope_scaling": "linear"}, "must be a mapping, or null"),
        ("llama", {"hiden_size": 64}, 'Did you mean "hidden_size"'),
        ("llama", {"something_new": 3}, "something_new=3: llama has no such value"),
        ("llama", {"model_type": "opt"}, "differs from model.kind=llama"),
        ("llama", {"hidden_size": 65}, "hidden_size=65 is not divisible by the 4 attention heads. "
         "Use hidden_size=64 or 68"),
        ("llama", {"hidden_size": 60}, "a head is 15 wide; rotary position embeddings"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ("qwen3", {"head_dim": 7}, "a head is 7 wide"),
        ("gpt2", {"n_embd": 65, "n_head": 4}, "not divisible by the 4"),
        ("hf", {"model_type": "mistral", "hidden_size": 65}, "not divisible by the 4"),
        ("hf", {"model_type": "anything", "num_hidden_layers": 0}, "num_hidden_layers=0: must be"),
        ("hf", {"num_experts": 4, "num_experts_per_tok": 8}, "is more than the 4 experts"),
    ],
)  # fmt: skip
def test_what_no_network_can_be_built_from(kind, config, message) -> None:
    base = {} if kind == "gpt2" else LLAMA
    (problem,) = model_config_problems(ModelConfig(kind=kind, config={**base, **config}))
    assert message in problem
    assert problem.startswith("model.config")


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {"hidden_size": 65, "head_dim": 16}),
        ("llama", {"head_dim": None, "num_key_value_heads": None}),
        ("gpt2", {"n_inner": None, "n_embd": 64, "n_head": 4}),
        ("hf", {"model_type": "openelm", "num_attention_heads": [4, 8], "ffn_dim": None}),
        ("hf", {"hidden_act": {"name": "silu"}, "attention_dropout": 0}),
    ],
)
def test_what_a_network_can_be_built_from(kind, config) -> None:
    base = {} if kind == "gpt2" else LLAMA
    assert list(model_config_problems(ModelConfig(kind=kind, config={**base, **config}))) == []


def test_numbers_get_the_type_of_the_library() -> None:
    typed = as_typed({"vocab_size": 1e5, "initializer_range": 0, "head_dim": 1.5, "x": 2})
    assert str(typed) == "{'vocab_size': 100000, 'initializer_range': 0.0, 'head_dim': 1.5, 'x': 2}"


@pytest.mark.parametrize("kind", sorted(KEYS))
def test_the_tables_are_those_of_the_library(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    own = {key for key in config.to_dict() if key not in ("model_type", "_name_or_path")}
    assert own - set(KEYS[kind]) == set(), "the library has keys that the table lacks"
    assert set(ACTIVATIONS) <= set(ACT2FN)
    # Its own defaults keep the rules.
    assert list(model_config_problems(ModelConfig(kind=kind, config=config.to_dict()))) == []
    for key, value in config.to_dict().items():
        if isinstance(value, bool | float):
            assert key not in SIZES
            assert key not in (FLOATS if isinstance(value, bool) else FLAGS)


@pytest.mark.parametrize(
    ("named", "head", "words"),
    [
        ("LlamaForSequenceClassification", "causal_lm", "a classifier or a reward model"),
        ("BertForTokenClassification", "masked_lm", "where a masked language model is needed"),
        ("BertForMaskedLM", "causal_lm", "use task=mlm"),
        ("Qwen3ForCausalLM", "masked_lm", "use task=pretrain"),
        ("LlamaForSequenceClassification", "sequence_classification", ""),
        ("BertForMaskedLM", "backbone", ""),
        ("GPT2LMHeadModel", "causal_lm", ""),
        ("BertForPreTraining", "masked_lm", ""),
        ("", "causal_lm", ""),
    ],
)
def test_weights_that_end_in_another_head(named: str, head: str, words: str) -> None:
    found = head_problem({"architectures": [named]}, head, "model.path=x")
    assert bool(found) == bool(words)
    assert words in found
    # A decoder may be called a masked language model, and code of its own anything.
    if named == "BertForMaskedLM":
        assert not head_problem({"architectures": [named], "is_decoder": True}, head, "x")
    # Images and text go into a decoder, too.
    several = {"architectures": ["XForConditionalGeneration"]}
    assert not head_problem(several, "causal_lm", "x")
    found = head_problem({**several, "is_encoder_decoder": True}, "causal_lm", "model.path=x")
    assert "model.path=x holds a XForConditionalGeneration: an encoder with a decoder" in found
    assert not head_problem({"architectures": [named], "auto_map": {"AutoConfig": "x"}}, head, "x")


def test_a_reward_model_is_no_language_model_and_no_teacher(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "llama", "intermediate_size": 96, "vocab_size": 1024}
    config["architectures"] = ["LlamaForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    base = ["hardware=cpu2", "model=hf", f"model.path={tmp_path}", "model.tokenizer=demo"]
    with pytest.raises(ConfigError, match=r"model\.path=.* holds a LlamaForSequenceClassification"):
        composed([*base, "task=sft"])
    assert composed([*base, "task=reward"]).plan
    words = ["hardware=cpu2", "task=distill", f"task.options.teacher={tmp_path}"]
    with pytest.raises(ConfigError, match=r"task\.options\.teacher=.* trained from\.$"):
        composed(words)
