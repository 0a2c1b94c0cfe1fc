"""Muon: the steps of PyTorch's own, on whole matrices and on parts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from llmx.config import OptimConfig, experiment_from_dict
from llmx.errors import ConfigError
from llmx.train.engine import muon
from llmx.train.engine.muon import MATRICES, MOMENTUM, Muon, hidden_matrices, orthogonal
from llmx.train.engine.optimizer import LR_SCALE, build_optimizer, lr_scales
from tests.small_models import converted_model, small_model

OPTIM = OptimConfig(
    kind="muon", lr=0.01, betas=[0.9, 0.95], weight_decay=0.1, muon_adjust_lr="original"
)


def train(network: Any, optimizer: Any, *, steps: int = 4) -> None:
    for number in range(steps):
        network.zero_grad()
        ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(number))
        network(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_it_takes_the_steps_of_pytorch(adjust: str) -> None:
    """Its Muon for the matrices of the layers, its AdamW for all else."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    ours, theirs = small_model("llama"), small_model("llama")
    optim = OptimConfig(**{**vars(OPTIM), "muon_adjust_lr": adjust})
    optimizer = build_optimizer(ours, optim, accelerator="cpu")
    assert type(optimizer) is Muon
    train(ours, optimizer)
    matrices = hidden_matrices(theirs)
    hidden = [p for p in theirs.parameters() if id(p) in matrices]
    others = [p for p in theirs.parameters() if id(p) not in matrices]
    both = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust),
        torch.optim.AdamW(
            [
                {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=0.01,
            betas=(0.9, 0.95),
        ),
    ]

    class Both:
        def step(self) -> None:
            for one in both:
                one.step()

    train(theirs, Both())
    for (name, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5, msg=name)
    assert {
        len(optimizer.state[p]) for p in ours.parameters() if id(p) in hidden_matrices(ours)
    } == {1}


def test_embeddings_heads_and_vectors_are_left_to_adamw() -> None:
    network = converted_model("mixtral")
    found = hidden_matrices(network)
    names = {name for name, p in network.named_parameters() if id(p) in found}
    assert any(".experts." in name for name in names)
    assert not any("embed" in n or "lm_head" in n or "norm" in n for n in names)
    optimizer = build_optimizer(network, OPTIM, accelerator="cpu")
    train(network, optimizer, steps=1)
    for parameter in network.parameters():
        assert (MOMENTUM in optimizer.state[parameter]) == (id(parameter) in found)


def test_an_update_has_singular_values_near_1_and_each_expert_its_own() -> None:
    torch.manual_seed(2)
    experts = torch.randn(3, 20, 8)
    together = orthogonal(experts)
    for number in range(3):
        torch.testing.assert_close(
            together[number], orthogonal(experts[number]), atol=0.02, rtol=0.02
        )
        values = torch.linalg.svdvals(together[number].float())
        assert 0.5 < values.min() <= values.max() < 1.5


def test_the_rate_of_the_matrices_is_their_own() -> None:
    exp = experiment_from_dict({"optim": {"kind": "muon", "lr": 0.01, "muon_lr": 0.05}})
    network = small_model("llama")
    scales = lr_scales(exp.optim, exp.adapter, [network])
    optimizer = build_optimizer(network, exp.optim, accelerator="cpu", apart=scales)
    for group in optimizer.param_groups:
        assert group.get(LR_SCALE, 1.0) == pytest.approx(5.0 if group[MATRICES] else 1.0)


def test_a_network_without_such_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trained matrix inside a numbered layer"):
        build_optimizer(nn.Linear(2, 2), OPTIM, accelerator="cpu")


def test_a_gpu_that_emulates_bf16_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is bf16 everywhere, since ranks on other devices exchange it."""
    gpu = torch.device("cuda", 0)
    for capability, dtype in (((7, 0), torch.float32), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert muon.computing_dtype(gpu) == dtype
    assert muon.computing_dtype(torch.device("cpu")) == torch.bfloat16
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    emulated = muon.orthogonal(matrix)
    monkeypatch.setattr(muon, "computing_dtype", lambda _: torch.float32)
    exact = muon.orthogonal(matrix)
    assert exact.dtype == emulated.dtype == torch.bfloat16
    torch.testing.assert_close(exact, emulated, rtol=0, atol=0.05)
    assert not torch.equal(exact, emulated)
