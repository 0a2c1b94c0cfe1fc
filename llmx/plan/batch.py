"""The one batch algebra: ``global batch = sum of the ranks' micro batches x accumulation``.

Pure. Everything that has to do with sizes of a step is computed here and nowhere else:
the plan, ``ds_config.json``, the loop and the sample order all read its ``BatchPlan``.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmx.config.schema import BatchConfig
from llmx.errors import ConfigError
from llmx.plan.types import BatchPlan


def solve_batch(batch: BatchConfig, *, seq_len: int, speeds: Sequence[float]) -> BatchPlan:
    """Solve for micro batches and accumulation.

    ``speeds``: one positive number a rank, relative speed of its device (all equal: even).
    Raises ConfigError when no exact solution exists; it lists the nearest ones.
    """
    world = len(speeds)
    if batch.balance == "speed":
        fastest = max(speeds)
        ideal = [max(1, round(batch.micro_batch * speed / fastest)) for speed in speeds]
    else:
        ideal = [batch.micro_batch] * world
    per_micro_step = sum(ideal)

    target = _target_global_batch(batch, seq_len)
    if target is None:
        accumulation = batch.accumulation or 1
        return BatchPlan(per_micro_step * accumulation, accumulation, tuple(ideal), seq_len)

    if batch.accumulation is not None and batch.accumulation * per_micro_step != target:
        raise ConfigError(
            f"batch: global_batch={target}, micro_batch={batch.micro_batch} on {world} ranks and "
            f"accumulation={batch.accumulation} disagree: {per_micro_step} x {batch.accumulation} "
            f"= {per_micro_step * batch.accumulation}. Leave one of them out; it is computed."
        )
    if target % per_micro_step == 0:
        return BatchPlan(target, target // per_micro_step, tuple(ideal), seq_len)
    if batch.tokens_per_step is not None:
        # Asked for in tokens, the batch is a round number nobody chose: take the nearest.
        accumulation = max(1, round(target / per_micro_step))
        return BatchPlan(per_micro_step * accumulation, accumulation, tuple(ideal), seq_len)
    if batch.balance == "speed":
        found = _divide_by_speed(target, batch.micro_batch, speeds)
        if found is not None:
            return BatchPlan(target, found[0], found[1], seq_len)
    raise ConfigError(_no_solution(target, batch.micro_batch, world, per_micro_step))


def _target_global_batch(batch: BatchConfig, seq_len: int) -> int | None:
    if batch.global_batch is not None:
        return batch.global_batch
    if batch.tokens_per_step is not None:
        return max(1, round(batch.tokens_per_step / seq_len))
    return None


def _divide_by_speed(
    target: int, micro_batch: int, speeds: Sequence[float]
) -> tuple[int, tuple[int, ...]] | None:
    """The fewest micro steps that divide ``target`` and keep every rank within its limit."""
    for accumulation in range(1, target + 1):
        if target % accumulation:
            continue
        shares = apportion(target // accumulation, speeds)
        if min(shares) < 1:
            return None
        if max(shares) <= micro_batch:
            return accumulation, shares
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


def _no_solution(target: int, micro_batch: int, world: int, per_micro_step: int) -> str:
    below = target // per_micro_step * per_micro_step
    near = [value for value in (below, below + per_micro_step) if value > 0]
    smaller = [m for m in range(micro_batch, 0, -1) if target % (m * world) == 0]
    fix = f"Use batch.global_batch={' or '.join(str(value) for value in near)}"
    if smaller:
        fix += f", or batch.micro_batch={smaller[0]}"
    return (
        f"batch.global_batch={target} is not a multiple of {per_micro_step} "
        f"(micro batches of {world} ranks, {micro_batch} each at most). {fix}."
    )
