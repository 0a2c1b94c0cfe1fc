"""The loss against PyTorch's own, and the head at a few positions against the whole head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from llmx.models import loss as loss_module
from llmx.models.loss import (
    IGNORE,
    TokenLoss,
    head_at,
    micro_batch_loss,
    target_log_probabilities,
)
from tests.rundirs import TINY_LLAMA
from tests.small_models import KINDS, small_model


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return TokenLoss().summed(*target_log_probabilities(logits, targets), weights=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_losses_may_share_their_logits_which_may_be_huge(dtype: torch.dtype) -> None:
    """The backward pass of the first leaves them as they are."""
    huge = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True)
    total = summed_loss(huge, torch.tensor([1]))
    total.backward()
    assert (total.item(), huge.grad.tolist()) == (6e4, [[1.0, -1.0, 0.0]])
    head, targets = torch.randn(3, 9).requires_grad_(), torch.tensor([0, 8, 3])
    logits = head.to(dtype) * 1
    (summed_loss(logits, targets) + 2 * summed_loss(logits, targets)).backward()
    found = head.grad.clone()
    head.grad = None
    (3 * summed_loss(head.to(dtype), targets)).backward()
    torch.testing.assert_close(found, head.grad, rtol=2e-2, atol=1e-6)


IDS = torch.arange(2, 14).view(2, 6)
INPUTS = {"input_ids": IDS, "position_ids": torch.arange(6)[None].expand(2, 6)}


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    """Of every parameter: one that took no part would leave ZeRO's reduction waiting."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_and_the_loss_at_some_positions_are_those_of_the_whole_logits(kind: str) -> None:
    """Also where head and loss are computed together."""
    model = small_model(kind)
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([2, 5, 3])
    logits = model(**INPUTS).logits
    with head_at(model, rows, columns):
        part = model(**INPUTS).logits
    with pytest.raises(TypeError, match="no output embedding"):
        head_at(model.base_model, rows, columns).__enter__()
    assert part.shape == (1, 3, model.config.vocab_size)
    torch.testing.assert_close(part[0], logits[rows, columns], rtol=1e-5, atol=1e-6)
    assert torch.equal(model(**INPUTS).logits, logits)
    labels = IDS.roll(-1, dims=1)
    labels[0, :3] = IGNORE
    whole = logits[..., :20].flatten(0, 1)
    wanted = F.cross_entropy(whole, labels.flatten(), reduction="sum", ignore_index=IGNORE)
    expected = gradients(model, wanted * 0.25)
    assert loss_module.output_head_problem(model) is None
    assert loss_module.fused_loss_problem(model, INPUTS, labels) is None
    for fused in (False, True):
        loss = micro_batch_loss(model, INPUTS, labels, vocab_size=20, fused=fused, scale=0.3)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        for one, other in zip(expected, gradients(model, loss * 0.25), strict=True):
            # Whole tensors: the rounding of one element depends on the threads.
            assert (other - one).norm() <= 1e-5 * one.norm() + 1e-7


def test_without_gradients_none_are_computed() -> None:
    weight = torch.randn(8, 4, requires_grad=True)
    with torch.no_grad():
        found = loss_module.fused_linear_cross_entropy(
            torch.randn(3, 4), weight, torch.tensor([1, 2, 3])
        )
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}),
        ("cohere", {"logit_scale": 0.5}),
        ("granite", {"logits_scaling": 2.0}),
    ],
)
def test_what_happens_after_the_head_is_seen(kind: str, config: dict[str, object]) -> None:
    shape = {**TINY_LLAMA, "vocab_size": 64, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **config}))
    assert "changes the logits" in str(loss_module.fused_loss_problem(model, INPUTS, IDS))
    model.lm_head = type("Head", (torch.nn.Linear,), {})(4, 64)
    assert loss_module.output_head_problem(model) == "its output embedding is a Head"


TERMS = [TokenLoss(), TokenLoss(dft=True, z_loss=1e-2)]


def by_the_formulas(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, terms: TokenLoss
) -> torch.Tensor:
    """DFT: equation 9 of Wu et al. 2025; z-loss: section 5 of PaLM, with its log^2 Z."""
    log_p = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    losses = -(log_p.exp().detach() * log_p) if terms.dft else -log_p
    losses = losses + terms.z_loss * logits.exp().sum(-1).log().square()
    return (losses * weights).sum()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("terms", "weighted", "dtype"),
    [
        *((terms, weighted, torch.float32) for terms in TERMS for weighted in (False, True)),
        (TokenLoss(), False, torch.bfloat16),
        (TokenLoss(), True, torch.float16),
    ],
)
def test_terms_of_the_loss_are_those_that_were_published(
    terms: TokenLoss, weighted: bool, dtype: torch.dtype, fused: bool, monkeypatch: Any
) -> None:
    """Values and gradients, in chunks, the last one shorter, beside columns of padding; by a
    factor that only a scaled fp16 gradient survives."""
    monkeypatch.setattr(loss_module, "FUSED_LOSS_CHUNK_BYTES", 5 * 64 * dtype.itemsize)
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 3 * 64)
    draw = torch.Generator().manual_seed(2)
    head = [torch.randn(17, 32, generator=draw), torch.randn(64, 32, generator=draw) / 6]
    targets = torch.randint(0, 61, (17,), generator=draw)
    weights = torch.rand(17, generator=draw) * 2 if weighted else torch.ones(17)
    given = [*head, torch.randn(64, generator=draw)] if fused else [8 * F.linear(*head)]
    given = [x.to(dtype).requires_grad_() for x in given]
    exact = [x.detach().double().requires_grad_() for x in given]
    logits = F.linear(*exact) if fused else exact[0]
    wanted, factor = by_the_formulas(logits[:, :61], targets, weights.double(), terms), 2.0**10 / 3
    (wanted * factor).backward()
    more: Any = {"weights": weights if weighted else None}
    if fused:
        hidden, weight, bias = given
        # What is known beforehand of the factor is a little off, as with other precisions of it.
        more |= {"bias": bias, "scale": factor * 1.0000001, "token_loss": terms}
        found = loss_module.fused_linear_cross_entropy(
            hidden, weight, targets, vocab_size=61, **more
        )
    else:
        values = target_log_probabilities(given[0], targets, vocab_size=61)
        found = terms.summed(*values, **more)
    (found * factor).backward()
    eps = torch.finfo(dtype).eps
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=4 * eps if fused else 1e-6)
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == dtype
        error = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 2 * eps + 1e-6
        if not fused:  # in fp32 inside, where p - 1 cancels; then rounded once
            torch.testing.assert_close(
                mine.grad.double(), theirs.grad, rtol=eps + 5e-6, atol=1e-6 * factor
            )
    columns = given[1].grad if fused else given[0].grad.T
    assert not columns[61:].any()


@pytest.mark.parametrize("terms", TERMS)
def test_the_loss_is_one_for_every_way_to_compute_it(terms: TokenLoss) -> None:
    """Head and loss together or not, the whole batch or a row at a time; also without targets."""
    model = small_model("llama")
    labels = IDS.roll(-1, dims=1)
    labels[0, :3] = labels[1] = IGNORE
    labels[1, 2] = 5
    weights = torch.tensor([0.5, 2.0, 1.0, 0.25])

    def loss_of(rows: slice, targets: slice, labels: torch.Tensor, fused: bool) -> torch.Tensor:
        inputs = {name: values[rows] for name, values in INPUTS.items()}
        given = None if terms.plain else weights[targets]
        return micro_batch_loss(
            model, inputs, labels[rows], fused=fused, weights=given, token_loss=terms
        )

    found = []
    for fused in (False, True):
        whole = loss_of(slice(2), slice(4), labels, fused)
        first = loss_of(slice(1), slice(3), labels, fused)
        for total in (whole, first + loss_of(slice(1, 2), slice(3, 4), labels, fused)):
            found.append((total.item(), gradients(model, total / 3.75)))
        nothing = loss_of(slice(1), slice(0), torch.full_like(labels, IGNORE), fused)
        assert nothing.item() == 0.0
        assert not any(gradient.any() for gradient in gradients(model, nothing))
    for total, other in found[1:]:
        assert total == pytest.approx(found[0][0], rel=1e-5)
        for one, two in zip(found[0][1], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
