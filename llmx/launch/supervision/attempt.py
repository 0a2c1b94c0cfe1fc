"""One attempt of a run: prepare, start the ranks, monitor every rank, shut down, classify.

However an attempt ends, no process of it is left on any host. What follows (another attempt, or
the end of the run) is decided by ``supervisor.py``.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from llmx.errors import ConfigError, DataError, LaunchError, LlmxError, disk_is_full, storage_fault
from llmx.failures.diagnose import DISK_FULL, Failure
from llmx.launch.agents.connection import Connection, Message
from llmx.launch.agents.preflight import (
    HostsUnreachable,
    check_busy,
    check_environments,
    handshake,
    kill_leftovers,
    network_problem,
    resolve_network,
    start_agents,
    start_ranks,
    uses_of_hosts,
)
from llmx.launch.agents.shutdown import pull_outputs, shut_down
from llmx.launch.checkpoint_sync import CheckpointSync
from llmx.launch.files import check_launch, check_programs, runner_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.backoff import Backoff
from llmx.launch.supervision.classify import classify
from llmx.launch.supervision.console import RunLog
from llmx.launch.supervision.journal import Journal, write_resume
from llmx.launch.supervision.monitor import RankMonitor
from llmx.launch.supervision.outcome import AttemptRecord
from llmx.launch.supervision.rollout_pool import RolloutPool
from llmx.launch.supervision.signals import Interrupted, ShutdownRequest
from llmx.launch.sync import push
from llmx.launch.transports import transport_of
from llmx.run.rundir import RunDir, append_private
from llmx.text import plural

FAILURE_GRACE_S = 3.0
"""Time for ranks to exit after another one has failed: there is nothing to save any more."""


class Attempt:
    """Used once. ``spec`` is final (port, interfaces) after ``run``."""

    def __init__(
        self,
        spec: LaunchSpec,
        log: RunLog,
        journal: Journal,
        shutdown: ShutdownRequest,
        *,
        number: int,
        is_restart: bool,
        is_trial: bool = False,
        on_start: Callable[[], None],
        step: int | None = None,
        skip_steps: Sequence[int] = (),
    ) -> None:
        self.spec, self.log, self.journal, self.shutdown = spec, log, journal, shutdown
        self.backoff = Backoff(log, journal, shutdown)
        self.number = number
        self.is_trial = is_trial
        self.is_restart = is_restart
        """Lines that the first attempt has shown on the console are only logged."""
        self.on_start = on_start
        self.step, self.skip_steps = step, list(skip_steps)
        """The step to resume from (None: the newest checkpoint), and steps that are not trained."""
        self.started = time.time()
        self.inbox: queue.Queue[tuple[Connection, Message]] = queue.Queue()
        self.connections: list[Connection] = []
        self.launched = False
        """Whether the start of ranks has begun."""
        self.runner: subprocess.Popen[bytes] | None = None
        """``deepspeed``, where the agents do not start the ranks."""
        self.monitor: RankMonitor | None = None
        self.checkpoints: CheckpointSync | None = None
        self.pool: RolloutPool | None = None
        """The servers on ``rollout.hosts``."""

    def run(self) -> AttemptRecord:
        """Run the attempt to its end."""
        outcome = self._outcome()
        progress, new = self.monitor.progress if self.monitor else None, self._new_checkpoint()
        first = progress.first_step if progress else None
        return AttemptRecord(
            outcome,
            launched=self.launched,
            first_step=first,
            last_step=progress.last_step if progress else None,
            saved_step=new or first or None,
            new_checkpoint=new is not None,
            started=self.started,
            ended=time.time(),
            hosts=tuple(host.name for host in self.spec.plan.hosts),
        )

    def _outcome(self) -> Failure:
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._shut_down)
                self.journal.state("preparing", attempt=self.number)
                self.shutdown.raises = True
                if self.shutdown.count:
                    raise Interrupted
                self._prepare()
                self.shutdown.raises = False
                self._start()
                self._monitor_ranks()
            assert self.monitor is not None
            self.monitor.poll(final=True)
            self.monitor.read_logs()
            return classify(self.monitor.evidence, self.spec.plan)
        except Interrupted:
            cause = f"stopped by {self.shutdown.source} before the start"
            return Failure("interrupted", cause, stopped_by=self.shutdown.kind)
        except LlmxError as error:
            # Before a rank was started.
            lost = error.hosts if isinstance(error, HostsUnreachable) else ()
            kind = {ConfigError: "config", DataError: "data"}.get(type(error), "comm")
            return Failure("host_lost" if lost else kind, str(error), lost_hosts=lost)
        except OSError as error:
            return local_disk_failure(error, self.spec.run_dir)
        finally:
            self.log.console.close()

    def _new_checkpoint(self) -> int | None:
        """The newest step that this attempt committed, by the status of rank 0 or by its files
        (the attempt may end between the commit and the status)."""
        progress = self.monitor.progress if self.monitor else None
        if progress is None or progress.first_step is None:
            return None
        steps = [] if progress.saved_step is None else [progress.saved_step]
        for path in self.spec.run_dir.checkpoints.glob("step-*/manifest.json"):
            with contextlib.suppress(OSError, ValueError):  # it may be pruned meanwhile
                if path.stat().st_mtime >= self.started:
                    steps.append(int(path.parent.name.removeprefix("step-")))
        return max((step for step in steps if step > progress.first_step), default=None)

    def _prepare(self) -> None:
        spec, log = self.spec, self.log
        write_resume(spec.run_dir, step=self.step, skip_steps=self.skip_steps, attempt=self.number)
        check_launch(spec.exp, spec.plan)
        check_programs(spec.exp.launch, spec.plan)
        self.connections = start_agents(spec, self.inbox)
        self.spec = spec = handshake(spec, self.connections)
        kill_leftovers(spec, self.connections, log)
        self._take_turn(spec, self.connections)
        for warning in check_environments(spec, self.connections, is_restart=self.is_restart):
            (log.debug if self.is_restart else log.warning)(warning)
        self.spec = spec = self._with_rollout_servers(spec)
        if self.is_restart:
            self._wait_for_network(spec)
        self.spec = spec = resolve_network(spec, self.connections)
        push(spec, self.connections, log.debug if self.is_restart else log.info)
        self.checkpoints = CheckpointSync(spec, self.connections, log)
        self.checkpoints.push_missing()
        self.monitor = RankMonitor(spec, self.connections, self.inbox, log)
        self.monitor.start()

    def _take_turn(self, spec: LaunchSpec, connections: list[Connection]) -> None:
        """Wait until no other run has the hosts, or refuse them."""
        if not spec.exp.launch.queue:
            if not self.is_restart:
                check_busy(spec, connections, is_trial=self.is_trial)
            return
        queued_at = time.time_ns()

        def problem() -> str:
            uses = uses_of_hosts(spec, connections, is_trial=self.is_trial, queued_at=queued_at)
            if not uses:
                return ""
            further = f", and {len(uses) - 1} more" if len(uses) > 1 else ""
            return f"waiting for its turn (launch.queue=true): {uses[0][0]}{further}"

        self.backoff.wait(problem, over="the hosts are free")

    def _with_rollout_servers(self, spec: LaunchSpec) -> LaunchSpec:
        """Prepare the servers of ``rollout.hosts``. At a restart the run goes on without them."""
        if not spec.plan.rollout_hosts:
            return spec
        self.pool = RolloutPool(spec, self.log, session=self.connections[0].session)
        try:
            servers = self.pool.prepare(
                self.connections, self._take_turn, is_restart=self.is_restart
            )
        except LaunchError as error:
            if not self.is_restart:
                raise
            self.log.warning(f"the ranks draw all samples themselves: {error}")
            self.pool.stop()
            self.pool = None
            return spec
        return replace(spec, rollout_servers=servers)

    def _wait_for_network(self, spec: LaunchSpec) -> None:
        """Wait for hosts that do not reach each other as for those that do not answer over ssh."""

        def problem() -> str:
            lines = network_problem(spec, self.connections).splitlines()
            if not lines:
                return ""
            why = f"waiting for the network between the hosts: {lines[0].removesuffix('.')}"
            # The last one has the likely cause, such as a firewall, and its fix.
            return "\n".join([why, *lines[1:][-1:]])

        self.backoff.wait(problem, limit_s=spec.exp.launch.host_wait_s)

    def _start(self) -> None:
        spec = self.spec
        transport = transport_of(spec.plan.transport)
        transport.release(spec)
        hosts = ", ".join(f"{host.name} ({host.slots})" for host in spec.plan.hosts)
        ranks = plural(spec.plan.world_size, "rank")
        self.log.info(f"launching {ranks} over {spec.plan.transport}: {hosts}")
        self.launched = True
        if self.pool is not None:
            self.pool.start()
        if transport.agents_start_ranks:
            start_ranks(spec, self.connections)
        else:
            self._start_runner(transport.argv(spec))
        self.journal.state("running", attempt=self.number)
        self.on_start()
        if self.checkpoints is not None:
            self.checkpoints.start()

    def _start_runner(self, argv: list[str]) -> None:
        """Start ``deepspeed`` on this machine."""
        spec = self.spec
        with append_private(spec.run_dir.launcher_log) as stream:
            # A session of its own: DeepSpeed handles Ctrl-C with `pkill -f` on a pattern that all
            # its launches share, so it must never receive one.
            self.runner = subprocess.Popen(
                argv,
                cwd=spec.run_dir.root,
                env=runner_env(spec),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self.log.debug(f"deepspeed is process {self.runner.pid}; port {spec.port}")

    def _monitor_ranks(self) -> None:
        """Poll until the attempt is over, or its end is requested."""
        assert self.monitor is not None
        monitor = self.monitor
        while True:
            monitor.poll()
            self.journal.heartbeat(monitor.stall)
            if self.shutdown.count:
                break
            if monitor.is_over(self.runner.poll() if self.runner else None):
                return
        monitor.evidence.stopped = Failure(
            "interrupted",
            f"stopped by {self.shutdown.source}",
            stopped_by=self.shutdown.kind,
            time=self.shutdown.time or time.time(),
        )
        self.log.info(
            f"{self.shutdown.source}: ranks save a checkpoint and exit within "
            f"{self.spec.exp.launch.stop_grace_s:.0f} s; a second signal ends them at once"
        )

    def _shut_down(self) -> None:
        """End the ranks on every host, pull their outputs, end the agents."""
        self.shutdown.raises = False
        spec, log, monitor, connections = self.spec, self.log, self.monitor, self.connections
        self.journal.state("ending")
        lost: set[str] = set()
        grace_s, save = FAILURE_GRACE_S, False
        if monitor is not None:
            monitor.evidence.ended_at = time.time()
            monitor.end_renewals()
            lost = set(monitor.evidence.lost_hosts)
            if self.launched and self.shutdown.count and monitor.failed_at is None:
                grace_s, save = spec.exp.launch.stop_grace_s, True
            elif monitor.all_left:
                grace_s = 0.0  # only DeepSpeed's launchers are there
        for connection in connections:
            if connection.name in lost:  # so that nothing waits for its replies
                connection.lost_at = connection.lost_at or time.time()
        if self.checkpoints is not None:
            self.checkpoints.stop()
        shut_down(
            spec,
            connections,
            log,
            lost=lost,
            launched=self.launched,
            requests=lambda: self.shutdown.count,
            grace_s=grace_s,
            save=save,
        )
        if self.launched and monitor is not None:
            if self.runner is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self.runner.wait(timeout=5)
                    if code >= 0:
                        monitor.evidence.runner_code = code
            monitor.drain()
            pull_outputs(spec, connections, log)
            if self.checkpoints is not None:
                self.checkpoints.pull_rest([c for c in connections if c.lost_at is None])
        if self.pool is not None:
            self.pool.stop()
        for connection in connections:
            connection.close(timeout_s=5 if connection.lost_at is None else 0.2)


def local_disk_failure(error: OSError, run_dir: RunDir) -> Failure:
    """The outcome where the supervisor itself could not read or write."""
    why = f"{error.filename or run_dir.root}: {error.strerror or error}"
    if disk_is_full(error):
        return Failure("disk_full", why, DISK_FULL)
    return Failure(
        "disk_full" if storage_fault(error) else "crash",
        f"the supervisor cannot continue: {why}",
        f"check the file system of {run_dir.root} (mount, dmesg), then: python -m llmx resume "
        f"{run_dir.root}",
    )
