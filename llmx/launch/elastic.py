"""The same run on fewer hosts: the same global batch, the same samples in the same order. Pure.

``launch.elastic=true`` uses it when a host is lost; checkpoints do not depend on the number of
ranks, so the run continues from the newest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from llmx.config.schema import Experiment
from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.plan import make_plan
from llmx.plan.make import LOCAL_NAMES
from llmx.plan.types import Plan


def without_hosts(exp: Experiment, plan: Plan, lost: Collection[str]) -> tuple[Experiment, Plan]:
    """The experiment and its plan without the hosts ``lost``; ConfigError where that is impossible.

    The global batch is that of ``plan``; micro batches and accumulation are computed again.
    """
    left = [host for host in exp.hardware.hosts if host.name not in lost]
    if not left:
        raise ConfigError("launch.elastic: no host is left.")
    master = exp.hardware.master_addr
    gone = {host.address or host.name for host in exp.hardware.hosts if host.name in lost}
    smaller = dataclasses.replace(
        exp,
        hardware=dataclasses.replace(
            exp.hardware, hosts=left, master_addr=None if master in gone else master
        ),
        batch=dataclasses.replace(
            exp.batch,
            global_batch=plan.batch.global_batch,
            tokens_per_step=None,
            accumulation=None,
        ),
        # ``auto`` depends on the memory, which differs on fewer hosts; the dtype stays the same.
        # Given as "precision", so that another precision is refused by the rule below.
        zero=dataclasses.replace(
            exp.zero,
            grad_accum_dtype="fp32" if plan.grad_accum_dtype == "fp32" else "precision",
        ),
    )
    validate(smaller)
    local = {name for host in plan.hosts if host.is_local for name in (host.name, host.address)}
    planned = make_plan(smaller, local_names=LOCAL_NAMES | local)
    if planned.batch.global_batch != plan.batch.global_batch:
        raise ConfigError(
            f"launch.elastic: {planned.world_size} ranks cannot share a global batch of "
            f"{plan.batch.global_batch} (the nearest is {planned.batch.global_batch})."
        )
    if planned.precision != plan.precision:
        raise ConfigError(
            f"launch.elastic: the remaining hosts would train in {planned.precision} instead "
            f"of {plan.precision}; set precision={plan.precision} to allow it."
        )
    for memory in planned.memory:
        if not memory.fits:
            raise ConfigError(
                f"launch.elastic: {memory.device} would need {memory.total_gib:.1f} GiB of "
                f"{memory.capacity_gib:.0f} GiB on the remaining hosts."
            )
    return smaller, planned
