"""A hash of all weights that does not depend on how they are partitioned.

Every element is mixed with its position and the results are added up modulo 2^64, in two lanes:
sums of parts compose, so each rank adds what it holds and one small all-reduce does the rest. It
tells two runs apart by a single bit of a single weight; it is not secure against
collisions made on purpose. Tried by ``python -m pytest tests/unit/test_train_state_hash.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements mixed at a time: what fits a processor's cache, or fills a GPU."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_POSITION = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def lanes(values: torch.Tensor, start: int) -> torch.Tensor:
    """Two int64 sums of elements ``start, start + 1, ...`` of a parameter.

    ``lanes(x, 0) == lanes(x[:k], 0) + lanes(x[k:], k)`` for every ``k`` (modulo 2^64).

    Args:
        values: 1-D, any dtype; its bits count, not its values (-0.0 is not 0.0).
    """
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    bits = values.detach().view(_BITS[values.element_size()])
    chunk = CHUNK[values.device.type]
    positions = torch.arange(min(chunk, len(bits)), device=values.device).mul_(_POSITION)
    for first in range(0, len(bits), chunk):
        mixed = bits[first : first + chunk].to(torch.int64, copy=True)
        # splitmix64 of bits and position; ">>" of int64 keeps the sign, hence the masks.
        mixed.add_(positions[: len(mixed)])
        mixed.add_(_signed((start + first + 1) * _POSITION % 2**64))
        mixed.bitwise_xor_((mixed >> 30).bitwise_and_((1 << 34) - 1)).mul_(_FIRST)
        mixed.bitwise_xor_((mixed >> 27).bitwise_and_((1 << 37) - 1)).mul_(_SECOND)
        mixed.bitwise_xor_((mixed >> 31).bitwise_and_((1 << 33) - 1))
        total[0] += mixed.sum()
        # The second lane is no linear function of the first.
        total[1] += mixed.bitwise_xor_((mixed >> 32).bitwise_and_((1 << 32) - 1)).mul_(_FIRST).sum()
    return total


def combine(names: Iterable[str], sums: torch.Tensor) -> str:
    """The hash of a model: 32 hexadecimal digits.

    Args:
        names: of all parameters.
        sums: ``[len(names), 2]`` int64, over all elements.
    """
    digest = hashlib.blake2b(digest_size=16)
    rows = dict(zip(names, sums.tolist(), strict=True))
    for name in sorted(rows):
        digest.update(f"{name}\0{rows[name][0]}\0{rows[name][1]}\n".encode())
    return digest.hexdigest()


def hash_parts(
    parts: Iterable[tuple[str, int, torch.Tensor]], *, names: list[str], device: torch.device
) -> str:
    """The hash over all ranks, each with elements that no other rank has. Collective.

    Args:
        parts: name of the parameter, first element, values (1-D).
        names: of all parameters.
        device: where the process group reduces.
    """
    row = {name: number for number, name in enumerate(names)}
    sums = torch.zeros(len(names), 2, dtype=torch.int64, device=device)
    for name, start, values in parts:
        sums[row[name]] += lanes(values, start).to(device)
    torch.distributed.all_reduce(sums)
    return combine(names, sums)
