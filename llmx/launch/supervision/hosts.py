"""On which hosts the next attempt runs: all of them, or with launch.elastic those that answer.

On fewer hosts it is the same run: the same global batch, the same samples in the same order.
Checkpoints do not depend on the number of ranks, so it continues from the newest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from llmx.config.schema import Experiment
from llmx.config.validate import validate
from llmx.errors import ConfigError, LlmxError
from llmx.launch.render.ssh_config import render_ssh_config
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.backoff import Backoff
from llmx.launch.supervision.outcome import Outcome
from llmx.plan import ds_config, make_plan
from llmx.plan.make import LOCAL_NAMES
from llmx.plan.types import Plan
from llmx.run.rundir import write_json, write_text
from llmx.text import clock, plural

ELASTIC_GRACE_S = 20.0
"""With launch.elastic, how long a lost host is waited for before the run continues without it."""


class HostSelection:
    """The hosts of a run over its attempts. ``spec`` is that of the next attempt."""

    def __init__(self, full_spec: LaunchSpec, backoff: Backoff) -> None:
        self.full_spec = full_spec
        """With every host."""
        self.spec = full_spec
        self.backoff, self.log = backoff, backoff.log

    def select(self) -> Outcome | None:
        """Wait for hosts that do not answer; an outcome where the run cannot continue."""
        launch = self.full_spec.exp.launch
        # The last attempt may have run without some hosts; ssh must know all of them.
        hosts = self.full_spec.plan.hosts
        write_text(self.full_spec.run_dir.ssh_config, render_ssh_config(hosts))
        limit_s = launch.host_wait_s
        if launch.elastic:
            # A host that the last attempt ran without has been waited for already.
            limit_s = 0.0 if self.spec is not self.full_spec else min(ELASTIC_GRACE_S, limit_s)
        missing = self.backoff.wait_for_hosts(self.full_spec, limit_s=limit_s)
        if missing and launch.elastic and not self.backoff.shutdown.count:
            smaller = self._without(missing)
            if smaller is not None:
                self._use(smaller)
                return None
            missing = self.backoff.wait_for_hosts(self.full_spec, limit_s=launch.host_wait_s)
        if missing:
            return self._hosts_lost(missing)
        if self.spec is not self.full_spec:
            self.log.info("continuing with every host again")
            self._use(self.full_spec)
        return None

    def _without(self, missing: Sequence[str]) -> LaunchSpec | None:
        """The run without some hosts; None where it would not be the same run."""
        try:
            exp, plan = without_hosts(self.full_spec.exp, self.full_spec.plan, missing)
        except LlmxError as error:
            self.log.warning(f"the run cannot continue without {', '.join(missing)}: {error}")
            return None
        batch = plan.batch
        ranks = plural(plan.world_size, "rank")
        self.log.info(
            f"continuing without {', '.join(missing)} (launch.elastic): {ranks}, the same global "
            f"batch of {batch.global_batch} in {batch.accumulation} micro steps"
        )
        interfaces = tuple(host.interface for host in plan.hosts)
        return dataclasses.replace(self.full_spec, exp=exp, plan=plan, interfaces=interfaces)

    def _use(self, spec: LaunchSpec) -> None:
        """Write the plan that the ranks of the next attempts read."""
        self.spec = spec
        write_json(spec.run_dir.plan, spec.plan.to_dict())
        write_json(
            spec.run_dir.ds_config,
            ds_config(spec.exp.model, spec.exp.zero, spec.exp.optim, spec.plan),
        )

    def _hosts_lost(self, missing: Sequence[str]) -> Outcome:
        wait_s = self.full_spec.exp.launch.host_wait_s
        return Outcome(
            "host_lost",
            f"{', '.join(missing)} did not come back within {clock(wait_s)} (launch.host_wait_s)",
            f"when it is back: python -m llmx resume {self.full_spec.run_dir.root}; without it: "
            "the same with launch.elastic=true",
            host=missing[0],
            lost_hosts=tuple(missing),
        )


def without_hosts(exp: Experiment, plan: Plan, lost: Collection[str]) -> tuple[Experiment, Plan]:
    """The experiment and its plan without the hosts ``lost``; ConfigError where that is impossible.

    The global batch is that of ``plan``; micro batches and accumulation are computed again.
    """
    left = [host for host in exp.hardware.hosts if host.name not in lost]
    if not left:
        raise ConfigError("launch.elastic: no host is left.")
    master = exp.hardware.master_addr
    # What only the lost hosts have is no stray key.
    gone_types = {host.device for host in exp.hardware.hosts} - {host.device for host in left}
    devices = {name: one for name, one in exp.hardware.devices.items() if name not in gone_types}
    gone = {host.address or host.name for host in exp.hardware.hosts if host.name in lost}
    smaller = dataclasses.replace(
        exp,
        hardware=dataclasses.replace(
            exp.hardware,
            hosts=left,
            devices=devices,
            master_addr=None if master in gone else master,
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
    planned = make_plan(
        smaller, local_names=LOCAL_NAMES | local, frozen=plan.frozen, logits=plan.logits
    )
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
