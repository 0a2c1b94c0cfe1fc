"""Greedy answers to held-out prompts, split over the ranks.

Every rank runs as many forwards as the others, so it works under ZeRO-3; with a key-value
cache; prompts of a batch padded at the left and masked, or of equal length where the attention
takes no mask. Tried by ``python -m pytest -m deepspeed tests/integration/test_train_export.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from llmx.models.attention import additive, windows_of
from llmx.models.loss import head_at, takes
from llmx.train.engine import Engine

BATCH = 32
"""Prompts answered together on one rank."""

MASKED = ("sdpa", "eager")
"""Implementations that take the mask of left padding."""


def group(lengths: list[int], *, world: int, equal: bool) -> list[list[int]]:
    """Indices of prompts by batch, of similar (``equal``: the same) length.

    At most ``BATCH`` a batch; few prompts are still spread over ``world`` ranks.
    """
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    size = max(1, min(BATCH, -(-len(order) // world)))
    batches: list[list[int]] = []
    for index in order:
        fits = bool(batches) and len(batches[-1]) < size
        if fits and equal:
            fits = lengths[batches[-1][0]] == lengths[index]
        if fits:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def generate(
    engine: Engine, prompts: list[tuple[int, ...]], *, max_new_tokens: int, stop_ids: frozenset[int]
) -> list[list[int]]:
    """The new tokens of every prompt (stop token left out), the same on every rank. Collective.

    An answer ends before a token of ``stop_ids``, or after ``max_new_tokens``.
    """
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    # A cache that forgets what left the window has no place for a mask over everything.
    equal = not _takes_mask(engine)
    batches = group([len(prompt) for prompt in prompts], world=world, equal=equal)
    mine: dict[int, list[int]] = {}
    engine.engine.eval()
    with _plain_attention(engine):
        for first in range(0, len(batches), world):
            # Where a rank has no batch left it repeats the round's first, and drops the answers.
            own = first + rank < len(batches)
            batch = batches[first + rank] if own else batches[first]
            answers = _answer(
                engine,
                [prompts[index] for index in batch],
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
            )
            if own:
                mine.update(zip(batch, answers, strict=True))
    engine.engine.train()
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, mine)
    merged: dict[int, list[int]] = {}
    for part in everyone:
        merged.update(part)
    return [merged[index] for index in range(len(prompts))]


def _takes_mask(engine: Engine) -> bool:
    """Whether prompts of different lengths may share a batch, padded at the left and masked."""
    windows = [window for _, window in windows_of(engine.config)]
    if getattr(engine.config, "layer_types", None) is None:
        windows.append(getattr(engine.config, "sliding_window", None))
    return (
        engine.attention.layout == "packed"  # else a state along the sequence would see the padding
        and (
            engine.attention.implementation in MASKED
            or engine.attention.implementation.startswith("llmx_")
        )
        and not any(windows)
    )


@contextlib.contextmanager
def _plain_attention(engine: Engine) -> Iterator[None]:
    """Inside, an attention that knows only packed rows makes room for one with a cache."""
    own = engine.attention.implementation
    if not own.startswith("llmx_"):
        yield
        return
    engine.module.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        engine.module.set_attn_implementation(own)


@torch.no_grad()
def _answer(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> list[list[int]]:
    from transformers import DynamicCache

    device, rows = engine.device, len(prompts)
    longest = max(len(prompt) for prompt in prompts)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens = torch.zeros(rows, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
    tokens = tokens.to(device)
    stops = torch.tensor(sorted(stop_ids), device=device, dtype=torch.long)
    padded = bool(padding.any())
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    kind = type(engine.module)
    with_positions = engine.attention.isolation not in ("padding_mask", "none") and takes(
        kind, "position_ids"
    )
    # Without a cache that it takes from us, the whole row goes through the model for each token.
    cached = takes(kind, "past_key_values", by_name=True)
    cache = DynamicCache(config=engine.config) if cached else None
    answers: list[list[int]] = [[] for _ in prompts]
    limit = getattr(engine.config, "max_position_embeddings", None) or longest + max_new_tokens
    every_row = torch.arange(rows, device=device)
    for length in range(longest, longest + max_new_tokens):
        new = tokens.shape[1]
        place = torch.arange(length - new, length, device=device)
        told: dict[str, Any] = {}
        if with_positions:
            told["position_ids"] = (place[None, :] - padding[:, None]).clamp(0, limit - 1)
        if padded:
            told["attention_mask"] = _mask(engine, place, length, padding)
        if cached:
            told.update(past_key_values=cache, use_cache=True)
        with head_at(engine.module, every_row, torch.full_like(every_row, new - 1)):
            output = engine.module(input_ids=tokens, **told)
        chosen = output.logits[0, :, : engine.vocab_size].float().argmax(dim=-1)
        # Beyond the model's last position there is no answer; the forwards go on for the others.
        done |= torch.isin(chosen, stops) | (length - padding > limit)
        for row, (token, ended) in enumerate(zip(chosen.tolist(), done.tolist(), strict=True)):
            if not ended:
                answers[row].append(token)
        # Everyone stops together, or ZeRO-3 would wait for a forward that never comes.
        unfinished = (~done).any().to(torch.int32)
        torch.distributed.all_reduce(unfinished, op=torch.distributed.ReduceOp.MAX)
        if not int(unfinished):
            break
        tokens = chosen[:, None] if cached else torch.cat([tokens, chosen[:, None]], dim=1)
    return answers


def _mask(engine: Engine, place: torch.Tensor, length: int, padding: torch.Tensor) -> torch.Tensor:
    """[B, 1, new, length]: causal, and blind to the padding at the left."""
    keys = torch.arange(length, device=place.device)
    causal = keys[None, None, :] <= place[None, :, None]
    # A query that is itself padding sees itself: a row of nothing would be NaN in softmax.
    real = (keys[None, None, :] >= padding[:, None, None]) | (
        keys[None, None, :] == place[None, :, None]
    )
    mask = (causal & real).unsqueeze(1)
    return (
        additive(mask, dtype=engine.dtype) if engine.attention.implementation == "eager" else mask
    )
