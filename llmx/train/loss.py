"""One loss: the mean over the step's target tokens, whatever the split.

DeepSpeed averages gradients over ranks and accumulation steps, so the *summed* loss of a micro
batch is multiplied by ``world x accumulation / target tokens of the step``. The logits are
computed at target positions only, by the model's own forward.
Shown by ``python -m pytest tests/unit/test_train_loss.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

IGNORE = -100
"""A label that is no target (the convention of ``llmx.data.collate``)."""

CHUNK_ELEMENTS = {"cpu": 1024 * 1024, "cuda": 32 * 1024 * 1024}
"""Logits turned into fp32 at a time: 4 MiB, which stay in a CPU's cache (a third faster than
128 MiB there), or 128 MiB, which keep a GPU busy."""


class _SummedCrossEntropy(torch.autograd.Function):
    """Sum of ``-log softmax(logits)[target]`` in fp32, without an fp32 copy of all logits.

    Chunk by chunk in both directions: only the logits themselves and one gradient of the same
    dtype are ever whole, where ``F.cross_entropy(logits.float())`` keeps two fp32 copies more.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        rows = _rows_at_a_time(logits)
        log_normaliser = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for start in range(0, len(targets), rows):
            part = logits[start : start + rows, :vocab_size].float()
            log_normaliser[start : start + rows] = part.logsumexp(dim=-1)
            picked = part.gather(1, targets[start : start + rows, None]).squeeze(1)
            total += (log_normaliser[start : start + rows] - picked).sum()
        ctx.save_for_backward(logits, targets, log_normaliser)
        ctx.vocab_size = vocab_size
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, log_normaliser = ctx.saved_tensors
        scale = gradients[0]
        rows = _rows_at_a_time(logits)
        result = torch.empty_like(logits)
        result[:, ctx.vocab_size :] = 0
        for start in range(0, len(targets), rows):
            part = logits[start : start + rows, : ctx.vocab_size].float()
            part.sub_(log_normaliser[start : start + rows, None]).exp_()
            minus_one = part.new_full((len(part), 1), -1.0)
            part.scatter_add_(1, targets[start : start + rows, None], minus_one)
            # In fp16 the factor (loss scale included) is applied before the rounding, so a
            # small 1 / target_tokens does not push the gradient below the smallest half.
            result[start : start + rows, : ctx.vocab_size] = part.mul_(scale)
        return result, None, None


def _rows_at_a_time(logits: torch.Tensor) -> int:
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS["cuda"])
    return max(1, elements // logits.shape[-1])


def summed_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int | None = None
) -> torch.Tensor:
    """Scalar fp32 sum over ``logits`` [n, V] and ``targets`` [n].

    Args:
        vocab_size: columns that count. The rest is padding of the head: it takes no
            probability and gets no gradient, so that the model is the same without it.
    """
    return _SummedCrossEntropy.apply(logits, targets, vocab_size or logits.shape[-1])


@contextmanager
def head_at(model: nn.Module, rows: torch.Tensor, columns: torch.Tensor) -> Iterator[None]:
    """Inside, the output embedding sees only the hidden states at (``rows``, ``columns``).

    A pre-hook turns [B, T, H] into [1, n, H] before the head, so the model's own forward gives
    logits [1, n, V], with its scaling and soft-caps, and gathers the head under ZeRO-3 as ever.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"{type(model).__name__} has no output embedding: not a causal LM")

    def pick(_module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (arguments[0][rows, columns].unsqueeze(0), *arguments[1:])

    # ZeRO-3 registers its own pre-hooks on the head; ours only changes the input.
    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def micro_batch_loss(
    engine: nn.Module,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    *,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Summed cross entropy of one micro batch, fp32 scalar with a graph.

    Args:
        engine: the DeepSpeed engine (or a bare model) that wraps a causal LM.
        inputs: keyword arguments of the forward (see ``attention.model_inputs``).
        labels: int64 [B, T], best on the CPU; ``labels[b, t]`` is predicted at position t, or
            ``IGNORE``.
        vocab_size: see ``summed_cross_entropy``.

    A micro batch without targets still runs forward and backward, so that the collectives of
    ZeRO match on every rank; its loss is 0.
    """
    device = inputs["input_ids"].device
    rows, columns = (labels != IGNORE).nonzero(as_tuple=True)
    targets = labels[rows, columns].to(device, non_blocking=True)
    empty = rows.numel() == 0
    if empty:
        rows, columns = labels.new_zeros(1), labels.new_zeros(1)
    rows, columns = rows.to(device, non_blocking=True), columns.to(device, non_blocking=True)
    model = getattr(engine, "module", engine)
    with head_at(model, rows, columns):
        logits = engine(**inputs, use_cache=False).logits[0]
    if empty:
        return logits.float().sum() * 0.0
    return summed_cross_entropy(logits, targets, vocab_size=vocab_size)
