"""On which hosts the next attempt runs: all of them, or with launch.elastic those that answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from llmx.errors import LlmxError
from llmx.launch.console import duration
from llmx.launch.elastic import without_hosts
from llmx.launch.outcome import Outcome
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh import render_ssh_config
from llmx.launch.waiting import Backoff
from llmx.plan import ds_config
from llmx.rundir import write_json, write_text
from llmx.text import plural

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
        write_json(spec.run_dir.ds_config, ds_config(spec.exp, spec.plan))

    def _hosts_lost(self, missing: Sequence[str]) -> Outcome:
        wait_s = self.full_spec.exp.launch.host_wait_s
        return Outcome(
            "host_lost",
            f"{', '.join(missing)} did not come back within {duration(wait_s)} "
            "(launch.host_wait_s)",
            f"when it is back: python -m llmx resume {self.full_spec.run_dir.root}; without it: "
            "the same with launch.elastic=true",
            host=missing[0],
            lost_hosts=tuple(missing),
        )
