"""Finds the right method of attention for a model by trying it on a tiny one of its class.

A few short rows go through the tiny model alone, as its authors wrote it, and then as this
program would feed them: packed into one line, or padded. Loss and gradient must be the same. So
state that runs along the sequence, masks that a model makes otherwise, positions that it shifts or
ignores are found whatever they are called, in a fraction of a second, before anything is loaded.

What is tried is the network that the task's head needs: a causal language model, which must not
see ahead; a masked one; or the hidden states of the backbone, for every other head. The latter may
see ahead, which is found out, and then the masks let them (``AttentionMethod.causal``).

Shown by ``python -m pytest tests/unit/test_train_isolation.py``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from llmx.data import collate
from llmx.data.store.samples import Sample
from llmx.models.attention import AttentionMethod, methods, model_inputs
from llmx.models.loss import micro_batch_loss, target_positions
from llmx.models.model import BACKBONE, CAUSAL_LM, LANGUAGE_MODELS, auto_class
from llmx.models.tiny import tiny_config
from llmx.models.varlen import Unsupported, name_of_attention, register

LARGEST_TINY = 20_000_000
"""Parameters of a model that could not be made tinier, and is not tried."""

PACKED = ((7, 9, 5), (11,))
"""Rows of the lines of a batch with packed lines; the second line has padding."""
SINGLE = ((6,), (10,))
"""A batch of single rows, for which no mask is made."""
SEQ_LEN = 24
VOCAB = 90

TOLERANCES = {torch.float32: (2e-5, 5e-4)}
"""Relative, of loss and gradient. Over the 178 architectures of transformers 5.23 the gradient of
what is right differs by at most 2e-6, of what leaks by at least 1e-2."""
LOW_PRECISION = (3e-2, 2e-1)
INDEPENDENT = 5e-3
"""Relative: what other rows may change of a row's loss in 16 bits (nothing, but for rounding)."""


@dataclass(frozen=True)
class TrialResult:
    """The methods of attention that are right for a model."""

    packed: AttentionMethod | None = None
    padded: AttentionMethod | None = None
    why_not_packed: str = ""
    """Why rows cannot be packed; empty if they are isolated or were not tried."""
    leaks: bool = False
    """``why_not_packed`` is another loss of a row, not an exception."""
    why_not_trained: str = ""
    """Why no method is right: this model cannot be trained here."""
    unknown: str = ""
    """Why nothing could be tried."""


class _Problem(NamedTuple):
    """Why a method is not right."""

    text: str
    leaks: bool = False
    """The loss of a row is another one; else nothing was computed."""


@dataclass
class _Trial:
    """A tiny model, and what it computes for single rows."""

    model: Any
    alone: Computed
    """Loss and gradient of each row by itself."""
    device: torch.device
    dtype: torch.dtype
    remote: bool
    head: str
    causal: bool

    def build(self, implementation: str) -> None:
        """Raise what building the model with this attention raises: switching is laxer."""
        with torch.device("meta"):
            auto_class(self.head, self.model.config).from_config(
                copy.deepcopy(self.model.config),
                attn_implementation=implementation,
                trust_remote_code=self.remote,
            )


def find_methods(
    config: Any,
    *,
    implementations: Sequence[str] = ("sdpa", "eager"),
    layouts: Sequence[str] = ("packed", "padded"),
    seq_len: int = 1 << 30,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    real_heads: bool = False,
    head: str = CAUSAL_LM,
) -> TrialResult:
    """The first method of each layout that is right; leaves ``config`` as it is.

    Args:
        config: the Hugging Face config of the model.
        implementations: of attention, the preferred one first.
        layouts: what to look for. After a packed method is found, padding is not looked into.
        seq_len: windows as long as this play no part.
        dtype: of the trial; 16 bits where a kernel has no other.
        real_heads: with heads as wide as the model's own, which a kernel may not take.
        head: of the network (``llmx.models.model``).
    """
    register()
    device = device or torch.device("cpu")
    with _quiet(), torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        shape = {"seq_len": seq_len, "real_heads": real_heads}
        trial = _make_trial(
            config, shape, remote=trust_remote_code, device=device, dtype=dtype, head=head
        )
        if isinstance(trial, TrialResult):
            return trial
        result = TrialResult()
        for layout in layouts:
            candidates = [
                method
                for name in implementations
                for method in methods(name, layout, causal=trial.causal)
            ]
            problems = []
            for method in candidates:
                if (problem := _problem(trial, method)) is None:
                    if layout == "packed":
                        return replace(result, packed=method)
                    return replace(result, padded=method)
                problems.append(problem)
            # A difference of results says more than an exception of some fallback.
            leaks = [problem for problem in problems if problem.leaks]
            worst = [*leaks, *problems, _Problem("nothing was tried")][0]
            if layout == "packed":
                result = replace(result, why_not_packed=worst.text, leaks=worst.leaks)
            else:
                result = replace(result, why_not_trained=worst.text)
        return result


def _make_trial(
    config: Any,
    shape: dict[str, Any],
    *,
    remote: bool,
    device: torch.device,
    dtype: torch.dtype,
    head: str,
) -> _Trial | TrialResult:
    failed = ""
    # Other heads are put on the hidden states, token by token.
    head = head if head in LANGUAGE_MODELS else BACKBONE
    for per_kind in (1, 2):
        try:
            tiny = tiny_config(config, per_kind=per_kind, **shape)
            model = tiny_model(tiny, remote=remote, head=head)
            model.to(device=device, dtype=dtype)
            ahead = sees_ahead(model, device)
            alone = computed_alone(model, device, shifted=head == CAUSAL_LM)
        except Exception as error:
            failed = failed or f"{type(error).__name__}: {line_of(error)}"
            continue
        if ahead and head == CAUSAL_LM:
            name = type(model).__name__
            text = (
                f"a token's prediction in {name} changes with the tokens after it: it is no causal "
                "language model"
            )
            if getattr(config, "is_decoder", True) is False:
                text += " as long as model.config.is_decoder=false. Set it to true"
            return TrialResult(why_not_packed=text, why_not_trained=text)
        if not np.isfinite(alone.loss):
            failed = "its loss is not finite"
            continue
        return _Trial(model, alone, device, dtype, remote, head, not ahead)
    return TrialResult(unknown=f"no small model of its class could be tried ({failed})")


def tiny_model(config: Any, *, remote: bool, head: str = CAUSAL_LM) -> Any:
    """A model in training mode, with weights so large that every input has an effect."""
    network = auto_class(head, config)
    for part in (config, config.get_text_config()):
        part.use_cache = False
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = False  # llmx.models.experts takes them itself
    with torch.device("meta"):
        size = sum(
            p.numel() for p in network.from_config(config, trust_remote_code=remote).parameters()
        )
    if size > LARGEST_TINY:
        raise ValueError(f"the smallest has {size:,} parameters")
    torch.manual_seed(0)
    model = network.from_config(config, trust_remote_code=remote)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_()
            elif isinstance(module, nn.Linear):
                module.weight.normal_(std=module.weight.shape[-1] ** -0.5)
    return model.float().train()


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """All rates of dropout are 0 inside."""
    changed = turn_dropout_off(model)
    try:
        yield
    finally:
        for module, name, rate in changed:
            setattr(module, name, rate)


def turn_dropout_off(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Set all rates of dropout to 0, in modules and in what they remember of the config; returns
    (module, attribute, rate) of those that were not."""
    changed = []
    for module in model.modules():
        rates = ["p"] if isinstance(module, nn.Dropout) else []
        rates += [name for name in vars(module) if "drop" in name]
        for name in rates:
            rate = getattr(module, name)
            if isinstance(rate, float) and rate:
                changed.append((module, name, rate))
                setattr(module, name, 0.0)
    return changed


def _sample(lengths: Sequence[int], *, seed: int) -> Sample:
    draw = np.random.Generator(np.random.Philox(key=seed))
    total = sum(lengths)
    return Sample(
        tokens=draw.integers(5, VOCAB, size=total).astype(np.uint32),
        targets=np.ones(total, dtype=bool),
        sequence_starts=np.cumsum([0, *lengths[:-1]]).astype(np.int64),
    )


def _batches() -> list[list[Sample]]:
    return [
        [_sample(line, seed=10 * number + place) for place, line in enumerate(lines)]
        for number, lines in enumerate((PACKED, SINGLE))
    ]


def _tokens(row: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(row.astype(np.int64))[None].to(device)


@torch.no_grad()
def sees_ahead(model: Any, device: torch.device) -> bool:
    """Whether what is computed at an earlier token changes with the last one."""
    row = _tokens(_sample((12,), seed=99).tokens, device)
    other = row.clone()
    other[0, -1] = 5 if int(row[0, -1]) != 5 else 6
    with without_dropout(model):
        first, second = (_scores(model(input_ids=ids))[0, :-1] for ids in (row, other))
    return bool((first - second).abs().max() > 1e-3 * first.abs().max())


def _scores(outputs: Any) -> torch.Tensor:
    """Logits by token, or hidden states, which are taken for the logits of as many classes."""
    scores: torch.Tensor = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    return scores.float()


@dataclass(frozen=True)
class Computed:
    """What a tiny model computes."""

    loss: float
    gradient: torch.Tensor

    def difference(self, right: Computed, tolerances: tuple[float, float]) -> str | None:
        """How far it is from what is ``right``, in words; None within the tolerances of loss and
        gradient."""
        if self.gradient.shape != right.gradient.shape:
            return "other parameters are without a gradient"
        loss = abs(self.loss - right.loss) / abs(right.loss)
        gradient = float((self.gradient - right.gradient).norm() / right.gradient.norm())
        # Written so that NaN is a difference, too.
        is_equal = loss <= tolerances[0] and gradient <= tolerances[1]
        return None if is_equal else f"loss {loss:.2%}, gradient {gradient:.2%} off"


def computed_alone(model: Any, device: torch.device, *, shifted: bool = True) -> Computed:
    """Summed loss and gradient of each row by itself, as the model's authors compute it: of all
    tokens but the first. ``shifted``: predicted at the token before, else at the token itself."""
    model.zero_grad()
    total = 0.0
    with without_dropout(model):
        for sample in (sample for batch in _batches() for sample in batch):
            for tokens, _ in sample.sequences():
                ids = _tokens(tokens, device)
                scores = _scores(model(input_ids=ids))[0]
                loss = _cross_entropy(scores[:-1] if shifted else scores[1:], ids[0, 1:])
                loss.backward()
                total += float(loss.detach())
    return Computed(total, gradient_of(model))


def _cross_entropy(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, tokens % scores.shape[-1], reduction="sum")


def gradient_of(model: nn.Module) -> torch.Tensor:
    parts = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(parts)


def _problem(trial: _Trial, method: AttentionMethod) -> _Problem | None:
    """The problem of a method; None if it computes the loss and gradient of single rows."""
    model = trial.model
    name, attention = type(model).__name__, name_of_attention(method.implementation)
    try:
        trial.build(method.implementation)
        model.set_attn_implementation(method.implementation)
        # A rank without samples; with dropout, as trained.
        _batch_loss(trial, (), method).backward()
        with without_dropout(model):
            model.zero_grad()
            total = 0.0
            for batch in _batches():
                loss = _batch_loss(trial, batch, method)
                loss.backward()
                total += float(loss.detach())
            if trial.dtype != torch.float32 and method.layout == "packed":
                changed = _changed_by_others(trial, method)
                if not changed <= INDEPENDENT:  # NaN is a problem, too
                    return _Problem(
                        f"the loss of a row of {name} changes by {changed:.1%} with the rows "
                        "beside it",
                        leaks=True,
                    )
    except Unsupported as error:
        return _Problem(f"{attention}: {error}")
    except Exception as error:
        text = f"{name} fails with {attention}: {type(error).__name__}: {line_of(error)}"
        return _Problem(text)
    tolerances = TOLERANCES.get(trial.dtype, LOW_PRECISION)
    difference = Computed(total, gradient_of(model)).difference(trial.alone, tolerances)
    if difference is None:
        return None
    with_what = "packed with others" if method.layout == "packed" else "padded"
    return _Problem(
        f"the loss of a row of {name} changes when it is {with_what} ({difference})", leaks=True
    )


def _batch_loss(trial: _Trial, samples: Sequence[Sample], method: AttentionMethod) -> torch.Tensor:
    batch = collate(list(samples), seq_len=SEQ_LEN, pad_id=0, layout=method.layout, pad_to=8)
    if trial.head != CAUSAL_LM:  # each token's own id, at its place
        batch["labels"] = batch["labels"].roll(1, dims=1)
    inputs, labels = model_inputs(batch, method=method, dtype=trial.dtype, device=trial.device)
    if trial.head in LANGUAGE_MODELS:
        return micro_batch_loss(trial.model, inputs, labels)
    at = target_positions(labels, trial.device)
    scores = _scores(trial.model(**inputs))[at.rows, at.columns]
    return _cross_entropy(scores, at.tokens)


@torch.no_grad()
def _changed_by_others(trial: _Trial, method: AttentionMethod) -> float:
    """The relative change of the second row's loss with other rows beside it."""
    losses = []
    for other in (0, 1):
        sample = _sample(PACKED[0], seed=0)
        first, second = PACKED[0][0], PACKED[0][0] + PACKED[0][1]
        if other:
            sample.tokens[:first] = sample.tokens[:first][::-1]
            sample.tokens[second:] = 7
        sample.targets[:first] = sample.targets[second:] = False
        losses.append(float(_batch_loss(trial, (sample,), method)))
    return abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-9)


def line_of(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:159] + "…"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of a model that nobody asked for, and use one core."""
    import logging
    import warnings

    logger = logging.getLogger("transformers")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)  # what is tiny is slower on several
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
