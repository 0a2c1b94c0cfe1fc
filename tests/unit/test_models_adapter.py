"""An adapter inside a network: what is trained, how it begins, its files, and the merged model."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from llmx.checkpoint.export.merged import write_merged
from llmx.checkpoint.export.model import export_model
from llmx.checkpoint.tensors import SHARD_BYTES
from llmx.config import AdapterConfig, Experiment, ModelConfig, experiment_from_dict
from llmx.errors import ConfigError
from llmx.models.adapter import Adapter, add_adapter, base_alone, freeze, load_adapted
from llmx.models.adapter_names import CONFIG_FILE, WEIGHTS_FILE
from llmx.models.model import ModelSpec, base_of
from llmx.models.spec import are_bases
from tests.reference import word_tokenizer
from tests.small_models import CONVERTED, converted_model, small_model
from tests.unit.test_models_model import batch_of, model_of

IDS = torch.arange(24).view(2, 12) % 90 + 3
STAGE_0 = {"zero_optimization": {"stage": 0}}


def experiment(base: Path | str = "/nowhere", seed: int = 7, **adapter: Any) -> Experiment:
    values = {"kind": "lora", "rank": 4, "targets": ["all-linear"], **adapter}
    model = {"kind": "hf", "path": str(base), "init": "pretrained"}
    return experiment_from_dict({"model": model, "adapter": values, "seed": seed})


def adapted(
    network: Any, exp: Experiment, *, dtype: torch.dtype = torch.float32, head: str = "causal_lm"
) -> Adapter:
    return add_adapter(
        network, exp.model, exp.adapter, exp.seed, ds_config=STAGE_0, dtype=dtype, head=head
    )


def train_a_little(network: Any) -> None:
    """Every trained parameter becomes another one, the same each time."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits(network: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    found: torch.Tensor = network.eval()(input_ids=ids, use_cache=False).logits
    return found


def written(
    directory: Path,
    network: Any,
    adapter: Adapter,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    vocab_size: int = 90,
) -> Path:
    """The files of an adapter."""
    export_model(
        network,
        network.config,
        adapter=adapter,
        tokenizer=tokenizer or word_tokenizer(),
        vocab_size=vocab_size,
        directory=directory,
        dtype=dtype,
    )
    return directory


def merged(adapter: Path, exp: Experiment, *, dtype: str = "F32", shard: int = SHARD_BYTES) -> Path:
    """The whole model of the files of an adapter, beside them."""
    directory = adapter.with_name("merged")
    directory.mkdir()
    elements = write_merged(directory, adapter, exp.model, dtype=dtype, shard_bytes=shard)
    stored = [load_file(file).values() for file in directory.glob("*.safetensors")]
    assert elements == sum(tensor.numel() for tensors in stored for tensor in tensors)
    return directory


@pytest.mark.parametrize(("kind", "dora"), [("gpt2", True), ("opt", False), ("llama", True)])
def test_it_begins_as_its_base_and_trains_nothing_else(kind: str, dora: bool) -> None:
    network = small_model(kind)
    before = logits(network)
    weights = {name: p.detach().clone() for name, p in network.named_parameters()}
    adapter = adapted(network, experiment(dora=dora))
    assert type(network) is type(small_model(kind))
    torch.testing.assert_close(logits(network), before, rtol=1e-5, atol=1e-5)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert trained == adapter.trained
    assert all(".lora_" in name for name in trained)
    network(input_ids=IDS).logits.square().mean().backward()
    for name, parameter in network.named_parameters():
        assert (parameter.grad is not None) == (name in trained), name
    frozen = {
        name.replace(".base_layer.", "."): p
        for name, p in network.named_parameters()
        if not p.requires_grad
    }
    assert frozen.keys() == weights.keys()
    assert all(torch.equal(frozen[name], weights[name]) for name in weights)


def test_first_weights_are_those_of_the_seed_and_the_name() -> None:
    def drawn(seed: int, **adapter: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed * 31)  # the global stream does not matter
        network = small_model("llama")
        adapted(network, experiment(seed=seed, **adapter))
        return {name: p for name, p in network.named_parameters() if ".lora_" in name}

    one, again, other = drawn(7), drawn(7, targets=["q_proj", "down_proj"]), drawn(8)
    assert again.keys() < one.keys()
    assert all(torch.equal(again[name], one[name]) for name in again)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one[name.replace("layers.0", "layers.1")])
    assert all(not one[name].any() for name in one if "lora_B" in name)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"dora": True, "rank": 3},
    "rslora": {"rslora": True, "alpha": 5.0},
    "names": {"targets": ["q_proj", "layers.1.mlp.down_proj"]},
    "head": {"modules_to_save": ["lm_head"]},
    "norm": {"modules_to_save": ["model.norm", "layers.0.input_layernorm"]},
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("kind", "name", "tied"),
    [
        *(("llama", name, False) for name in KINDS),
        ("llama", "head", True),
        ("gpt2", "dora", True),
        ("opt", "plain", True),
        ("mixtral", "plain", False),
    ],
)
def test_peft_reads_it_and_the_merged_model_is_equal(
    tmp_path: Path, kind: str, name: str, tied: bool
) -> None:
    network = (
        converted_model(kind) if kind in CONVERTED else small_model(kind, tie_word_embeddings=tied)
    )
    network.save_pretrained(tmp_path / "base")
    exp = experiment(tmp_path / "base", **KINDS[name])
    plain = logits(network)
    adapter = adapted(network, exp)
    train_a_little(network)
    wanted = logits(network)
    assert not torch.allclose(wanted, plain, atol=1e-2)
    if not KINDS[name].get("modules_to_save"):
        with base_alone(network):
            torch.testing.assert_close(logits(network), plain, rtol=0, atol=0)
        torch.testing.assert_close(logits(network), wanted, rtol=0, atol=0)

    directory = written(tmp_path / "adapter", network, adapter)
    assert {CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json"} <= {p.name for p in directory.iterdir()}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    read = PeftModel.from_pretrained(base, str(directory))
    torch.testing.assert_close(logits(read), wanted, rtol=1e-5, atol=1e-5)
    loaded = load_adapted(directory, exp.model)
    torch.testing.assert_close(logits(loaded), wanted, rtol=1e-5, atol=1e-5)
    whole = merged(directory, exp)
    read = AutoModelForCausalLM.from_pretrained(whole)
    torch.testing.assert_close(logits(read), wanted, rtol=1e-4, atol=1e-4)
    assert (whole / "tokenizer.json").is_file()
    assert not (whole / CONFIG_FILE).exists()


def test_a_frozen_model_may_be_the_base_of_the_trained_one() -> None:
    """Also in the middle of training: without dropout, without a graph, and nothing is left off."""
    network = small_model("gpt2")
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    plain = copy.deepcopy(network).eval()
    adapter = adapted(network, experiment(dropout=0.5))
    train_a_little(network)
    policy = replace(model_of(network.train(), "padded"), adapter=adapter)
    reference = base_of(policy, name="reference", spec=ModelSpec(trained=False))
    batch = batch_of("padded")
    wanted = model_of(plain, "padded").log_probabilities(batch).values
    found = reference.log_probabilities(batch).values
    assert torch.equal(found, wanted)
    assert not found.requires_grad
    assert not reference.is_training
    assert policy.is_training
    assert all(module.training for module in network.modules())
    assert policy.log_probabilities(batch).values.requires_grad
    assert not torch.allclose(policy.log_probabilities(batch).values, wanted, atol=1e-2)


def test_which_frozen_models_are_a_base() -> None:
    lora = AdapterConfig(kind="lora")
    specs = {
        "policy": ModelSpec(),
        "live": ModelSpec(trained=False),
        "stored": ModelSpec(trained=False, precomputes=True),
        "teacher": ModelSpec(trained=False, source="owner/teacher"),
        "half": ModelSpec(trained=False, precision="bf16"),
        "score": ModelSpec(trained=False, head="sequence_classification", num_labels=1),
    }
    plain = ModelConfig(path="/x")
    assert are_bases(specs, lora, plain) == {"live", "stored"}
    assert are_bases(specs, AdapterConfig(), plain) == set()
    # What a module was that is trained whole is kept nowhere.
    assert are_bases(specs, replace(lora, modules_to_save=["embed_tokens"]), plain) == set()
    assert are_bases(specs, lora, replace(plain, add_tokens=["<x>"])) == set()


@pytest.mark.usefixtures("group")
def test_a_classifier_keeps_its_new_head(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "base")
    config = AutoConfig.from_pretrained(tmp_path / "base", num_labels=3)
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", config=config)
    exp = experiment(tmp_path / "base")
    network.config.pad_token_id = 0
    adapter = adapted(network, exp, head="sequence_classification")
    assert "score.weight" in adapter.trained
    assert adapter.description["modules_to_save"] == ["score"]
    train_a_little(network)
    wanted = logits(network)
    directory = written(tmp_path / "adapter", network, adapter)
    read = AutoPeftModelForSequenceClassification.from_pretrained(str(directory), num_labels=3)
    read.config.pad_token_id = 0
    torch.testing.assert_close(logits(read), wanted, rtol=1e-5, atol=1e-5)
    network.config.architectures = ["LlamaForSequenceClassification"]  # as the factory does
    network.config.save_pretrained(directory)
    read = AutoModelForSequenceClassification.from_pretrained(merged(directory, exp))
    torch.testing.assert_close(logits(read), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("group")
def test_half_precision_is_merged_in_fp32(tmp_path: Path) -> None:
    network = small_model("llama").bfloat16()
    network.save_pretrained(tmp_path / "base")
    base = copy.deepcopy(network.state_dict())
    exp = experiment(tmp_path / "base")
    adapter = adapted(network, exp, dtype=torch.bfloat16)
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    train_a_little(network)
    directory = written(tmp_path / "adapter", network, adapter, dtype=torch.bfloat16)
    whole = merged(directory, exp, dtype="BF16", shard=40_000)
    files = [load_file(file) for file in whole.glob("*.safetensors")]
    assert len(files) > 1
    found = {name: tensor for tensors in files for name, tensor in tensors.items()}
    layer = network.model.layers[0].mlp.up_proj
    first, second = layer.lora_A.default.weight.float(), layer.lora_B.default.weight.float()
    wanted = base["model.layers.0.mlp.up_proj.weight"].float() + 8.0 * second @ first
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], wanted.bfloat16())
    untouched = "model.layers.0.input_layernorm.weight"
    assert torch.equal(found[untouched], base[untouched])
    assert json.loads((whole / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"targets": ["q_projj"]}, ["q_projj names no linear layer", '"q_proj"', "down_proj"]),
        ({"targets": ["input_layernorm"]}, ["is a LlamaRMSNorm", "adapter.modules_to_save"]),
        ({"targets": ["lm_head"]}, ["is the output head", "adapter.modules_to_save=[lm_head]"]),
        ({"modules_to_save": ["hed"]}, ["hed names no module with weights", "lm_head"]),
    ],
)
def test_a_name_that_no_module_has(adapter: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        adapted(small_model("llama"), experiment(**adapter))
    assert all(word in str(error.value) for word in words), error.value


def test_frozen_parameters() -> None:
    network = small_model("llama", tie_word_embeddings=False)
    freeze(network, ["*.layers.0.*", "lm_head.weight"])
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    assert "lm_head.weight" in frozen
    assert "model.layers.0.mlp.up_proj.weight" in frozen
    assert not [name for name in frozen if ".layers.1." in name]
    with pytest.raises(ConfigError, match=r"\.layer\.\* matches none of the 21 parameters: model"):
        freeze(network, ["*.layer.*"])
    with pytest.raises(ConfigError, match="every parameter"):
        freeze(network, ["*"])
