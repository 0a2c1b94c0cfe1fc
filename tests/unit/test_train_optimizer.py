"""Which AdamW is used where, and that it is one algorithm."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from llmx.config import OptimConfig
from llmx.errors import ConfigError
from llmx.train.engine.optimizer import Lion, build_optimizer

OPTIM = OptimConfig(kind="adamw", lr=0.01, betas=[0.9, 0.95], weight_decay=0.1)


@pytest.mark.parametrize(
    ("accelerator", "offloaded", "fused"),
    [("cpu", False, None), ("cpu", True, True), ("cuda", False, True), ("cuda", True, True)],
)
def test_adamw_is_fused_on_a_gpu_and_for_an_offload(
    accelerator: str, offloaded: bool, fused: bool | None
) -> None:
    """A run on CPU ranks keeps the one whose results were recorded."""
    optimizer = build_optimizer(
        nn.Linear(4, 4), OPTIM, accelerator=accelerator, offloaded=offloaded
    )
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"] is fused


def test_the_fused_one_takes_the_same_steps() -> None:
    values = {}
    for offloaded in (False, True):
        torch.manual_seed(3)
        model = nn.Linear(37, 61)
        optimizer = build_optimizer(model, OPTIM, accelerator="cpu", offloaded=offloaded)
        for _ in range(20):
            model.zero_grad()
            model(torch.randn(8, 37)).square().mean().backward()
            optimizer.step()
        values[offloaded] = [p.detach().clone() for p in model.parameters()]
    for plain, fused in zip(values[False], values[True], strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-5, atol=2e-6)


def test_lion_takes_the_steps_of_its_paper() -> None:
    """Algorithm 2 of Chen et al. 2023, in fp64 and for each element by itself."""
    optim = OptimConfig(kind="lion", lr=0.01, betas=[0.9, 0.99], weight_decay=0.3)
    torch.manual_seed(3)
    model = nn.Linear(5, 4)
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


def test_lion_updates_parts_as_it_updates_the_whole() -> None:
    """ZeRO cuts parameters into flat parts."""
    torch.manual_seed(3)
    whole = nn.Parameter(torch.randn(4, 6))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().view(-1).split((5, 19))]
    values = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizers = [Lion([whole], **values), Lion(parts, **values)]
    for _ in range(4):
        whole.grad = torch.randn(4, 6)
        for part, gradient in zip(parts, whole.grad.view(-1).split((5, 19)), strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole.detach().view(-1))


def test_eight_bits_follow_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what 8 bits leave; small parameters keep 32. On the CPU, where it is refused as the
    experiment is composed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "quantized")])
    pytest.importorskip("bitsandbytes", reason="not installed; make venv puts it aside")
    values = {}
    for kind in ("adamw", "adam8bit"):
        torch.manual_seed(3)
        model = nn.Linear(96, 64)
        first = [p.detach().clone() for p in model.parameters()]
        optimizer = build_optimizer(model, dataclasses.replace(OPTIM, kind=kind), accelerator="cpu")
        for _ in range(10):
            model.zero_grad()
            model(torch.randn(8, 96)).square().mean().backward()
            optimizer.step()
        values[kind] = [p.detach() - at for p, at in zip(model.parameters(), first, strict=True)]
        states, small = optimizer.state[model.weight], optimizer.state[model.bias]
    assert states["state1"].dtype == states["state2"].dtype == torch.uint8
    assert states["absmax1"].numel() == 96 * 64 // 256
    assert small["state1"].dtype == torch.float32
    (matrix, bias), (wanted, wanted_bias) = values["adam8bit"], values["adamw"]
    assert (matrix - wanted).norm() < 0.05 * wanted.norm()
    assert (bias - wanted_bias).norm() < 0.05 * wanted_bias.norm()


def test_the_package_of_eight_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install llmx\[qlora\]"):
        build_optimizer(
            nn.Linear(4, 4), dataclasses.replace(OPTIM, kind="adam8bit"), accelerator="cuda"
        )
