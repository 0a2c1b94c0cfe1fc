"""Monitors the ranks of an attempt: what they write, what the agents report, and when it is over.

It detects a rank that failed or exited without an error message, a host that stopped responding,
ranks that never start, a launcher that exits early, a hang, and the regular end. A host whose
connection breaks is connected anew, and its ranks are taken over.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

from llmx.failures.diagnose import Failure
from llmx.launch.agents.agent import RANKS_ENDED
from llmx.launch.agents.connection import AgentError, Connection, Message
from llmx.launch.agents.preflight import (
    connection_to,
    network_problem,
    start_watching,
    take_over,
)
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.console import RunLog
from llmx.launch.supervision.outcome import Evidence, RankExit, all_finished
from llmx.launch.supervision.progress import (
    NOTICE_S,
    NOTICE_STACKS_S,
    STACKS_S,
    UNSAFE_STACKS_S,
    Progress,
    Stacks,
    find_stuck_rank,
    hang_failure,
    main_stack,
    waiting_places,
)
from llmx.launch.supervision.tail import FINAL_STATES, SHOWN_BYTES, apply_update, tail_text
from llmx.launch.transports import transport_of
from llmx.run.metrics.lines import MetricsTail
from llmx.run.rundir import write_json
from llmx.run.tail import LineTail
from llmx.text import duration

SUSPENDED_S = 5.0
"""Time between two polls after which the supervisor itself was suspended, and heard nobody."""
MESSAGES_S = 1.0
"""Time for the messages of one poll: many of them must not delay everything else."""
SETTLE_S = 5.0
"""Time from the first failure to the shutdown: an earlier failure may still be reported."""
SHARED_DELAY_S = 3.0
"""How much later than the exit of a launcher the last status may appear on a network disk."""
ALL_REPORTED_S = 1.0
"""``SETTLE_S`` where every rank has a final status or has exited."""
EXIT_S = 60.0
"""Time for the launcher to exit after every rank has finished."""
SIZES_S = 1.0
"""Time between two looks at the sizes of the logs, before training."""
PROBE_S = 15.0
"""Time for a host to answer a ping after a failure."""
RENEW_S = 12.0
"""Time without a message (pings go every 3 s) after which a host is connected anew."""
RENEW_PAUSE_S = 1.0
"""Time between two tries to connect."""
RANKS_END_S = 25.0
"""Time for ranks that their agent ends to save and exit, and for the agent to exit."""


class Renewal(threading.Thread):
    """Connects to a host anew, again and again until it answers or nobody waits for it any more.
    A thread: a host that does not answer must not keep the monitor from the others."""

    def __init__(self, spec: LaunchSpec, connection: Connection, log: RunLog) -> None:
        super().__init__(name=f"renew-{connection.name}", daemon=True)
        self.spec, self.connection, self.log = spec, connection, log
        self._ended = threading.Event()

    def run(self) -> None:
        name, began, last_error = self.connection.name, time.monotonic(), ""
        while not self._ended.is_set():
            try:
                take_over(self.spec, self.connection)
            except AgentError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    self.log.debug(f"{name}: cannot be connected anew: {error}")
                self._ended.wait(RENEW_PAUSE_S)
            else:
                if self.connection.ranks_ended is None:
                    took_s = time.monotonic() - began
                    self.log.info(f"{name}: connected again after {took_s:.0f} s; its ranks run on")
                return

    def end(self) -> None:
        """Stop trying. Afterwards nothing but the caller uses the connection."""
        self._ended.set()
        while self.is_alive():
            self.connection.abort()  # so that it waits for no reply
            self.join(timeout=0.2)


class RankMonitor:
    """Monitors one attempt; ``evidence`` is what was observed."""

    def __init__(
        self,
        spec: LaunchSpec,
        connections: list[Connection],
        inbox: queue.Queue[tuple[Connection, Message]],
        log: RunLog,
    ) -> None:
        self.spec, self.plan, self.run_dir = spec, spec.plan, spec.run_dir
        self.connections, self.inbox, self.log = connections, inbox, log
        self.evidence = Evidence()
        self.failed_at: float | None = None
        """Monotonic clock at the first failure."""
        self.exiting_at: float | None = None
        """When a rank was found to exit because of a signal from outside."""
        self._metrics = MetricsTail(self.run_dir.metrics)
        self.progress = Progress(
            hang_timeout_s=spec.exp.launch.hang_timeout_s,
            loading_timeout_s=spec.exp.launch.loading_timeout_s,
            earlier=self._metrics.read(),
        )
        self.stacks = Stacks(self.run_dir, connections, self.poll)
        self._sized_at = 0.0
        self._rank_0, self._launcher = (
            LineTail(path, from_end=True, max_bytes=SHOWN_BYTES)
            for path in (self.run_dir.rank_log(0), self.run_dir.launcher_log)
        )
        self._launcher_log: list[str] = []
        self._log_starts = {
            rank.rank: path.stat().st_size
            for rank in self.plan.ranks
            if (path := self.run_dir.rank_log(rank.rank)).exists()
        }
        """Rank -> bytes of its log that are of earlier attempts."""
        self._started = self._polled_at = self._resumed_at = time.monotonic()
        self._renewals: dict[str, Renewal] = {}
        """Host -> its last renewal, also one that is over."""
        self._ranks_ended_at: dict[str, float] = {}
        """Host -> when it was noticed that its agent ends the ranks."""
        self._queued = False
        """A scheduler has not allocated the hosts yet."""
        self.stall = ""
        """A line: for how long no step has ended, and who is waited for. Empty while steps end."""
        self._waits_for = ""
        self._probe = threading.Thread()
        self._network: tuple[str, ...] = ()
        """Problems that the last probe found, with a fix at the end."""
        self._finished_at: float | None = None
        self._exited_at: float | None = None

    def start(self) -> None:
        """Remove the statuses of an earlier attempt; the agents begin to report."""
        for path in (*self.run_dir.ranks.glob("*rank-*"), self.run_dir.root / RANKS_ENDED):
            path.unlink(missing_ok=True)
        for rank in self.plan.ranks:
            # The agent of this machine reads what ranks without one (Slurm) write.
            agent = connection_to(self.connections, rank.host) or self.connections[0]
            agent.statuses.append(rank.rank)
        start_watching(self.connections, self.log, port=self.spec.port)
        self._started = time.monotonic()

    def poll(self, *, final: bool = False) -> None:
        """Receive everything that is new; waits at most 0.1 s for it."""
        if time.monotonic() - self._polled_at > SUSPENDED_S:
            self._resumed_at = time.monotonic()
        self._receive(wait_s=0.0 if final else 0.1, limit_s=None if final else MESSAGES_S)
        now = time.monotonic()
        self.progress.update(self.evidence.statuses, now)
        if self.progress.is_loading and (since_s := now - self._sized_at) > SIZES_S:
            self._sized_at = now
            if any(renewal.is_alive() for renewal in self._renewals.values()):
                self.progress.pause(min(since_s, 2 * SIZES_S))
            sizes = self.stacks.log_bytes(self.evidence.statuses)
            self.progress.take_log_bytes(sum(sizes.values()), now)
        for raw in self._launcher.read(final=final):
            line = raw.decode("utf-8", "replace")
            self._launcher_log = [*self._launcher_log[-400:], line]
            self._follow_queue(line)
        for raw in self._rank_0.read(final=final):
            self.log.console.rank_line(raw.decode("utf-8", "replace"))
        for record in self._metrics.read():
            self.log.console.record(record)
            self.progress.take_record(record)
        for rank in self.plan.ranks:
            if connection := connection_to(self.connections, rank.host):
                self.evidence.offsets_s[rank.rank] = connection.clock_offset_s
        self._polled_at = time.monotonic()

    @property
    def all_left(self) -> bool:
        """Whether every rank has finished, and its process has exited."""
        exits = self.evidence.exits
        return all_finished(self.evidence, self.plan) and all(
            rank.rank in exits for rank in self.plan.ranks
        )

    def is_over(self, runner_code: int | None) -> bool:
        """Whether the attempt is over: finished, failed, hung or never started."""
        now = time.monotonic()
        if runner_code is not None and not self._all_alive():
            self.evidence.runner_code = runner_code
            return self._launcher_ended(now)
        if all_finished(self.evidence, self.plan):
            self._finished_at = self._finished_at or now
            if self.all_left and not transport_of(self.plan.transport).ends_by_itself:
                self.log.debug("every rank has finished and exited")
                return True
            return now - self._finished_at > EXIT_S
        self._look_for_failure(now)
        if self.failed_at is not None:
            return self._all_reported(now)
        if self.exiting_at is not None:
            # The other ranks save and exit by themselves, or are ended after the grace.
            return now - self.exiting_at > self.spec.exp.launch.stop_grace_s
        return self._is_hung(now) or self._is_late(now)

    def _look_for_failure(self, now: float) -> None:
        problem = self._find_failure(now)
        if problem and self.failed_at is None:
            self.failed_at = now
            self.log.debug(problem)
            for connection in self.connections:
                connection.ping()

    def _is_hung(self, now: float) -> bool:
        stuck_s = self.progress.stuck_s(now)
        if stuck_s is None:
            self._follow_stall(now)
            return False
        self.log.debug(f"no progress for {stuck_s:.0f} s; every rank dumps its stacks")
        self.evidence.hang = self._hang_failure(stuck_s)
        return True

    def _is_late(self, now: float) -> bool:
        """Whether a rank has not started within ``launch.start_timeout_s``."""
        limit_s = self.spec.exp.launch.start_timeout_s
        all_started = len(self.evidence.statuses) >= self.plan.world_size
        if all_started or self._queued or now - self._started <= limit_s:
            return False
        self.evidence.start_timeout_s = limit_s
        return True

    def _hang_failure(self, stuck_s: float) -> Failure:
        """The failure of ranks that make no progress, with the one that the others wait for."""
        is_loading = self.progress.is_loading
        rank, why, stack = self._dump_stacks({"USR2": STACKS_S, "QUIT": UNSAFE_STACKS_S})
        silent = f"no rank made progress for {stuck_s:.0f} s "
        if is_loading:
            silent += "before the first step (launch.loading_timeout_s)"
        else:
            step = min(int(status.get("step") or 0) for status in self.evidence.statuses.values())
            silent += f"after step {step}"
            if self._network:
                return Failure("comm", f"{silent}: {self._network[0]}", self._network[-1])
        return hang_failure(self.plan, rank, why, stack, silent=silent, is_loading=is_loading)

    def _follow_stall(self, now: float) -> None:
        """Say that a step is overdue and who is waited for, again and again
        (``Progress.notice_due``). From ``NOTICE_S`` on look whether the hosts reach each other."""
        overdue_s = self.progress.overdue_s(now)
        if overdue_s is None:
            if self.stall:
                self.log.info("training goes on")
            self.stall, self._network = "", ()
            return
        is_due = self.progress.notice_due(overdue_s)
        if self.progress.is_loading:
            if is_due:
                self._say_where_ranks_wait(overdue_s)
            return
        unheard = ", ".join(name for name, new in self._renewals.items() if new.is_alive())
        if is_due:
            self._waits_for = unheard or self._find_waited_for()
        usual_s = self.progress.usual_s
        usual = f" (usually {usual_s:.2g} s)" if usual_s else ""
        waits_for = next(iter(self._network), self._waits_for).removesuffix(".")
        self.stall = f"no step for {duration(overdue_s)}{usual}"
        self.stall += f"; waiting for {waits_for}" if waits_for else ""
        if is_due:
            self.log.console.forget_time_left()
            self.log.info(self.stall)
            if overdue_s > NOTICE_S and not unheard and not self._probe.is_alive():
                self._probe = threading.Thread(target=self._probe_network, daemon=True)
                self._probe.start()

    def _probe_network(self) -> None:
        """Probe the network, in a thread: a connection that gets no answer takes long."""
        renewals = dict(self._renewals)
        problem = network_problem(self.spec, self.connections)
        if self._renewals != renewals or not self.stall:
            return  # an agent did not answer, which is no fault between the hosts; or it is over
        self._network = tuple(problem.splitlines())
        for line in self._network:
            self.log.info(line)

    def _find_waited_for(self) -> str:
        """The host and rank that the others wait for; empty where none stands out."""
        rank, why, _ = self._dump_stacks({"USR2": NOTICE_STACKS_S})
        if rank is None:
            return ""
        return f"{self.plan.hosts[self.plan.ranks[rank].host].name} (rank {rank}: {why})"

    def _dump_stacks(self, patience_s: dict[str, float]) -> tuple[int | None, str, str]:
        """The rank that the others wait for (None: all wait), how it was found, and its stack."""
        now, statuses = time.time(), self.evidence.statuses  # before the dump changes the logs
        ages_s = {
            rank: now - float(status.get("time") or 0.0) + self.evidence.offsets_s.get(rank, 0.0)
            for rank, status in statuses.items()
        }
        logs = self.stacks.request(list(statuses), patience_s)
        rank, why = find_stuck_rank(statuses, logs, ages_s)
        return rank, why, "" if rank is None else main_stack(logs.get(rank, ""))

    def _say_where_ranks_wait(self, silent_s: float) -> None:
        """Show the stacks of ranks that load, which SIGUSR2 writes to their logs."""
        ranks = list(self.evidence.statuses)
        self.progress.is_dumping = True
        logs = self.stacks.request(ranks, {"USR2": NOTICE_STACKS_S})
        self.progress.end_dump(sum(self.stacks.log_bytes(ranks).values()))
        hosts = {rank: self.plan.hosts[self.plan.ranks[rank].host].name for rank in ranks}
        limit_s = self.progress.timeout_s()
        end = f"; the attempt ends after {limit_s:.0f} s (launch.loading_timeout_s)"
        self.log.info(
            f"no progress for {silent_s:.0f} s before the first step"
            f"{end if limit_s else ''}. Ranks are in:"
        )
        for line in waiting_places(logs, hosts):
            self.log.info(f"  {line}")

    def drain(self) -> None:
        """Receive everything that the agents have sent. To be called before whole files are copied:
        appended afterwards, its lines would be in them twice."""
        self._receive(wait_s=0.0, limit_s=None)

    def read_logs(self) -> None:
        """Read the logs that the outcome depends on, after everything is written."""
        self.evidence.agent_ends = {
            connection.name: {**report, "time": report["time"] - connection.clock_offset_s}
            for connection in self.connections
            if (report := connection.ranks_ended) is not None
        }
        self.evidence.launcher_log = "\n".join(self._launcher_log)
        for rank in self.plan.ranks:
            failed = self.evidence.statuses.get(rank.rank, {}).get("state") == "failed"
            if failed or rank.rank in self.evidence.exits:
                self.evidence.rank_logs[rank.rank] = tail_text(
                    self.run_dir.rank_log(rank.rank), start=self._log_starts.get(rank.rank, 0)
                )

    def end_renewals(self) -> None:
        """End all renewals, before the shutdown: it connects to lost hosts itself."""
        for renewal in self._renewals.values():
            renewal.end()

    def _all_alive(self) -> bool:
        """Whether the agents see every rank: these outlive a launcher that was killed, or whose
        connection broke, and need it no more."""
        return all(
            any(connection.ranks.get(rank.rank) for connection in self.connections)
            for rank in self.plan.ranks
        )

    def _launcher_ended(self, now: float) -> bool:
        """The launcher has exited: wait for the last messages of every host."""
        if self._exited_at is None:
            self._exited_at = now
            self.log.debug(f"deepspeed exited with code {self.evidence.runner_code}")
            for connection in self.connections:
                if connection.lost_at is None:
                    try:
                        connection.request("flush", timeout_s=10)
                    except AgentError as error:
                        self.log.debug(f"{connection.name}: {error}")
            return False  # one more poll, for what they sent
        states = [status.get("state") for status in self.evidence.statuses.values()]
        ended = not any(any(connection.ranks.values()) for connection in self.connections)
        if ended and len(states) == self.plan.world_size and FINAL_STATES.issuperset(states):
            return True
        # On a shared file system the last status may appear a little after the exit.
        return now - self._exited_at > SHARED_DELAY_S

    def _find_failure(self, now: float) -> str:
        """The first failure that is visible now, for the log; empty where there is none."""
        for rank, status in self.evidence.statuses.items():
            if status.get("state") == "failed":
                return f"rank {rank} failed"
            if status.get("state") == "interrupted" and self.exiting_at is None:
                self.exiting_at = now
                self.log.debug(f"rank {rank} received a signal and is exiting")
        for rank in self.evidence.exits:
            if self.evidence.statuses.get(rank, {}).get("state") not in FINAL_STATES:
                return f"rank {rank} exited without an error message"
        return self._find_lost_host(now)

    def _find_lost_host(self, now: float) -> str:
        """A host that lost its supervisor, or that cannot be reached for too long."""
        remote = [connection for connection in self.connections if connection.is_remote]
        silent_s = {
            connection.name: now - max(connection.last_message_at, self._resumed_at)
            for connection in remote
        }
        launch = self.spec.exp.launch
        limit_s = launch.heartbeat_timeout_s
        if all(seconds > RENEW_S for seconds in silent_s.values()) and not any(
            host.is_local for host in self.plan.hosts
        ):
            # This machine is cut off, not the hosts: their agents keep the ranks for so long.
            limit_s = max(limit_s, launch.orphan_timeout_s)
        for connection in remote:
            if connection.ranks_ended is not None:
                noticed_at = self._ranks_ended_at.setdefault(connection.name, now)
                saving = connection.lost_at is None and any(connection.ranks.values())
                if saving and now - noticed_at < RANKS_END_S:
                    continue
                return f"{connection.name}: its agent ended the ranks, without a supervisor"
            if connection.lost_at is None and silent_s[connection.name] <= RENEW_S:
                continue
            if silent_s[connection.name] > limit_s:
                self._mark_lost(connection)
                return f"{connection.name} is lost"
            renewal = self._renewals.get(connection.name)
            if renewal is None or not renewal.is_alive():
                self.log.debug(f"{connection.name}: connecting to its agent anew")
                self._renewals[connection.name] = Renewal(self.spec, connection, self.log)
                self._renewals[connection.name].start()
        return ""

    def _all_reported(self, now: float) -> bool:
        """After a failure: whether every host had the time to report an earlier one."""
        assert self.failed_at is not None
        statuses, exits = self.evidence.statuses, self.evidence.exits
        all_ended = all(
            rank.rank in exits or statuses.get(rank.rank, {}).get("state") in FINAL_STATES
            for rank in self.plan.ranks
        )
        waited_s = now - self.failed_at
        if waited_s < (ALL_REPORTED_S if all_ended else SETTLE_S):
            return False
        silent = [
            connection
            for connection in self.connections
            if connection.is_remote
            and connection.ranks_ended is None  # its agent has exited, the host is up
            and connection.name not in self.evidence.lost_hosts
            and connection.last_message_at < self.failed_at
        ]
        if silent and waited_s < PROBE_S:
            return False
        for connection in silent:
            self._mark_lost(connection)
        return True

    def _mark_lost(self, connection: Connection) -> None:
        silent_s = time.monotonic() - connection.last_message_at
        self.evidence.lost_hosts.setdefault(connection.name, time.time() - silent_s)

    def _follow_queue(self, line: str) -> None:
        """A job may be queued for hours: launch.start_timeout_s begins with its allocation."""
        is_queued = transport_of(self.plan.transport).is_queued(line)
        if is_queued is not None:
            self._queued = is_queued
            if not is_queued:
                self._started = time.monotonic()
            self.log.console.print(line)

    def _receive(self, *, wait_s: float, limit_s: float | None) -> None:
        began = time.monotonic()
        deadline = began + wait_s
        while limit_s is None or time.monotonic() - began < limit_s:
            try:
                timeout = deadline - time.monotonic()
                connection, message = self.inbox.get(block=timeout > 0, timeout=max(timeout, 0.001))
            except queue.Empty:
                return
            event = message.get("event")
            if event in ("append", "replace"):
                try:
                    apply_update(self.run_dir, message)
                except (OSError, ValueError) as error:
                    # A full disk, for example; at the end of the run whole files are copied.
                    self.log.debug(f"{connection.name}: {message['path']} is not written: {error}")
            elif event == "status":
                self._take_status(connection, message["rank"], message["status"])
            elif event == "rank_exit" and message["rank"] < self.plan.world_size:
                self._record_exit(connection, message)
            elif event == "lost":
                self.log.debug(f"{connection.name}: the connection to its agent closed")

    def _take_status(self, connection: Connection, rank: int, status: dict[str, Any]) -> None:
        self.evidence.statuses[rank] = status
        if not connection.shared:
            with contextlib.suppress(OSError):  # for those who look at the run
                write_json(self.run_dir.rank_status(rank), status)

    def _record_exit(self, connection: Connection, message: Message) -> None:
        oom_kills = message.get("oom_kills", 0) - connection.host_info.get("oom_kills", 0)
        self.evidence.exits.setdefault(
            message["rank"],
            RankExit(
                message["time"] - connection.clock_offset_s,
                oom_kills,
                message.get("disk_free"),
                message.get("code"),
            ),
        )
