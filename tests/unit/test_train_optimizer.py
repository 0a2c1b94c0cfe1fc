"""Which AdamW is used where, and that it is one algorithm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llmx.config import OptimConfig
from llmx.train.engine.optimizer import build_optimizer

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
