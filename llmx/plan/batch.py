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
    plan = _solve(batch, seq_len=seq_len, world=world)
    _check_size(plan.global_batch, batch, plan.accumulation, world)
    return plan


def wanted_global_batch(batch: BatchConfig, *, seq_len: int, weights: Sequence[float]) -> int:
    """Samples of a step that is shared out by speed.

    Where the config gives no number, each micro step has ``micro_batch`` samples of the fastest
    ranks, and of others in proportion to their ``weights``. ConfigError as ``solve_batch``.
    """
    fastest = max(weights)
    full = sum(max(1, round(batch.micro_batch * weight / fastest)) for weight in weights)
    target, accumulation = _target_global_batch(batch, seq_len), batch.accumulation or 1
    if target is None:
        target = full * accumulation
    elif batch.tokens_per_step is not None and target >= full:
        target = full * max(1, round(target / full))
    _check_size(target, batch, accumulation, len(weights))
    return target


def _check_size(size: int, batch: BatchConfig, accumulation: int, world: int) -> None:
    if size > MAX_GLOBAL_BATCH:
        raise ConfigError(
            f"batch: a step would take {size} samples (accumulation="
            f"{accumulation}, micro_batch={batch.micro_batch}, {world} ranks); at most "
            f"{MAX_GLOBAL_BATCH} are possible. Set a smaller batch."
        )


def _solve(batch: BatchConfig, *, seq_len: int, world: int) -> BatchPlan:
    full = [batch.micro_batch] * world
    target = _target_global_batch(batch, seq_len)
    if target is None:
        accumulation = batch.accumulation or 1
        return BatchPlan(sum(full) * accumulation, accumulation, tuple(full), seq_len)
    if batch.tokens_per_step is not None and target >= sum(full):
        # Asked for in tokens, the batch is a round number: take the nearest.
        accumulation = max(1, round(target / sum(full)))
        return BatchPlan(sum(full) * accumulation, accumulation, tuple(full), seq_len)

    fixed = batch.accumulation
    for accumulation in _divisors(target) if fixed is None else [fixed]:
        # A micro step takes one sample of each rank at least, micro_batch at most.
        if (
            target % accumulation
            or not world <= target // accumulation <= world * batch.micro_batch
        ):
            continue
        shares = tuple(full)
        if sum(full) * accumulation != target:
            shares = apportion(target // accumulation, [1.0] * world)
        if min(shares) >= 1 and max(shares) <= batch.micro_batch:
            return BatchPlan(target, accumulation, shares, seq_len)
    if batch.accumulation is not None:
        raise ConfigError(
            f"batch: global_batch={target}, micro_batch={batch.micro_batch} on {world} ranks and "
            f"accumulation={batch.accumulation} disagree: at most {sum(full)} x "
            f"{batch.accumulation} = {sum(full) * batch.accumulation}, and whole micro steps. "
            "Leave accumulation out; it is computed."
        )
    rule = f"equal micro steps of {world} ranks with 1 to {batch.micro_batch} samples each"
    raise no_solution(target, ranks=world, most=sum(full), rule=rule)


def _divisors(number: int) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def _target_global_batch(batch: BatchConfig, seq_len: int) -> int | None:
    if batch.global_batch is not None:
        return batch.global_batch
    if batch.tokens_per_step is not None:
        return max(1, round(batch.tokens_per_step / seq_len))
    return None


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole shares of ``total`` in proportion to ``weights`` (largest remainder).

    ``sum(apportion(n, w)) == n``; equal weights differ by at most one.
    """
    scale = total / sum(weights)
    exact = [weight * scale for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


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
