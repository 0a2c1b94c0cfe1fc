"""Which checkpoints stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def to_prune(
    steps: Iterable[int],
    *,
    last: int,
    best: int = 0,
    every: int = 0,
    metrics: Mapping[int, float | None] | None = None,
    mode: str = "min",
) -> list[int]:
    """Steps that none of the three rules keeps, oldest first.

    Args:
        steps: the usable checkpoints; others are not counted and not removed.
        last: the newest so many stay, at least 1.
        best: so many with the best value of ``metrics`` stay.
        every: multiples of it stay; 0 is none.
        metrics: step -> value, where there is one.
        mode: ``min`` or ``max`` is best.
    """
    known = sorted(set(steps))
    kept = set(known[-max(last, 1) :])
    kept |= set(best_steps(known, metrics or {}, mode=mode)[:best])
    if every > 0:
        kept |= {step for step in known if step % every == 0}
    return [step for step in known if step not in kept]


def best_steps(
    steps: Iterable[int], metrics: Mapping[int, float | None], *, mode: str = "min"
) -> list[int]:
    """Those with a finite value, best first; of equals the older first.

    A checkpoint has the newest value that was measured before it, so of those between two
    evaluations the first one is what was evaluated.
    """
    values = {}
    for step in steps:
        value = metrics.get(step)
        if value is not None and math.isfinite(value):
            values[step] = -value if mode == "max" else value
    return sorted(values, key=lambda step: (values[step], step))
