"""The one sample order: which samples make up step k is a pure function of (seed, k).

Nothing else enters: not the number of ranks, not the micro batches, not the accumulation,
not a restart. Ranks take consecutive slices of a step's samples. So a resumed run needs one
integer, and a run on other hardware sees the same data.

    >>> samples_of_step(0, global_batch=4, num_samples=10, seed=0)
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from llmx.errors import DataError


@lru_cache(maxsize=2)  # A step touches one epoch, or two at a border.
def permutation(epoch: int, *, num_samples: int, seed: int) -> np.ndarray:
    """The order of all samples in one epoch, int64 [num_samples]; read-only.

    Philox is counter-based: its stream is fixed by its key for every platform and every
    NumPy version. The permutation is the sort order of its 64-bit draws, ties (of which there
    are none in practice) in index order, so that no shuffle algorithm enters either.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(num_samples)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def samples_of_step(
    step: int, *, global_batch: int, num_samples: int, seed: int, stop: int | None = None
) -> np.ndarray:
    """Indices of the samples of optimizer step ``step`` (from 0), int64 [global_batch].

    Sample ``i = step * global_batch + j`` of the run is position ``i % num_samples`` of epoch
    ``i // num_samples``: every epoch sees every sample once, and a step may lie across two
    epochs (or more, when there are fewer samples than the batch takes). ``stop``: samples of the
    whole run, of which the last step takes what is left (``data.last_batch=short``); then the
    result may be shorter.
    """
    if step < 0 or global_batch < 1:
        raise ValueError(f"step {step} must be >= 0 and global_batch {global_batch} >= 1")
    if num_samples < 1:
        raise DataError("The data has no samples: nothing to train on. Check data.path.")
    first = step * global_batch
    parts: list[np.ndarray] = []
    missing = global_batch if stop is None else max(0, min(global_batch, stop - first))
    while missing:
        epoch, position = divmod(first, num_samples)
        order = permutation(epoch, num_samples=num_samples, seed=seed)
        part = order[position : position + missing]
        parts.append(part)
        first += len(part)
        missing -= len(part)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def draw_seed(seed: int, step: int, position: int) -> int:
    """A 62-bit seed of the sample at ``position`` of the global batch of a step: the same for every
    split over ranks and micro batches. Neighbours share nothing."""
    words = f"{seed}:draw:{step}:{position}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 2
