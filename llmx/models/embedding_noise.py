"""NEFTune: uniform noise on the embeddings while training (Jain et al. 2023, algorithm 1).

The noise of a sequence follows from its own seed and its length alone, so it is the same for every
split over ranks and micro batches, packed or padded, and after a resume (on the same kind of
device: CPU and CUDA draw other numbers). Tried by
``python -m pytest tests/unit/test_models_embedding_noise.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SEEDS = "draw_seeds"
"""Of a batch: int64 [sequences], a seed for each of its sequences (``Task.draws``)."""


def embedding_noise(
    like: torch.Tensor, segment_ids: torch.Tensor, seeds: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    """Noise in the shape of the embeddings ``like`` [..., d]: uniform in +- alpha / sqrt(L d) for
    each sequence of L tokens, 0 in the padding.

    Args:
        segment_ids: int [B, T], on the CPU: 1, 2, ... for the sequences of a line, 0 in the
            padding.
        seeds: int64 [sequences], in the order in which they lie.
    """
    width = like.shape[-1]
    noise = torch.zeros(segment_ids.numel(), width, dtype=like.dtype, device=like.device)
    generator = torch.Generator(like.device)
    remaining = iter(seeds.tolist())
    at = 0
    for line in segment_ids:
        _, lengths = torch.unique_consecutive(line[line > 0], return_counts=True)
        start = at
        for length in lengths.tolist():
            size = alpha / math.sqrt(length * width)
            generator.manual_seed(next(remaining))
            noise[start : start + length].uniform_(-size, size, generator=generator)
            start += length
        at += len(line)
    return noise.view(like.shape)


@contextmanager
def noisy_embeddings(
    network: nn.Module, segment_ids: torch.Tensor, seeds: torch.Tensor, *, alpha: float
) -> Iterator[None]:
    """Inside, the token embeddings of ``network`` come out with noise."""
    embedding = getattr(network, "get_input_embeddings", lambda: None)()
    if not isinstance(embedding, nn.Module):
        raise TypeError(f"{type(network).__name__} has no token embeddings")

    def add(_module: nn.Module, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        return output + embedding_noise(output, segment_ids, seeds, alpha=alpha)

    handle = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
