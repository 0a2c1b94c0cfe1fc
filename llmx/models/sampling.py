"""Chooses the next token: greedy, or drawn with a temperature, top-k and top-p.

A draw is a pure function of (seed of the sample, position, logits): a counter-based generator
(Philox) gives one uniform number for each (seed, position), and the token is looked up in the
cumulative distribution. No generator has a state, so a sample is the same whatever is drawn
beside it, on whichever rank. Shown by ``python -m pytest tests/unit/test_models_generate.py``.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmx.config.fields import Range, plain
from llmx.errors import ConfigError

if TYPE_CHECKING:  # the command checks its words before it imports torch
    import numpy as np
    import torch

RANGES = {
    "max_new_tokens": Range(1, 2**24),
    "temperature": Range(0.01, 100),
    "top_p": Range(above=0, maximum=1),
    "top_k": Range(0, 10**6),
}
WHOLE = 2.0**48
"""Probabilities are added as integers of this unit: sums of integers do not depend on the order in
which a device adds, and ``torch.use_deterministic_algorithms`` has nothing against them."""

BLOCK = 256
"""Tokens whose probabilities are added before the one that is drawn is looked for among them."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of generation. Greedy by default.

    Order, as in Transformers: logits are divided by ``temperature``, then ``top_k`` and then
    ``top_p`` remove tokens; the rest is drawn by its probabilities.
    """

    max_new_tokens: int = 64
    """Tokens of a completion at most, the stop token included."""
    temperature: float = 0.0
    """0: greedy (the token of the largest logit). 1: the model's own distribution."""
    top_k: int = 0
    """Draw from the ``top_k`` most probable tokens (and those as probable as the last of them);
    0: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of most probable tokens whose probabilities sum to ``top_p``;
    1: from all."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion (``llmx.models.generate.stop_ids``)."""

    def __post_init__(self) -> None:
        for name, limits in RANGES.items():
            value = getattr(self, name)
            if name == "temperature" and value == 0:
                continue
            if not (math.isfinite(value) and limits.holds(value)):
                also = "0 (greedy), or " if name == "temperature" else ""
                usual = {"max_new_tokens": 64, "temperature": 0.7, "top_p": 0.9, "top_k": 50}[name]
                raise ConfigError(
                    f"{name}={plain(value) if math.isfinite(value) else value} must be {also}"
                    f"a number {limits}. Set, for example, {name}={usual}."
                )
        if self.greedy and (self.top_k or self.top_p < 1):
            name = f"top_k={self.top_k}" if self.top_k else f"top_p={plain(self.top_p)}"
            raise ConfigError(
                f"{name} has no effect with temperature=0 (greedy). Set temperature=1, or leave "
                f"{name} out."
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, and nothing is drawn."""
        return self.temperature == 0

    @property
    def is_model(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1 and not self.top_k and self.top_p == 1


def sample_seed(seed: int, *, step: int, prompt: int, sample: int) -> int:
    """A 63-bit seed of one sample of a run: the ``sample``-th of prompt ``prompt`` in ``step``."""
    text = f"{seed}:step:{step}:prompt:{prompt}:sample:{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a later turn of a sample that has ``seed``; the first turn is number 0."""
    digest = hashlib.blake2b(f"{seed}:turn:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 if turn else seed


@functools.lru_cache(maxsize=4096)
def _key(seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:tokens".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big")


def uniforms(seed: int, *, first: int, count: int) -> np.ndarray:
    """fp64 [count], each in [0, 1): of the positions from ``first`` on, each a pure function of
    (seed, position)."""
    import numpy as np

    # A counter gives four numbers; that of a position is the first one.
    raw = np.random.Philox(key=_key(seed), counter=first).random_raw(4 * count)[::4]
    bits: np.ndarray = raw >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The logits of the distribution that is drawn from: fp32 [n, V], -inf for what is removed."""
    logits = logits / sampling.temperature
    lowest = -math.inf
    if sampling.top_k:
        threshold = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, lowest)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, stable=True)  # the least probable first
        mass = _whole(ordered).cumsum(dim=-1)
        removed = mass.double() <= (1 - sampling.top_p) * mass[:, -1:].double()
        removed[:, -1] = False
        logits = logits.masked_fill(removed.scatter(1, order, removed), lowest)
    return logits


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token a row: int64 [n], of ``logits`` [n, V] and ``uniform`` [n] (fp64, in [0, 1)).

    The inverse of the cumulative distribution, in the order of the vocabulary: a logit that
    differs in its last bits moves a boundary by as little.
    """
    from torch.nn.functional import pad

    mass = _whole(logits)
    # First among blocks of the vocabulary, then in the block: one pass over all of it.
    blocks = pad(mass, (0, -mass.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    by_block = blocks.sum(dim=-1).cumsum(dim=-1)
    target_mass = (uniform[:, None] * by_block[:, -1:].double()).floor().long()
    block = (by_block <= target_mass).sum(dim=-1, keepdim=True).clamp(max=by_block.shape[-1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    before = by_block.gather(1, block) - inside.sum(dim=-1, keepdim=True)
    place = (before + inside.cumsum(dim=-1) <= target_mass).sum(dim=-1)
    # Logits that are no numbers have no mass; their log-probabilities say so.
    tokens: torch.Tensor = (block.squeeze(1) * BLOCK + place).clamp(max=logits.shape[-1] - 1)
    return tokens


def _whole(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities as integers, int64 of the same shape, in units of ``1 / WHOLE``."""
    return logits.softmax(dim=-1).nan_to_num_().mul_(WHOLE).round_().long()
