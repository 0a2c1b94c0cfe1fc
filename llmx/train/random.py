"""Random numbers of a step as a pure function of (seed, step, rank): dropout, and nothing else.

Seeded before each step, so that no generator's state has to be saved: a resumed run draws what
the uninterrupted one would have. Shown by ``python -m pytest tests/unit/test_train_random.py``.
"""

from __future__ import annotations

import hashlib

import torch


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed of one step on one rank; neighbouring steps and ranks share nothing."""
    digest = hashlib.blake2b(f"{seed}:step:{step}:rank:{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the generators that a model draws from: the CPU's and this rank's GPU's.

    ``torch.manual_seed`` would visit every device of the host. Python's and NumPy's own
    generators are left alone: nothing in a step draws from them.
    """
    value = step_seed(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)
