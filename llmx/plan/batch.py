"""The one batch algebra: ``global batch = sum of the ranks' micro batches x accumulation``.

Pure. Everything that has to do with sizes of a step is computed here and nowhere else:
the plan, ``ds_config.json``, the loop and the sample order all read its ``BatchPlan``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmx.config.schema import BatchConfig
from llmx.errors import ConfigError
from llmx.plan.types import BatchPlan

MAX_GLOBAL_BATCH = 2**24


def solve_batch(batch: BatchConfig, *, seq_len: int, world: int) -> BatchPlan:
    """Solve for micro batches and accumulation, shared out evenly over ``world`` ranks.

    ``batch.micro_batch`` is what a rank takes at most: a global batch that does not divide evenly
    is shared out as evenly as whole samples allow, which changes nothing in the gradient (one
    loss).
    Raises ConfigError when no exact solution exists, with the nearest ones, and for a step of
    more than ``MAX_GLOBAL_BATCH`` samples.
    """
    full = batch.micro_batch * world
    target = _global_batch(batch, seq_len=seq_len, full=full, world=world)
    for accumulation in [batch.accumulation] if batch.accumulation else _divisors(target):
        # A micro step takes one sample of each rank at least, micro_batch at most.
        if target % accumulation == 0 and world <= target // accumulation <= full:
            shares = evenly(target // accumulation, world)
            return BatchPlan(target, accumulation, shares, seq_len)
    if batch.accumulation is not None:
        raise ConfigError(
            f"batch: global_batch={target}, micro_batch={batch.micro_batch} on {world} ranks and "
            f"accumulation={batch.accumulation} disagree: at most {full} x "
            f"{batch.accumulation} = {full * batch.accumulation}, and whole micro steps. "
            "Leave accumulation out; it is computed."
        )
    rule = f"equal micro steps of {world} ranks with 1 to {batch.micro_batch} samples each"
    raise no_solution(target, ranks=world, most=full, rule=rule)


def _divisors(number: int) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def wanted_global_batch(batch: BatchConfig, *, seq_len: int, weights: Sequence[float]) -> int:
    """Samples of a step that is shared out by speed.

    Where the config gives no number, each micro step has ``micro_batch`` samples of the fastest
    ranks, and of others in proportion to their ``weights``. ConfigError as ``solve_batch``.
    """
    fastest = max(weights)
    full = sum(max(1, round(batch.micro_batch * weight / fastest)) for weight in weights)
    return _global_batch(batch, seq_len=seq_len, full=full, world=len(weights))


def _global_batch(batch: BatchConfig, *, seq_len: int, full: int, world: int) -> int:
    """Samples of a step. ``full``: of a full micro step of all ranks."""
    if batch.global_batch is not None:
        size = batch.global_batch
    elif batch.tokens_per_step is None:
        size = full * (batch.accumulation or 1)
    else:
        size = max(1, round(batch.tokens_per_step / seq_len))
        if size >= full:  # asked for in tokens, the batch is a round number: take the nearest
            size = full * round(size / full)
    if size > MAX_GLOBAL_BATCH:
        raise ConfigError(
            f"batch: a step would take {size} samples (accumulation={-(-size // full)}, "
            f"micro_batch={batch.micro_batch}, {world} ranks); at most {MAX_GLOBAL_BATCH} are "
            "possible. Set a smaller batch."
        )
    return size


def evenly(total: int, count: int) -> tuple[int, ...]:
    """``total`` in ``count`` whole parts that differ by at most one, the largest first."""
    size, num_larger = divmod(total, count)
    return (size + 1,) * num_larger + (size,) * (count - num_larger)


def no_solution(total: int, *, ranks: int, most: int, rule: str) -> ConfigError:
    """The error for a step that cannot be cut by a rule, with the nearest that can. ``most``:
    samples of a micro step of all ranks."""
    if total < ranks:
        return ConfigError(
            f"batch.global_batch={total} is less than the {ranks} ranks: every rank takes at "
            f"least one sample. Use batch.global_batch={ranks} or more, or fewer ranks."
        )
    below = total // most * most
    sizes = " or ".join(str(size) for size in (below, below + most) if size > 0)
    return ConfigError(
        f"batch.global_batch={total} cannot be cut into {rule}. Use batch.global_batch={sizes}."
    )
