"""The waits before a restart (the backoff time, hosts that answer again, free disk space), and the
hosts of the next attempt.

Every wait ends at once when the user requests the shutdown.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from llmx.config.addresses import LOCAL_NAMES
from llmx.config.schema import Experiment
from llmx.config.validate import validate
from llmx.errors import ConfigError, LlmxError
from llmx.failures.diagnose import Failure
from llmx.launch.environment import tool_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh_config import render_ssh_config, ssh_argv
from llmx.launch.supervision.console import RunLog
from llmx.launch.supervision.journal import Journal
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.launch.sync import size_of
from llmx.launch.transports import transport_of
from llmx.plan import ds_config, make_plan
from llmx.plan.knowledge import Knowledge
from llmx.plan.trace import NO_TRACES, Traces
from llmx.plan.types import Plan
from llmx.run.rundir import read_mapping, write_json, write_text
from llmx.text import clock, plural

PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 15.0
REPORT_EVERY_S = 60.0
MIN_FREE_PART = 0.05
MIN_FREE_MIB = 256.0
"""Free space that a disk must have again (the smaller of both), where no checkpoint shows how much
a save needs."""


class Backoff:
    """The waits of one supervisor."""

    def __init__(self, log: RunLog, journal: Journal, shutdown: ShutdownRequest) -> None:
        self.log, self.journal, self.shutdown = log, journal, shutdown

    def sleep(self, wait_s: float) -> bool:
        """Wait; False where the shutdown was requested."""
        until = time.monotonic() + wait_s
        while not self.shutdown.count and (left_s := until - time.monotonic()) > 0:
            self._pause("restart in", left_s, at_most_s=0.5)
        self.log.console.countdown("", 0.0)
        return not self.shutdown.count

    def wait(self, problem: Callable[[], str], *, limit_s: float = math.inf, over: str = "") -> str:
        """Wait until there is no ``problem``; the one that is there after ``limit_s``, or when the
        shutdown was requested. ``over``: a message after a wait that was not in vain.

        The console shows the problem every minute, without a limit when it changes. The first line
        of it is short, for the countdown and ``status``.
        """
        is_limited, shown_text, shown_at = limit_s < math.inf, "", -math.inf
        text, until = problem(), time.monotonic() + limit_s
        while text and not self.shutdown.count and (left_s := until - time.monotonic()) > 0:
            first, *further = text.splitlines()
            self.journal.state("waiting", why=first)
            is_due = text != shown_text
            if is_limited:
                is_due = time.monotonic() - shown_at > REPORT_EVERY_S
            if is_due:
                end = f"; giving up in {clock(left_s)}" if is_limited else ""
                self.log.info("\n".join([first + end, *further]))
                shown_text, shown_at = text, time.monotonic()
            self._pause(f"{first}; giving up in" if is_limited else "", left_s)
            text = problem()
        self.log.console.countdown("", 0.0)
        self.journal.state("preparing")
        if shown_text and over and not text:
            self.log.info(over)
        return text

    def _pause(self, text: str, left_s: float, *, at_most_s: float = PROBE_EVERY_S) -> None:
        self.log.console.countdown(text, left_s)
        self.journal.heartbeat()
        self.shutdown.event.wait(min(at_most_s, left_s))


def unreachable_hosts(spec: LaunchSpec) -> list[str]:
    """The hosts that do not answer over ssh now. Empty where the transport needs no ssh."""
    if not transport_of(spec.plan.transport).has_agents:
        return []
    hosts = [host.name for host in spec.plan.hosts if not host.is_local]
    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(lambda host: _ssh(spec, host, ["true"]) is not None, hosts))
    return [host for host, answers_now in zip(hosts, answers, strict=True) if not answers_now]


def disk_problem(spec: LaunchSpec, host: str | None) -> str:
    """What keeps the disk of the run directory on a host (None: this machine) from taking a
    checkpoint; empty where nothing does, or where that is unknown."""
    run_dir = spec.run_dir
    try:
        sizes = [size_of(path) for path in run_dir.checkpoints.glob("step-*")]
        if host not in {h.name for h in spec.plan.hosts if not h.is_local}:
            if not os.access(run_dir.root, os.W_OK):
                return "cannot be written"
            at = run_dir.checkpoints if run_dir.checkpoints.is_dir() else run_dir.root
            usage = shutil.disk_usage(at)
            free_mib, total_mib = usage.free / 2**20, usage.total / 2**20
        else:
            index = spec.index_of(str(host))
            paths = [spec.path_on(index, path) for path in (run_dir.checkpoints, run_dir.root)]
            answers = (_ssh(spec, str(host), ["df", "-Pk", path]) for path in paths)
            output = next(filter(None, answers), None)
            words = output.splitlines()[-1].split() if output else []
            if len(words) < 4 or not (words[1].isdigit() and words[3].isdigit()):
                return ""
            if _ssh(spec, str(host), ["test", "-w", paths[1]]) is None:
                return "cannot be written"
            free_mib, total_mib = int(words[3]) / 1024, int(words[1]) / 1024
            sizes = [size // max(1, len(spec.plan.hosts)) for size in sizes]
    except OSError as error:  # a network disk that fails
        return f"cannot be read ({error.strerror})"
    need_mib = 1.2 * max(sizes) / 2**20 if sizes else min(MIN_FREE_MIB, MIN_FREE_PART * total_mib)
    if free_mib >= need_mib:
        return ""
    return f"has {free_mib:.0f} MiB free, a checkpoint needs {need_mib:.0f} MiB"


def _ssh(spec: LaunchSpec, host: str, remote: list[str]) -> str | None:
    """The output of a command on ``host``; None where it or ssh fails."""
    try:
        done = subprocess.run(
            ssh_argv(
                spec.run_dir.ssh_config, host, [*spec.host(spec.index_of(host)).enter, *remote]
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
            env=tool_env(),
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


ELASTIC_GRACE_S = 20.0
"""Time that a lost host is waited for before the run goes on without it (launch.elastic)."""


class HostSelection:
    """The hosts of a run over its attempts. ``spec`` is that of the next attempt.

    On fewer hosts it is the same run: the same global batch, the same samples in the same order,
    and checkpoints do not depend on the number of ranks.
    """

    def __init__(self, full_spec: LaunchSpec, backoff: Backoff) -> None:
        self.full_spec = full_spec
        """The launch on every host."""
        self.spec = full_spec
        self.backoff, self.log = backoff, backoff.log

    def select(self) -> Failure | None:
        """Wait for hosts that do not answer; an outcome where the run cannot continue."""
        launch = self.full_spec.exp.launch
        # The last attempt may have run without some hosts; ssh must know all of them.
        hosts = self.full_spec.plan.hosts
        write_text(self.full_spec.run_dir.ssh_config, render_ssh_config(hosts))
        limit_s = launch.host_wait_s
        if launch.elastic:
            # A host that the last attempt ran without has been waited for already.
            limit_s = 0.0 if self.spec is not self.full_spec else min(ELASTIC_GRACE_S, limit_s)
        missing = self._wait(limit_s)
        if missing and launch.elastic and not self.backoff.shutdown.count:
            smaller = self._without(missing)
            if smaller is not None:
                self._use(smaller)
                return None
            missing = self._wait(launch.host_wait_s)
        if missing:
            names, within = ", ".join(missing), clock(launch.host_wait_s)
            return Failure(
                "host_lost",
                f"{names} did not come back within {within} (launch.host_wait_s)",
                f"when it is back: python -m llmx resume {self.full_spec.run_dir.root}; without "
                "it: the same with launch.elastic=true",
                host=missing[0],
                lost_hosts=tuple(missing),
            )
        if self.spec is not self.full_spec:
            self.log.info("continuing with every host again")
            self._use(self.full_spec)
        return None

    def _wait(self, limit_s: float) -> list[str]:
        """Wait until every host answers; those that still do not after ``limit_s``."""
        missing: list[str] = []

        def problem() -> str:
            missing[:] = unreachable_hosts(self.full_spec)
            return f"waiting for {', '.join(missing)} to answer over ssh" if missing else ""

        self.backoff.wait(problem, limit_s=limit_s)
        return missing

    def _without(self, missing: Sequence[str]) -> LaunchSpec | None:
        """The run without some hosts; None where it would not be the same run."""
        try:
            full = self.full_spec
            traces = Traces.from_dict(read_mapping(full.run_dir.traces))
            exp, plan = without_hosts(full.exp, full.plan, missing, traces=traces)
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


def without_hosts(
    exp: Experiment, plan: Plan, lost: Collection[str], *, traces: Traces = NO_TRACES
) -> tuple[Experiment, Plan]:
    """The experiment and its plan without the hosts ``lost``; ConfigError where that is impossible.

    The global batch is that of ``plan``; micro batches and accumulation are computed again.
    ``traces``: those of the run.
    """
    left = [host for host in exp.hardware.hosts if host.name not in lost]
    if not left:
        raise ConfigError("launch.elastic: no host is left.")
    master = exp.hardware.master_addr
    # What only the lost hosts have is no stray key.
    lost_types = {host.device for host in exp.hardware.hosts} - {
        host.device for host in (*left, *exp.rollout.servers)
    }
    devices = {
        name: device for name, device in exp.hardware.devices.items() if name not in lost_types
    }
    lost_addresses = {host.address or host.name for host in exp.hardware.hosts if host.name in lost}
    smaller = dataclasses.replace(
        exp,
        hardware=dataclasses.replace(
            exp.hardware,
            hosts=left,
            devices=devices,
            master_addr=None if master in lost_addresses else master,
            reach=None if plan.hosts[0].name in lost else exp.hardware.reach,
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
    knowledge = Knowledge(LOCAL_NAMES | local, plan.beside, plan.drawn, traces)
    planned = make_plan(smaller, knowledge)
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
