"""A published ``config.json`` and typed values, read once: held against the config classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from llmx.compose.networks import _asked, with_network
from llmx.config import ModelConfig
from llmx.models.network_config import main, network_config, plain_values, read_config
from tests.published_configs import FAMILIES, TYPED, with_typed


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program that reads a config runs in this process, which knows transformers already."""

    def ask(_program: str, request: str, **_: Any) -> Any:
        (tmp_path / "request").write_text(request)
        main(tmp_path / "request", tmp_path / "answer")
        return json.loads((tmp_path / "answer").read_text())

    monkeypatch.setattr("llmx.compose.networks.ask", ask)
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))


def written(directory: Path, values: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def values_of(config: Any) -> dict[str, Any]:
    return {k: v for k, v in plain_values(config).items() if k[0] != "_"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_config_is_what_its_class_reads(name: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "model", FAMILIES[name])
    read = AutoConfig.from_pretrained(directory)
    model = ModelConfig(path=str(directory))
    assert values_of(network_config(model)) == values_of(read)
    resolved = ModelConfig(path=str(directory), resolved=plain_values(read))
    (directory / "config.json").unlink()
    assert values_of(network_config(resolved)) == values_of(read)


def with_typed_keys(directory: Path, name: str, typed: dict[str, Any]) -> Any:
    """The config of a published file with typed values, none of which is refused."""
    model = ModelConfig(path=str(written(directory, FAMILIES[name])), config=typed)
    config, problems = read_config(model)
    assert problems == []
    return config


@pytest.mark.parametrize("name", FAMILIES)
def test_a_typed_key_is_as_if_written_into_the_file(name: str, tmp_path: Path) -> None:
    edited = AutoConfig.from_pretrained(written(tmp_path / "edited", with_typed(name)))
    config = with_typed_keys(tmp_path / "model", name, TYPED[name])
    ours, by_hand = values_of(config), values_of(edited)
    for values in (ours.get("text_config", ours), by_hand.get("text_config", by_hand)):
        values.pop("full_attention_interval", None)  # only read where the layers are made of it
    assert ours == by_hand


@pytest.mark.parametrize(
    ("name", "typed", "changed"),
    [
        # Lists by layer, which the class makes of other values, follow from the typed ones.
        ("qwen3", {"num_hidden_layers": 3}, {"layer_types": ["full_attention"] * 3}),
        ("llama4", {"num_hidden_layers": 1}, {"layer_types": ["chunked_attention"]}),
        ("qwen2.5", {"use_sliding_window": True, "max_window_layers": 1},
         {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4096}),
        # Another type of scaling replaces the file's; an entry of the same type joins it.
        ("llama3.1", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
         {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}),
        ("llama3.1", {"rope_scaling": {"factor": 4}}, {"rope_parameters": {
            "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
        ("llama3.1", {"rope_scaling": None},
         {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("gemma3-1b", {"rope_theta": 5.0}, {"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
            "full_attention": {"rope_type": "default", "rope_theta": 5.0}}}),
        # Numbers in the type of the class, and values of a part.
        ("granite3", {"rms_norm_eps": 1}, {"rms_norm_eps": 1.0}),
        ("qwen3.5", {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
        ("gemma3-4b", {"text_config": {"sliding_window": 8}}, {"sliding_window": 8}),
        # Another name of the same value.
        ("gpt2", {"num_hidden_layers": 1}, {"n_layer": 1}),
    ],
)  # fmt: skip
def test_values_that_follow_from_typed_ones(
    name: str, typed: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    config = with_typed_keys(tmp_path / "model", name, typed)
    text = config.get_text_config().to_dict()
    assert {key: text[key] for key in changed} == changed
    if "tie_word_embeddings" in typed:
        assert config.tie_word_embeddings is False, "a value of all parts"


def test_a_file_of_transformers_5_takes_the_old_names(tmp_path: Path) -> None:
    """As ``save_pretrained`` writes it: the values of rotary embeddings are in one mapping."""
    CONFIG_MAPPING["qwen3"](
        num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ).save_pretrained(tmp_path)
    linear = {"rope_type": "linear", "factor": 2.0}
    for typed, rope in (
        ({"rope_theta": 7.0}, {"rope_type": "default", "rope_theta": 7.0}),
        ({"rope_scaling": linear}, {**linear, "rope_theta": 1e6}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e6}),
    ):
        config, problems = read_config(ModelConfig(path=str(tmp_path), config=typed))
        assert (problems, config.rope_parameters) == ([], rope)


def test_a_value_that_only_a_property_of_the_config_reads(tmp_path: Path) -> None:
    CONFIG_MAPPING["modernbert"](num_hidden_layers=3).save_pretrained(tmp_path)
    config, problems = read_config(ModelConfig(path=str(tmp_path), config={"local_attention": 8}))
    assert (problems, config.sliding_window) == ([], 4)


@pytest.mark.parametrize(
    ("name", "typed", "reason"),
    [
        ("qwen2.5", {"use_sliding_window": True}, "this Qwen2Config has a sliding window"),
        ("qwen2.5", {"sliding_window": 8}, "Qwen2Config makes null of it"),
        ("qwen2.5", {"attention_bias": True}, "Qwen2Config has no such value"),
        ("llama2", {"partial_rotary_factor": 0.5}, "no layer of Llama reads it"),
        ("llama2", {"rms_norm_epsilon": 1e-5}, 'Did you mean "rms_norm_eps"?'),
        ("llama2", {"torch_dtype": "float32"}, "has no effect: precision decides it"),
        ("gemma", {"hidden_act": "gelu"}, "makes gelu_pytorch_tanh of it"),
        ("exaone4", {"num_hidden_layers": 1}, "Exaone4Config refuses the config with this"),
        ("phi3-128k", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "one of .'longrope'."),
    ],
)
def test_a_typed_key_without_effect_is_refused(
    name: str, typed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = written(tmp_path / "model", FAMILIES[name])
    _, problems = read_config(ModelConfig(path=str(directory), config=typed))
    assert len(problems) == 1
    assert problems[0].startswith(f"model.config.{next(iter(typed))}=")
    assert re.search(reason, problems[0]), problems[0]


def test_values_of_a_group_that_the_file_has_too(tmp_path: Path) -> None:
    """``model=llama3_8b model.path=DIR``: the option has sizes, to plan without the directory."""
    directory = written(tmp_path / "model", FAMILIES["llama3.1"])
    sizes = {"vocab_size": 264, "hidden_size": 32, "num_key_value_heads": 2}
    model = ModelConfig(kind="llama", init="pretrained", path=str(directory), config=sizes)
    config, problems = read_config(model)
    assert problems == []
    assert values_of(config) == values_of(AutoConfig.from_pretrained(directory))


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    directory = written(tmp_path / "model", FAMILIES["qwen2.5"])
    typed = {"hiden_size": 3, "use_sliding_window": True, "rope_theta": 7.0}
    _, problems = read_config(ModelConfig(path=str(directory), config=typed))
    assert [problem.partition("=")[0] for problem in problems] == [
        "model.config.hiden_size", "model.config.use_sliding_window",
    ]  # fmt: skip


def test_the_control_process_reads_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.compose.networks.TIME_LIMIT_S", 900.0)  # however busy it is
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    directory = written(tmp_path / "model", FAMILIES["llama3.1"])
    model = ModelConfig(path=str(directory), config={"rope_theta": 7})
    resolved, problems = with_network(model)
    assert problems == []
    assert resolved.config == {"rope_theta": 7.0}
    assert resolved.resolved["rope_parameters"]["rope_theta"] == 7.0
    assert resolved.architecture == "llama"
    (answer,) = (tmp_path / "cache" / "networks").iterdir()
    answer.write_text(json.dumps({"problems": ["from the cache"]}))
    _asked.cache_clear()
    assert with_network(model)[1] == ["from the cache"]
    file = directory / "config.json"
    file.write_text('{"model_type": "next_year"}')
    (problem,) = with_network(model)[1]
    assert "its model_type next_year is none that the installed transformers knows" in problem


@pytest.mark.usefixtures("here")
def test_a_file_that_its_class_refuses(tmp_path: Path) -> None:
    values = json.loads(json.dumps(FAMILIES["llama4"]))
    values["text_config"]["attn_temperature_tuning"] = 4  # as it was first published
    directory = written(tmp_path / "model", values)
    (problem,) = with_network(ModelConfig(path=str(directory)))[1]
    assert problem.startswith(f"{directory}/config.json: transformers ")
    assert "attn_temperature_tuning" in problem
    typed = ModelConfig(path=str(directory), config={"attn_temperature_tuning": True})
    assert with_network(typed)[1] == []
    stored = {**FAMILIES["gpt-oss"], "quantization_config": {"quant_method": "mxfp4"}}
    stored_directory = str(written(tmp_path / "stored", stored))
    (problem,) = with_network(ModelConfig(path=stored_directory))[1]
    assert problem.startswith(f"model.path={stored_directory} holds quantized weights (mxfp4)")
    assert with_network(ModelConfig(path=stored_directory, init="scratch"))[1] == []
