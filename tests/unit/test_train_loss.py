"""The loss against PyTorch's own, and the head at a few positions against the whole head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmx.models import loss as loss_module
from llmx.models.loss import IGNORE, head_at, micro_batch_loss, summed_cross_entropy
from tests.small_models import KINDS, small_model


def reference(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and gradient in float64, from the logits as they are."""
    exact = logits.detach().double().requires_grad_()
    total = F.cross_entropy(exact, targets, reduction="sum")
    (total * 0.25).backward()
    return total.detach(), exact.grad


@pytest.mark.parametrize("elements", [10**9, 150, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_and_gradient_are_pytorchs(
    dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All rows at once, two at a time (the last chunk shorter), one at a time.
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", {"cpu": elements, "cuda": elements})
    draw = torch.Generator().manual_seed(1)
    logits = (torch.randn(17, 61, generator=draw) * 8).to(dtype).requires_grad_()
    targets = torch.randint(0, 61, (17,), generator=draw)
    wanted, gradient = reference(logits, targets)
    total = summed_cross_entropy(logits, targets)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    (total * 0.25).backward()
    assert logits.grad.dtype == dtype
    # In fp32 inside, where p - 1 cancels; then rounded once to the inputs' dtype.
    torch.testing.assert_close(
        logits.grad.double(), gradient, rtol=torch.finfo(dtype).eps + 5e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_of_the_vocabulary_takes_no_probability_and_no_gradient(
    dtype: torch.dtype,
) -> None:
    draw = torch.Generator().manual_seed(4)
    logits = torch.randn(5, 32, generator=draw).to(dtype).requires_grad_()
    targets = torch.tensor([0, 28, 3, 11, 28])
    cut = logits.detach()[:, :29].clone().requires_grad_()
    wanted = summed_cross_entropy(cut, targets)
    wanted.backward()
    found = summed_cross_entropy(logits, targets, vocab_size=29)
    found.backward()
    assert found.item() == wanted.item()
    assert torch.equal(logits.grad[:, :29], cut.grad)
    assert not logits.grad[:, 29:].any()


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True)
    total = summed_cross_entropy(logits, torch.tensor([1]))
    total.backward()
    assert total.item() == 6e4
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_head_at_gives_the_logits_of_these_positions(kind: str) -> None:
    model = small_model(kind)
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([2, 10, 7])
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        with head_at(model, rows, columns):
            part = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
    assert part.shape == (1, 3, model.config.vocab_size)
    torch.testing.assert_close(part[0], whole[rows, columns], rtol=1e-5, atol=1e-6)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batch_loss_and_gradient_are_those_of_the_full_logits(kind: str) -> None:
    model = small_model(kind)
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (2, 9), generator=draw)
    labels = torch.full((2, 9), IGNORE)
    labels[0, 3:6], labels[1, 0] = ids[0, 4:7], ids[1, 1]
    wanted = F.cross_entropy(
        model(input_ids=ids).logits.flatten(0, 1),
        labels.flatten(),
        reduction="sum",
        ignore_index=IGNORE,
    )
    wanted.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = micro_batch_loss(model, {"input_ids": ids}, labels)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_targets_has_zero_loss_and_gradient() -> None:
    model = small_model("llama")
    ids = torch.zeros((1, 8), dtype=torch.long)
    loss = micro_batch_loss(model, {"input_ids": ids}, torch.full((1, 8), IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    # Every parameter took part: a missing gradient would leave ZeRO's reduction waiting.
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


def test_a_model_without_a_head_is_refused() -> None:
    body = small_model("llama").model
    with (
        pytest.raises(TypeError, match="no output embedding"),
        head_at(body, torch.zeros(1), torch.zeros(1)),
    ):
        pass


def linear_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    columns: int,
    factor: float,
) -> tuple[float, list[torch.Tensor]]:
    """Sum and gradients in float64."""
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    offset = None if bias is None else bias.detach().double().requires_grad_()
    logits = F.linear(exact[0], exact[1], offset)[:, :columns]
    total = F.cross_entropy(logits, targets, reduction="sum")
    (total * factor).backward()
    return total.item(), [x.grad for x in (*exact, *([] if offset is None else [offset]))]


@pytest.mark.parametrize("rows", [100, 5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_head_and_loss_together(
    dtype: torch.dtype, rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows at once, or in chunks; a factor that only a scaled fp16 gradient survives."""
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(17, 32, generator=draw).to(dtype).requires_grad_()
    weight = (torch.randn(64, 32, generator=draw) / 6).to(dtype).requires_grad_()
    bias = torch.randn(64, generator=draw).to(dtype).requires_grad_() if with_bias else None
    targets = torch.randint(0, 61, (17,), generator=draw)
    monkeypatch.setattr(loss_module, "FUSED_LOSS_CHUNK_BYTES", rows * 64 * dtype.itemsize)
    factor = 2.0**10 / 3
    wanted, gradients = linear_reference(hidden, weight, bias, targets, columns=61, factor=factor)
    # What is known beforehand of the factor is a little off, as with other precisions of it.
    total = loss_module.fused_linear_cross_entropy(
        hidden, weight, targets, bias=bias, vocab_size=61, scale=factor * 1.0000001
    )
    assert total.item() == pytest.approx(wanted, rel=4 * torch.finfo(dtype).eps)
    (total * factor).backward()
    inputs = [hidden, weight, *([] if bias is None else [bias])]
    for given, exact in zip(inputs, gradients, strict=True):
        assert given.grad.dtype == dtype
        error = (given.grad.double() - exact).norm() / exact.norm()
        assert error < 2 * torch.finfo(dtype).eps + 1e-6
    assert not weight.grad[61:].any()


def test_without_gradients_none_are_computed() -> None:
    weight = torch.randn(8, 4, requires_grad=True)
    with torch.no_grad():
        found = loss_module.fused_linear_cross_entropy(
            torch.randn(3, 4), weight, torch.tensor([1, 2, 3])
        )
    assert not found.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_loss_of_a_model_is_its_loss(kind: str) -> None:
    model = small_model(kind)
    ids = torch.arange(2, 14).view(2, 6)
    labels = ids.roll(-1, dims=1)
    labels[0, :3] = IGNORE
    inputs = {"input_ids": ids, "position_ids": torch.arange(6)[None].expand(2, 6)}
    assert loss_module.fused_loss_problem(model, inputs, labels) is None
    found = []
    for fused in (False, True):
        model.zero_grad(set_to_none=True)
        loss = micro_batch_loss(model, inputs, labels, vocab_size=20, fused=fused, scale=0.3)
        (loss * 0.25).backward()
        found.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
    (loss, expected), (fused_loss, got) = found
    assert fused_loss == pytest.approx(loss, rel=1e-6)
    for one, other in zip(expected, got, strict=True):
        # Whole tensors: the rounding of one element depends on the threads.
        assert (other - one).norm() <= 1e-5 * one.norm() + 1e-7


def test_a_batch_without_targets_runs_and_moves_nothing() -> None:
    model = small_model("llama")
    ids = torch.arange(6)[None]
    inputs = {"input_ids": ids, "position_ids": ids}
    labels = torch.full_like(ids, IGNORE)
    loss = micro_batch_loss(model, inputs, labels, fused=True)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}, "changes the logits"),
        ("cohere", {"logit_scale": 0.5}, "changes the logits"),
        ("granite", {"logits_scaling": 2.0}, "changes the logits"),
    ],
)
def test_what_happens_after_the_head_is_seen(
    kind: str, config: dict[str, object], problem: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **config}))
    ids = torch.arange(6)[None]
    inputs = {"input_ids": ids, "position_ids": ids}
    found = loss_module.fused_loss_problem(model, inputs, ids)
    assert found is not None
    assert problem in found


def test_a_head_that_is_no_linear_layer_is_seen() -> None:
    model = small_model("llama")

    class Head(torch.nn.Linear):
        pass

    model.lm_head = Head(model.config.hidden_size, model.config.vocab_size, bias=False)
    ids = torch.arange(6)[None]
    found = loss_module.fused_loss_problem(model, {"input_ids": ids, "position_ids": ids}, ids)
    assert found == "its output embedding is a Head"


def test_a_lack_of_memory_says_nothing_about_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    ids = torch.arange(6)[None]

    def forward(**inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    monkeypatch.setattr(model, "forward", forward)
    model.train()
    with pytest.raises(torch.OutOfMemoryError):
        loss_module.fused_loss_problem(model, {"input_ids": ids, "position_ids": ids}, ids)
    assert model.training


TERMS = [
    loss_module.TokenLoss(),
    loss_module.TokenLoss(dft=True),
    loss_module.TokenLoss(z_loss=1e-2),
    loss_module.TokenLoss(dft=True, z_loss=1e-2),
]


def by_the_formulas(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, terms: Any
) -> torch.Tensor:
    """DFT: equation 9 of Wu et al. 2025; z-loss: section 5 of PaLM, with its log^2 Z."""
    log_p = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    losses = -(log_p.exp().detach() * log_p) if terms.dft else -log_p
    losses = losses + terms.z_loss * logits.exp().sum(-1).log().square()
    return (losses * weights).sum()


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_terms_of_the_loss_are_those_that_were_published(
    terms: Any, weighted: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, in chunks of five targets, beside columns of padding."""
    monkeypatch.setattr(loss_module, "FUSED_LOSS_CHUNK_BYTES", 5 * 64 * 4)
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 3 * 64)
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(17, 32, generator=draw).requires_grad_()
    weight = (torch.randn(64, 32, generator=draw) / 3).requires_grad_()
    targets = torch.randint(0, 61, (17,), generator=draw)
    weights = torch.rand(17, generator=draw) * 2 if weighted else torch.ones(17)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = by_the_formulas(F.linear(exact[0], exact[1])[:, :61], targets, weights.double(), terms)
    (wanted * 0.7).backward()
    given = weights if weighted else None
    if fused:
        found = loss_module.fused_linear_cross_entropy(
            hidden, weight, targets, vocab_size=61, scale=0.7, weights=given, token_loss=terms
        )
    else:
        values, normalisers = loss_module._TargetLogProbabilities.apply(
            F.linear(hidden, weight), targets, 61
        )
        found = loss_module.weighted_loss(values, normalisers, weights=given, token_loss=terms)
    (found * 0.7).backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("terms", TERMS[1:])
def test_the_loss_with_terms_is_one_for_every_way_to_compute_it(terms: Any) -> None:
    """Head and loss together or not, the whole batch or a row at a time; also without targets."""
    model = small_model("llama")
    ids = torch.arange(2, 14).view(2, 6)
    labels = ids.roll(-1, dims=1)
    labels[0, :3] = IGNORE
    labels[1] = IGNORE
    labels[1, 2] = 5
    weights = torch.tensor([0.5, 2.0, 1.0, 0.25])
    positions = torch.arange(6)[None]
    found = []
    for fused in (False, True):
        for parts in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
            model.zero_grad(set_to_none=True)
            total, at = 0.0, 0
            for part in parts:
                count = int((labels[part] != IGNORE).sum())
                loss = micro_batch_loss(
                    model,
                    {"input_ids": ids[part], "position_ids": positions.expand(len(ids[part]), 6)},
                    labels[part],
                    fused=fused,
                    weights=weights[at : at + count],
                    token_loss=terms,
                )
                (loss / 3.75).backward()
                total, at = total + loss.item(), at + count
            found.append((total, [p.grad.clone() for p in model.parameters()]))
        model.zero_grad(set_to_none=True)
        nothing = micro_batch_loss(
            model,
            {"input_ids": ids[:1], "position_ids": positions},
            torch.full((1, 6), IGNORE),
            fused=fused,
            weights=weights[:0],
            token_loss=terms,
        )
        nothing.backward()
        assert nothing.item() == 0.0
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    first = found[0]
    for other in found[1:]:
        assert other[0] == pytest.approx(first[0], rel=1e-5)
        for one, two in zip(first[1], other[1], strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
