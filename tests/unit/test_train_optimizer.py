"""Which optimizer is used where, that each is one algorithm (AdamW, Lion, Muon, eight bits), and
the learning rate of each parameter: of its layer, of a named part, of an adapter."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from llmx.config import Experiment, OptimConfig, experiment_from_dict
from llmx.errors import ConfigError
from llmx.models.adapter import add_adapter
from llmx.train.engine import muon
from llmx.train.engine import optimizer as module
from llmx.train.engine.muon import MOMENTUM, Muon, hidden_matrices, orthogonal
from llmx.train.engine.optimizer import LR_SCALE, build_optimizer, lr_scales, parameter_groups
from tests.small_models import converted_model, small_model

OPTIM = OptimConfig(kind="adamw", lr=0.01, betas=[0.9, 0.95], weight_decay=0.1)


def of_kind(kind: str, **values: Any) -> OptimConfig:
    return dataclasses.replace(OPTIM, kind=kind, **values)


@pytest.mark.parametrize(
    ("accelerator", "offloaded", "fused"),
    [("cpu", False, None), ("cpu", True, True), ("cuda", False, True), ("cuda", True, True)],
)
def test_adamw_is_fused_on_a_gpu_and_for_an_offload(accelerator, offloaded, fused) -> None:
    """A run on CPU ranks keeps the one whose results were recorded."""
    optimizer = build_optimizer(
        nn.Linear(4, 4), OPTIM, accelerator=accelerator, offloaded=offloaded
    )
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"] is fused
    matrices, vectors = parameter_groups(small_model("gpt2"), weight_decay=0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)  # matrices alone
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}


def moved(optim: OptimConfig, *shape: int, steps: int, **options: Any) -> tuple[Any, Any, Any]:
    """A layer, its optimizer, and how far so many steps have moved weight and bias."""
    torch.manual_seed(3)
    model = nn.Linear(*shape)
    first = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model, optim, accelerator="cpu", **options)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(8, shape[0])).square().mean().backward()
        optimizer.step()
    steps_of = [p.detach() - at for p, at in zip(model.parameters(), first, strict=True)]
    return model, optimizer, steps_of


def test_the_fused_one_takes_the_same_steps() -> None:
    plain, fused = (moved(OPTIM, 37, 61, steps=20, offloaded=is_)[0] for is_ in (False, True))
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=2e-5, atol=2e-6)


def test_eight_bits_follow_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what 8 bits leave; small parameters keep 32. On the CPU, where it is refused as the
    experiment is composed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "quantized")])
    pytest.importorskip("bitsandbytes", reason="not installed; make venv puts it aside")
    _, _, wanted = moved(OPTIM, 96, 64, steps=10)
    model, optimizer, found = moved(of_kind("adam8bit"), 96, 64, steps=10)
    states, small = optimizer.state[model.weight], optimizer.state[model.bias]
    assert states["state1"].dtype == states["state2"].dtype == torch.uint8
    assert states["absmax1"].numel() == 96 * 64 // 256
    assert small["state1"].dtype == torch.float32
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).norm() < 0.05 * theirs.norm()


def test_the_package_of_eight_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install llmx\[qlora\]"):
        build_optimizer(nn.Linear(4, 4), of_kind("adam8bit"), accelerator="cuda")


def test_lion_takes_the_steps_of_its_paper() -> None:
    """Algorithm 2 of Chen et al. 2023, in fp64 and for each element by itself."""
    torch.manual_seed(3)
    model = nn.Linear(5, 4)
    optim = of_kind("lion", betas=[0.9, 0.99], weight_decay=0.3)
    optimizer = build_optimizer(model, optim, accelerator="cpu")
    weight, momentum = model.weight.detach().double(), torch.zeros(4, 5, dtype=torch.float64)
    bias = model.bias.detach().clone()
    for number in range(6):
        for group in optimizer.param_groups:
            group["lr"] = lr = 0.01 / (number + 1)
        model.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        gradient = model.weight.grad.double()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        weight = weight - lr * (update + 0.3 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
        optimizer.step()
        torch.testing.assert_close(model.weight.detach().double(), weight, rtol=1e-6, atol=1e-7)
    kept = optimizer.state[model.weight]
    torch.testing.assert_close(kept["exp_avg"].double(), momentum, rtol=1e-5, atol=1e-8)
    assert set(kept) == {"exp_avg"}
    assert (model.bias - bias).abs().max() < 0.03  # no decay, steps of lr


MUON = of_kind("muon", muon_adjust_lr="original")


def train(network: Any, optimizers: list[Any], *, steps: int = 4) -> None:
    for number in range(steps):
        network.zero_grad()
        ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(number))
        network(input_ids=ids, labels=ids).loss.backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_takes_the_steps_of_pytorch(adjust: str) -> None:
    """Its Muon for the matrices of the layers, its AdamW for all else."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    ours, theirs = small_model("llama"), small_model("llama")
    optimizer = build_optimizer(ours, of_kind("muon", muon_adjust_lr=adjust), accelerator="cpu")
    assert type(optimizer) is Muon
    train(ours, [optimizer])
    matrices = hidden_matrices(theirs)
    hidden = [p for p in theirs.parameters() if id(p) in matrices]
    others = [p for p in theirs.parameters() if id(p) not in matrices]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
    ]
    of_hidden = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust)
    train(theirs, [of_hidden, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))])
    for (name, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5, msg=name)
    matrices = hidden_matrices(ours)
    assert {len(optimizer.state[p]) for p in ours.parameters() if id(p) in matrices} == {1}


def test_embeddings_heads_and_vectors_are_left_to_adamw() -> None:
    network = converted_model("mixtral")
    found = hidden_matrices(network)
    names = {name for name, p in network.named_parameters() if id(p) in found}
    assert any(".experts." in name for name in names)
    assert not any("embed" in n or "lm_head" in n or "norm" in n for n in names)
    optimizer = build_optimizer(network, MUON, accelerator="cpu")
    train(network, [optimizer], steps=1)
    for parameter in network.parameters():
        assert (MOMENTUM in optimizer.state[parameter]) == (id(parameter) in found)


def test_a_gpu_that_emulates_bf16_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is bf16 everywhere, since ranks on other devices exchange it."""
    for capability, dtype in (((7, 0), torch.float32), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert muon.computing_dtype(torch.device("cuda", 0)) == dtype
    assert muon.computing_dtype(torch.device("cpu")) == torch.bfloat16
    experts = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    emulated = orthogonal(experts)
    monkeypatch.setattr(muon, "computing_dtype", lambda _: torch.float32)
    exact = torch.stack([orthogonal(one) for one in experts])  # each by itself
    assert exact.dtype == emulated.dtype == torch.bfloat16
    torch.testing.assert_close(exact, emulated, rtol=0, atol=0.05)
    assert not torch.equal(exact, emulated)


def experiment(adapter: dict[str, Any] | None = None, **optim: Any) -> Experiment:
    model = {"kind": "hf", "path": "/nowhere"}
    return experiment_from_dict(
        {"optim": {"lr": 0.01, **optim}, "adapter": adapter or {}, "model": model}
    )


def scales(exp: Experiment, *networks: Any) -> dict[int, float]:
    return lr_scales(exp.optim, exp.adapter, list(networks))


def factors(network: Any, exp: Experiment) -> dict[str, float]:
    """Of each trained parameter, by its first name."""
    found = scales(exp, network)
    return {n: found.get(id(p), 1.0) for n, p in network.named_parameters() if p.requires_grad}


def rates(network: Any, exp: Experiment) -> dict[int, float]:
    """The factor of each parameter in the groups of the optimizer."""
    built = build_optimizer(network, exp.optim, accelerator="cpu", apart=scales(exp, network))
    return {id(p): g.get(LR_SCALE, 1.0) for g in built.param_groups for p in g["params"]}


def test_the_rate_of_the_matrices_of_muon_is_their_own() -> None:
    network, exp = small_model("llama"), experiment(kind="muon", muon_lr=0.05)
    hidden = hidden_matrices(network)
    assert rates(network, exp) == pytest.approx(
        {id(p): 5.0 if id(p) in hidden else 1.0 for p in network.parameters()}
    )
    assert scales(experiment(), network) == scales(experiment(layer_decay=1.0), network) == {}


@pytest.mark.parametrize(
    ("kind", "embedding", "layer", "head"),
    [
        ("llama", "model.embed_tokens.weight", "model.layers.{}.mlp.up_proj.weight", "lm_head"),
        ("gpt2", "transformer.wte.weight", "transformer.h.{}.mlp.c_fc.bias", "transformer.ln_f"),
        ("opt", "model.decoder.embed_positions.weight", "model.decoder.layers.{}.fc1.weight",
         "model.decoder.final_layer_norm"),
    ],
)  # fmt: skip
def test_each_layer_has_that_much_less_than_the_one_above(kind, embedding, layer, head) -> None:
    """And a head that is the embedding (that of GPT-2) has its rate."""
    network = small_model(kind, **({"tie_word_embeddings": False} if kind == "llama" else {}))
    found = factors(network, experiment(layer_decay=0.5))
    count = network.config.num_hidden_layers
    assert found[embedding] == 0.5 ** (count + 1)
    for number in range(count):
        assert found[layer.format(number)] == 0.5 ** (count - number)
    assert all(factor == 1.0 for name, factor in found.items() if name.startswith(head))


def test_the_norm_of_the_embeddings_is_below_the_layers_and_the_pooler_above() -> None:
    config = AutoConfig.for_model(
        "bert", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=90,
    )  # fmt: skip
    bert = AutoModelForSequenceClassification.from_config(config)
    found = factors(bert, experiment(layer_decay=0.5))
    assert found["bert.embeddings.LayerNorm.weight"] == 0.5**4
    assert found["bert.encoder.layer.2.output.dense.bias"] == 0.5
    assert found["bert.pooler.dense.weight"] == found["classifier.weight"] == 1.0


def test_patterns_multiply_and_an_adapter_keeps_its_own_rate() -> None:
    adapter = {"kind": "lora", "rank": 2, "targets": ["all-linear"], "lr": 0.1,
               "modules_to_save": ["embed_tokens"]}  # fmt: skip
    exp = experiment(adapter, layer_decay=0.5, lr_scale={"*.mlp.*": 3.0, "*.up_proj.*": 2.0})
    network = small_model("llama", tie_word_embeddings=False)
    add_adapter(
        network, exp.model, exp.adapter, exp.seed, ds_config={"zero_optimization": {"stage": 0}},
        dtype=torch.float32, head="causal_lm",
    )  # fmt: skip
    count = network.config.num_hidden_layers
    # It is looked through once, not for each parameter: with 80 layers that took 10 s.
    with mock.patch.object(module, "LayerDecay", wraps=module.LayerDecay) as looks:
        found = factors(network, exp)
    assert looks.call_count == 1
    first = "model.layers.0.{}.lora_A.default.weight"
    assert found[first.format("self_attn.q_proj")] == 0.5**count
    assert found[first.format("mlp.down_proj")] == 3 * 0.5**count
    assert found[first.format("mlp.up_proj")] == 6 * 0.5**count
    assert found["model.embed_tokens.weight"] == pytest.approx(0.1 * 0.5 ** (count + 1))
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
    assert rates(network, exp) == {id(p): found[n] for n, p in trained.items()}


def frozen_but_for_the_head() -> Any:
    network = small_model("llama").requires_grad_(False)
    network.lm_head.requires_grad_(True)
    return network


@pytest.mark.parametrize(
    ("network", "optim", "message"),
    [
        (lambda: small_model("llama"), {"lr_scale": {"*.embed_tokenz.*": 0.5}},
         r"optim.lr_scale: \*.embed_tokenz.\* matches none of"),
        (frozen_but_for_the_head, {"lr_scale": {"*.mlp.*": 0.5}}, "trained parameters: "),
        (lambda: nn.Linear(2, 2), {"layer_decay": 0.5}, "no numbered layers"),
        (lambda: nn.Linear(2, 2), {"kind": "muon"}, "no trained matrix inside a numbered layer"),
        (lambda: None, {"layer_decay": 1.5}, "layer_decay"),
        (lambda: None, {"lr_scale": {"a": 0}}, "lr_scale"),
    ],
)  # fmt: skip
def test_rates_that_cannot_be_are_refused(network, optim, message) -> None:
    with pytest.raises(ConfigError, match=message):
        rates(network(), experiment(**optim))
