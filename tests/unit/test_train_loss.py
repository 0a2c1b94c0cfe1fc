"""The loss against PyTorch's own, and the head at a few positions against the whole head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llmx.train import loss as loss_module
from llmx.train.loss import IGNORE, head_at, micro_batch_loss, summed_cross_entropy
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
