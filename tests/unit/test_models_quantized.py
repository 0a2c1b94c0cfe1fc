"""A base in 4 bits: what is packed, what it computes, its files, and the merged model.

Runs where bitsandbytes lies (``make venv`` puts it aside: it doubles the time that peft takes to
be imported). Its kernels for CPUs compute what those for GPUs do; training on CPUs is refused where
a run is composed, and these tests begin below that.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.models.adapter import Adapter, base_alone, load_adapted
from llmx.models.adapter_names import QUANTIZATION_FILE
from llmx.models.factory import num_parameters
from llmx.models.network_config import network_config
from llmx.models.quantized import Quantization, quantized_layers, rounded
from tests.small_models import network_of, small_model
from tests.unit.test_models_adapter import IDS, adapted, logits, merged, train_a_little, written
from tests.unit.test_models_adapter import experiment as plain_experiment

STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def _bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "quantized")])
    pytest.importorskip("bitsandbytes", reason="not installed; make venv puts it aside")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Layers of more than one block."""
    directory = tmp_path / "base"
    small_model("llama", hidden_size=128, intermediate_size=192).save_pretrained(directory)
    return directory


experiment = partial(plain_experiment, quantize="nf4")


def built(exp: Experiment, *, precision: str = "fp32") -> tuple[Any, Adapter]:
    """A network as a rank builds it."""
    config = network_config(exp.model)
    network = network_of(exp, config, precision=precision, ds_config=STAGE_2, adapter=exp.adapter)
    return network, adapted(network, exp, dtype=next(network.parameters()).dtype)


def rounded_base(base: Path, exp: Experiment, *, without: tuple[str, ...] = ("lm_head",)) -> Any:
    """The plain model with the weights that 4 bits leave of it."""
    network: Any = AutoModelForCausalLM.from_pretrained(base)
    quantization = Quantization.of(exp.adapter)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in without:
            module.weight.data = rounded(module.weight.data, quantization)
    return network


@pytest.mark.parametrize(
    "adapter",
    [
        {"quantize": "fp4", "double_quant": False},
        {"dora": True},
        {"targets": ["q_proj"], "modules_to_save": ["model.layers.0.mlp.up_proj"]},
    ],
)
def test_it_computes_what_its_rounded_base_does(adapter: dict[str, Any], base: Path) -> None:
    exp = experiment(base, **adapter)
    network, made = built(exp)
    saved = tuple(exp.adapter.modules_to_save)
    plain = rounded_base(base, exp, without=("lm_head", *saved))
    torch.testing.assert_close(logits(network), logits(plain), rtol=1e-4, atol=1e-4)
    layers = quantized_layers(network)
    assert len(layers) == 2 * 7 - len(saved)
    assert not any(p.is_meta for p in network.parameters())
    assert num_parameters(network) == num_parameters(plain) + sum(
        p.numel() for name, p in network.named_parameters() if ".lora_" in name
    )
    packed = sum(layer.packed_bytes for layer in layers.values())
    weights = sum(layer.num_weights for layer in layers.values())
    # A weight of a small layer shares the scale of scales with fewer.
    scale = 1 + 4 / 256 if exp.adapter.double_quant else 4
    assert packed == pytest.approx(weights * (0.5 + scale / 64), rel=0.01)
    train_a_little(network)
    if not saved:
        with base_alone(network):
            torch.testing.assert_close(logits(network), logits(plain), rtol=1e-4, atol=1e-4)
    assert set(made.trained) == {n for n, p in network.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_gradients_are_those_of_the_rounded_base(checkpointing: str, base: Path) -> None:
    exp = experiment(base)
    exp = replace(exp, model=replace(exp.model, activation_checkpointing=checkpointing))
    network, _ = built(exp)
    plain = rounded_base(base, exp)
    adapted(plain, exp)
    found = []
    for each in (network, plain):
        train_a_little(each)
        each.train()
        each(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        found.append({n: p.grad for n, p in each.named_parameters() if p.requires_grad})
    ours, wanted = found
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("precision", "adapter"),
    [("fp32", {}), ("fp32", {"modules_to_save": ["lm_head"]}), ("bf16", {"dora": True})],
)
def test_its_files_and_the_merged_model_are_equal(
    precision: str, adapter: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    exp = experiment(base, **adapter)
    network, made = built(exp, precision=precision)
    train_a_little(network)
    wanted = logits(network.float())
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    directory = written(tmp_path / "adapter", network, made, dtype=dtype)
    said = json.loads((directory / QUANTIZATION_FILE).read_text())
    assert said["llm_int8_skip_modules"] == ["lm_head"]
    config = BitsAndBytesConfig(**{k: v for k, v in said.items() if k != "quant_method"})
    assert config.quantization_method() == "nf4"
    assert config.bnb_4bit_compute_dtype == dtype
    close = {"rtol": 1e-4, "atol": 1e-4} if precision == "fp32" else {"rtol": 0.05, "atol": 0.1}
    read = load_adapted(directory, exp.model)
    assert next(read.parameters()).dtype == dtype
    torch.testing.assert_close(logits(read.float()), wanted, **close)
    files = merged(directory, exp)
    assert not (files / QUANTIZATION_FILE).exists()
    whole = AutoModelForCausalLM.from_pretrained(files)
    torch.testing.assert_close(logits(whole), wanted, **close)
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    assert (wanted - plain).abs().max() > 0.1


def test_what_cannot_be_packed_is_said(tmp_path: Path) -> None:
    small_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"quantize=nf4: GPT2LMHeadModel has no linear layer"):
        built(experiment(tmp_path / "gpt2"))


def test_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("bitsandbytes")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install llmx\[qlora\]"):
        rounded(torch.ones(64, 64), Quantization("nf4", True))
