"""On which hosts the next attempt runs: all of them, or with launch.elastic those that answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from llmx.errors import LlmxError
from llmx.launch.console import duration
from llmx.launch.elastic import without
from llmx.launch.outcome import Verdict
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh import render_ssh_config
from llmx.launch.waiting import Waiting
from llmx.plan import ds_config
from llmx.rundir import write_json, write_text
from llmx.text import plural

ELASTIC_GRACE_S = 20.0
"""With launch.elastic, for a lost host to show up again before the run goes on without it."""


class Hosts:
    """The hosts of a run over its attempts. ``spec`` is that of the next attempt."""

    def __init__(
        self,
        whole: LaunchSpec,
        waiting: Waiting,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.whole = whole
        """With every host."""
        self.spec = whole
        self.waiting, self.say, self.warn = waiting, say, warn

    def choose(self) -> Verdict | None:
        """Wait for hosts that do not answer; a verdict where the run cannot go on."""
        launch = self.whole.exp.launch
        # The last attempt may have done without some; ssh must know them all.
        hosts = self.whole.plan.hosts
        write_text(self.whole.run_dir.ssh_config, render_ssh_config(hosts))
        limit_s = launch.host_wait_s
        if launch.elastic:
            # One that the last attempt did without already was waited for.
            limit_s = 0.0 if self.spec is not self.whole else min(ELASTIC_GRACE_S, limit_s)
        missing = self.waiting.hosts(self.whole, limit_s=limit_s)
        if missing and launch.elastic and not self.waiting.asked():
            smaller = self._smaller(missing)
            if smaller is not None:
                self._use(smaller)
                return None
            missing = self.waiting.hosts(self.whole, limit_s=launch.host_wait_s)
        if missing:
            return _gone(self.whole, missing)
        if self.spec is not self.whole:
            self.say("continuing with every host again")
            self._use(self.whole)
        return None

    def _smaller(self, missing: Sequence[str]) -> LaunchSpec | None:
        """The run without some hosts, where that is the same run."""
        try:
            exp, plan = without(self.whole.exp, self.whole.plan, missing)
        except LlmxError as error:
            self.warn(f"it cannot continue without {', '.join(missing)}: {error}")
            return None
        batch = plan.batch
        ranks = plural(plan.world_size, "rank")
        self.say(
            f"continuing without {', '.join(missing)} (launch.elastic): {ranks}, the same global "
            f"batch of {batch.global_batch} in {batch.accumulation} micro steps"
        )
        interfaces = tuple(host.interface for host in plan.hosts)
        return dataclasses.replace(self.whole, exp=exp, plan=plan, interfaces=interfaces)

    def _use(self, spec: LaunchSpec) -> None:
        """The ranks of the next attempts read the plan of ``spec``."""
        self.spec = spec
        write_json(spec.run_dir.plan, spec.plan.to_dict())
        write_json(spec.run_dir.ds_config, ds_config(spec.exp, spec.plan))


def _gone(spec: LaunchSpec, missing: Sequence[str]) -> Verdict:
    return Verdict(
        "host_lost",
        f"{', '.join(missing)} did not come back within {duration(spec.exp.launch.host_wait_s)} "
        "(launch.host_wait_s)",
        f"when it is back: python -m llmx resume {spec.run_dir.root}; without it: the same with "
        "launch.elastic=true",
        host=missing[0],
        lost_hosts=tuple(missing),
    )
