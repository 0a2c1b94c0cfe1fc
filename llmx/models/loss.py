"""One loss: the mean over the step's target tokens, whatever the split.

DeepSpeed averages gradients over ranks and accumulation steps, so the *summed* loss of a micro
batch is multiplied by ``world x accumulation / target tokens of the step``. The logits are
computed at target positions only, by the model's own forward.
Shown by ``python -m pytest tests/unit/test_train_loss.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from llmx.models.parameters import output_embedding
from llmx.plan.memory import FUSED_LOSS_CHUNK_BYTES

IGNORE = -100
"""A label that is no target (the convention of ``llmx.data.collate``)."""

CHUNK_ELEMENTS = {"cpu": 1024 * 1024, "cuda": 32 * 1024 * 1024}
"""Logits turned into fp32 at a time: 4 MiB, which stay in a CPU's cache (a third faster than
128 MiB there), or 128 MiB, which keep a GPU busy."""


@dataclass(frozen=True)
class TokenLoss:
    """Terms of the loss of a target token beside its ``-log p``. Each is a sum over target tokens,
    so the one-loss rule holds for it."""

    dft: bool = False
    """``-p log p``, with p taken as a constant (Wu et al. 2025, "On the Generalization of SFT",
    equation 9): tokens that the model finds unlikely pull less."""
    z_loss: float = 0.0
    """Times ``(log Z)^2``, Z the sum of exp(logits) (PaLM, section 5): logits stay small."""

    @property
    def plain(self) -> bool:
        """Whether the loss is cross entropy alone."""
        return not (self.dft or self.z_loss)

    def summed(
        self, values: torch.Tensor, normalisers: torch.Tensor, *, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """The sum over target tokens, of what ``target_log_probabilities`` gives."""
        losses = -values
        if self.dft:
            losses = losses * values.detach().exp()
        if self.z_loss:
            losses = losses + self.z_loss * normalisers.square()
        if weights is not None:
            losses = losses * to_device(weights, losses.device)
        return losses.sum()


CROSS_ENTROPY = TokenLoss()


class _TargetLogProbabilities(torch.autograd.Function):
    """``log softmax(logits)[target]`` of every row in fp32, and the log of what it is normalised
    by, without an fp32 copy of all logits.

    Chunk by chunk in both directions: only the logits themselves and one gradient of the same
    dtype are ever whole, where ``F.cross_entropy(logits.float())`` keeps two fp32 copies more.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_normaliser = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        log_probabilities = torch.empty_like(log_normaliser)
        for rows in _chunks(logits):
            part = logits[rows, :vocab_size].float()
            log_normaliser[rows] = part.logsumexp(dim=-1)
            picked = part.gather(1, targets[rows, None]).squeeze(1)
            log_probabilities[rows] = picked - log_normaliser[rows]
        ctx.save_for_backward(logits, targets, log_normaliser)
        ctx.vocab_size = vocab_size
        ctx.set_materialize_grads(False)
        return log_probabilities, log_normaliser.clone()

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        of_target, of_normaliser = gradients
        if of_target is None and of_normaliser is None:
            return None, None, None
        logits, targets, log_normaliser = ctx.saved_tensors
        if of_target is None:
            of_target = torch.zeros_like(log_normaliser)
        result = torch.empty_like(logits)
        result[:, ctx.vocab_size :] = 0
        for rows in _chunks(logits):
            # A copy, since ``float`` gives the logits themselves in fp32, and others may need them.
            part = logits[rows, : ctx.vocab_size].float() - log_normaliser[rows, None]
            part.exp_().neg_()
            # In fp16 the factor (loss scale included) is applied before the rounding, so a
            # small 1 / target_tokens does not push the gradient below the smallest half.
            if of_normaliser is None:
                part.scatter_add_(1, targets[rows, None], part.new_ones((len(part), 1)))
                part.mul_(of_target[rows, None])
            else:
                part.mul_((of_target - of_normaliser)[rows, None])
                part.scatter_add_(1, targets[rows, None], of_target[rows, None])
            result[rows, : ctx.vocab_size] = part
        return result, None, None


OfLogits = Callable[..., tuple[torch.Tensor, ...]]
"""A loss over whole distributions: of fp32 logits [rows, V], the targets int64 [rows], and those
rows of whatever else it needs, it gives tensors [rows, ...]. It changes none of them in place, and
each row of what it gives follows from that row alone. A micro batch without targets has 0 rows."""


class _ValuesOfLogits(torch.autograd.Function):
    """An ``OfLogits`` chunk by chunk in both directions, as ``_TargetLogProbabilities``: a chunk is
    computed again in the backward pass, so of all intermediate values one chunk is there."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        function: OfLogits,
        *beside: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        chunks = [
            function(
                logits[rows, :vocab_size].float(), *(values[rows] for values in (targets, *beside))
            )
            for rows in _chunks(logits)
        ]
        ctx.save_for_backward(logits, targets, *beside)
        ctx.vocab_size, ctx.function = vocab_size, function
        ctx.set_materialize_grads(False)
        outputs = tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.mark_non_differentiable(
            *(output for output in outputs if not output.is_floating_point())
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, targets, *beside = ctx.saved_tensors
        result = torch.empty_like(logits)
        result[:, ctx.vocab_size :] = 0
        for rows in _chunks(logits):
            part = logits[rows, : ctx.vocab_size].float().detach().requires_grad_()
            with torch.enable_grad():
                outputs = ctx.function(part, *(values[rows] for values in (targets, *beside)))
            differentiable = [
                (values, gradient[rows])
                for values, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and values.requires_grad
            ]
            if not differentiable:
                result[rows] = 0
                continue
            values, upstream = zip(*differentiable, strict=True)
            (result[rows, : ctx.vocab_size],) = torch.autograd.grad(values, part, upstream)
        return (result, None, None, None, *(None for _ in beside))


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """The output head and the summed cross entropy in one: no logits outlive their chunk.

    A chunk's gradients are computed while its logits are there, in the forward pass, so nothing
    is computed twice. They are those of ``scale`` times the loss; the backward pass multiplies
    them by what the loss is really multiplied by, divided by ``scale``. In fp16 ``scale`` has the
    loss scale in it, so that small gradients are not rounded to zero on the way. The head's
    gradient is summed over chunks in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        vocab_size: int,
        scale: float,
        weights: torch.Tensor | None,
        token_loss: TokenLoss,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = max(1, FUSED_LOSS_CHUNK_BYTES // (weight.shape[0] * hidden.element_size()))
        is_single_chunk = len(targets) <= rows
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = bias_gradient = None
        for start in range(0, max(1, len(targets)), rows):
            part, chunk_targets = hidden[start : start + rows], targets[start : start + rows]
            logits = torch.nn.functional.linear(part, weight, bias)
            total += _cross_entropy_(
                logits,
                chunk_targets,
                vocab_size=vocab_size,
                scale=scale,
                weights=None if weights is None else weights[start : start + rows],
                token_loss=token_loss,
            )
            # From here on the chunk holds the gradient of its logits.
            if hidden_gradient is not None:
                torch.mm(logits, weight, out=hidden_gradient[start : start + rows])
            if needs_weight:
                product = logits.t() @ part
                if is_single_chunk:
                    weight_gradient = product
                elif weight_gradient is None:
                    weight_gradient = product.float()
                else:
                    weight_gradient += product
            if needs_bias:
                summed = logits.sum(dim=0, dtype=torch.float32)
                bias_gradient = summed if bias_gradient is None else bias_gradient + summed
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.scale, ctx.dtypes = scale, (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        ratio = gradients[0] / ctx.scale

        def scaled(values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
            return None if values is None else values.mul_(ratio).to(dtype)

        dtype, bias_dtype = ctx.dtypes
        return (
            scaled(hidden, dtype),
            scaled(weight, dtype),
            scaled(bias, bias_dtype),
            *(None,) * 5,
        )


def _cross_entropy_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    scale: float,
    weights: torch.Tensor | None,
    token_loss: TokenLoss,
) -> torch.Tensor:
    """The summed loss in fp32; ``logits`` are replaced by ``scale`` times their gradient."""
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    logits[:, vocab_size:] = 0
    for rows in _chunks(logits):
        part = logits[rows, :vocab_size].float()
        log_normaliser = part.logsumexp(dim=-1, keepdim=True)
        losses = log_normaliser - part.gather(1, targets[rows, None])
        part.sub_(log_normaliser).exp_()
        factor = torch.ones_like(losses)
        if weights is None and token_loss.plain:
            total += losses.sum()
        else:
            weight = factor if weights is None else weights[rows, None]
            factor = weight * torch.exp(-losses) if token_loss.dft else weight
            pull = 2 * token_loss.z_loss * weight * log_normaliser
            total += (factor * losses + token_loss.z_loss * weight * log_normaliser.square()).sum()
            part.mul_(factor + pull)
        part.scatter_add_(1, targets[rows, None], -factor)
        logits[rows, :vocab_size] = part.mul_(scale)
    return total


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    vocab_size: int | None = None,
    scale: float = 1.0,
    weights: torch.Tensor | None = None,
    token_loss: TokenLoss = CROSS_ENTROPY,
) -> torch.Tensor:
    """Scalar fp32 sum over ``hidden`` [n, H], ``weight`` [V, H] and ``targets`` [n].

    Args:
        weights: fp32 [n], of the targets; None: 1.
        vocab_size: see ``target_log_probabilities``.
        scale: what the loss will be multiplied by, as far as it is known: gradients are kept in
            the dtype of ``hidden`` at that scale.
    """
    if not torch.is_grad_enabled():  # else gradients would be computed for nobody
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    apply: Callable[..., torch.Tensor] = _FusedLinearCrossEntropy.apply
    return apply(
        hidden, weight, bias, targets, vocab_size or weight.shape[0], scale, weights, token_loss
    )


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """The rows that are turned into fp32 together; an empty slice where there are none."""
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS["cuda"])
    size = max(1, elements // logits.shape[-1])
    for start in range(0, max(1, len(logits)), size):
        yield slice(start, start + size)


def target_log_probabilities(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each of the ``targets`` [n] under its ``logits`` [n, V], and the log of
    the sum that it is normalised by: fp32 [n] each, with a graph.

    Args:
        vocab_size: columns that count. The rest is padding of the head: it takes no
            probability and gets no gradient, so that the model is the same without it.
    """
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _TargetLogProbabilities.apply
    return apply(logits, targets, vocab_size or logits.shape[-1])


def values_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    function: OfLogits,
    *beside: torch.Tensor,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The values of ``function`` over ``logits`` [n, V], [n, ...] each, with a graph.

    Args:
        beside: [n, ...], in the order of the targets; without a gradient.
        vocab_size: see ``target_log_probabilities``.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _ValuesOfLogits.apply
    return apply(logits, targets, vocab_size or logits.shape[-1], function, *beside)


class TargetPositions(NamedTuple):
    """The positions of the targets of a micro batch, [n] each, on the device of its inputs."""

    rows: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor
    """int64: the target at each position."""


def target_positions(labels: torch.Tensor, device: torch.device) -> TargetPositions:
    """The positions of the targets in ``labels`` (see ``micro_batch_loss``), in their order."""
    rows, columns = (labels != IGNORE).nonzero(as_tuple=True)
    return TargetPositions(
        *(to_device(values, device) for values in (rows, columns, labels[rows, columns]))
    )


def target_logits(
    engine: nn.Module, inputs: dict[str, Any], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, V] and [n]: the logits of the model at the targets of a micro batch only, and the
    targets. Runs it forward. Arguments as of ``micro_batch_loss``."""
    at = target_positions(labels, inputs["input_ids"].device)
    model = getattr(engine, "module", engine)
    with head_at(model, at.rows, at.columns):
        logits: torch.Tensor = engine(**inputs, **without_cache(model)).logits[0]
    return logits, at.tokens


@contextmanager
def head_at(model: nn.Module, rows: torch.Tensor, columns: torch.Tensor) -> Iterator[None]:
    """Inside, the output embedding sees only the hidden states at (``rows``, ``columns``).

    A pre-hook turns [B, T, H] into [1, n, H] before the head, so the model's own forward gives
    logits [1, n, V], with its scaling and soft-caps, and gathers the head under ZeRO-3 as ever.
    """
    head = output_embedding(model)
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


@contextmanager
def head_answers(
    head: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Inside, the output embedding computes ``forward`` of its hidden states in place of logits.

    It stays the module that it is, so ZeRO-3 gathers its weight as ever.
    """
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _given(answer: torch.Tensor, _hidden: torch.Tensor) -> torch.Tensor:
    return answer


def output_head_problem(model: nn.Module) -> str | None:
    """Why the head of this model cannot be computed with the loss; None where it can: a plain
    linear layer."""
    head = output_embedding(model)
    if type(head) is not nn.Linear or "forward" in vars(head):
        return f"its output embedding is a {type(head).__name__}"
    return None


@torch.no_grad()
def fused_loss_problem(
    model: nn.Module, inputs: dict[str, Any], labels: torch.Tensor
) -> str | None:
    """Why head and loss cannot be computed together for this model; None where they can.

    Its head is a plain linear layer (``output_head_problem``). The model must return what the head
    answers: some scale logits, or cap them. ``inputs`` and ``labels`` as in training.
    """
    head: Any = output_embedding(model)
    model.eval()
    try:
        for value in (1024.0, -3.25):  # exact in every dtype; a cap or a factor changes one
            answer = torch.full((1, 1, 1), value)
            with head_answers(head, functools.partial(_given, answer)):
                got = model(**inputs, **without_cache(model)).logits
            if got.numel() != 1 or float(got) != value:
                return "it changes the logits after its output embedding"
        plain = float(micro_batch_loss(model, inputs, labels))
        fused = float(micro_batch_loss(model, inputs, labels, fused=True))
        if not abs(plain - fused) <= 0.02 * abs(plain):
            return f"its loss would be {fused:.4f} instead of {plain:.4f}"
    except (RuntimeError, TypeError, IndexError, AttributeError, ValueError) as error:
        return f"its forward pass does not go with it: {str(error).splitlines()[0]}"
    return None


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that nothing waits for: from page-locked memory, where there is a GPU."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def takes(model: type[nn.Module], name: str, *, by_name: bool = False) -> bool:
    """Whether the forward of this class has an argument of this name, or (unless ``by_name``)
    takes any."""
    parameters = _parameters(model.forward)
    if name in parameters or by_name:
        return name in parameters
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


@functools.cache
def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(forward).parameters


def without_cache(model: nn.Module) -> dict[str, bool]:
    """``use_cache=False`` for a forward that has it."""
    return {"use_cache": False} if takes(type(model), "use_cache") else {}


def micro_batch_loss(
    engine: nn.Module,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    *,
    vocab_size: int | None = None,
    fused: bool = False,
    scale: float = 1.0,
    weights: torch.Tensor | None = None,
    token_loss: TokenLoss = CROSS_ENTROPY,
) -> torch.Tensor:
    """Summed cross entropy of one micro batch, fp32 scalar with a graph.

    Args:
        engine: the DeepSpeed engine (or a bare model) that wraps a causal LM.
        inputs: keyword arguments of the forward (see ``attention.model_inputs``).
        labels: int64 [B, T], best on the CPU; ``labels[b, t]`` is predicted at position t, or
            ``IGNORE``.
        vocab_size: see ``target_log_probabilities``.
        fused: compute head and loss together (``fused_linear_cross_entropy``), at this ``scale``.
            Only for a model without a ``fused_loss_problem``.
        weights: fp32 [n], of the targets in the order of ``labels``; None: 1.
        token_loss: terms beside the cross entropy.

    A micro batch without targets runs forward and backward, too, its head with no rows, so that the
    collectives of ZeRO match on every rank; its loss is 0.
    """
    if not fused:
        logits, targets = target_logits(engine, inputs, labels)
        values = target_log_probabilities(logits, targets, vocab_size=vocab_size)
        return token_loss.summed(*values, weights=weights)
    at = target_positions(labels, inputs["input_ids"].device)
    on_device = None if weights is None else to_device(weights, at.rows.device)
    model = getattr(engine, "module", engine)
    head: Any = output_embedding(model)

    def summed_loss(hidden: torch.Tensor) -> torch.Tensor:
        return fused_linear_cross_entropy(
            hidden[at.rows, at.columns],
            head.weight,
            at.tokens,
            bias=head.bias,
            vocab_size=vocab_size,
            scale=scale,
            weights=on_device,
            token_loss=token_loss,
        ).view(1, 1, 1)

    with head_answers(head, summed_loss):
        loss: torch.Tensor = engine(**inputs, **without_cache(model)).logits.view(())
    return loss
