"""Watches a run: what ranks write, what agents report, and when it is over.

Sees: a rank that failed, one that exited without an error message, a host that is silent, ranks
that never start, a launcher that ends early, and the good end.
"""

from __future__ import annotations

import base64
import queue
import time
from collections.abc import Callable

from llmx.launch.console import Console
from llmx.launch.fleet import AgentError, Channel, Message
from llmx.launch.follow import (
    FINAL_STATES,
    SHOWN_BYTES,
    LineReader,
    MetricsReader,
    StatusReader,
    apply_update,
    tail_text,
)
from llmx.launch.outcome import Evidence, RankExit, all_finished
from llmx.launch.progress import Progress
from llmx.launch.spec import LaunchSpec
from llmx.launch.stacks import look_into

AWAY_S = 5.0
"""Between two looks: so long the supervisor itself stood still, and has heard nobody."""
TAKE_S = 1.0
"""For messages in one look: a flood of them must not keep it from all else."""
SETTLE_S = 5.0
"""From the first failure to the end of the run: time for an earlier one to be written down."""
SHARED_DELAY_S = 3.0
"""How much later than a process's end its last status may show on a network file system."""
LOCAL_DELAY_S = 0.5
"""The same on a disk of this machine, or where the agent brings the status itself."""
ALL_SAID_S = 1.0
"""After a failure, when every rank has said its last word or is gone."""
EXIT_S = 60.0
"""For the launcher to end after every rank has finished."""
PROBE_S = 15.0
"""For a host to answer once something has failed."""


class Watch:
    """The eyes of the supervisor on one run. ``evidence`` is what it has seen."""

    def __init__(
        self,
        spec: LaunchSpec,
        channels: list[Channel],
        inbox: queue.Queue[tuple[Channel, Message]],
        console: Console,
        log: Callable[[str], None],
    ) -> None:
        self.spec, self.plan, self.run_dir = spec, spec.plan, spec.run_dir
        self.channels, self.inbox, self.console, self.log = channels, inbox, console, log
        self.evidence = Evidence()
        self.failed_at: float | None = None
        """Monotonic clock at the first failure."""
        self.leaving_at: float | None = None
        """When a rank was seen to leave because it was asked to."""
        self._statuses = StatusReader(self.run_dir, self.plan.world_size)
        self._metrics = MetricsReader(self.run_dir)
        self.progress = Progress(
            hang_timeout_s=spec.exp.launch.hang_timeout_s, earlier=self._metrics.earlier
        )
        self._metrics.earlier = []  # of a long run they are many
        self._rank_0, self._launcher = (
            LineReader(path, from_end=True, most_bytes=SHOWN_BYTES)
            for path in (self.run_dir.rank_log(0), self.run_dir.launcher_log)
        )
        self._launcher_log: list[str] = []
        self._started = self._looked = self._awake = time.monotonic()
        self._gone_at: dict[int, float] = {}
        """Rank -> when the word of its end came, by the monotonic clock."""
        self._queued = False
        """Slurm has not given the job its hosts yet."""
        self._finished_at: float | None = None
        self._exited_at: float | None = None

    def begin(self) -> None:
        """Forget an earlier attempt in the same run directory; the agents begin to watch."""
        self._statuses.clear()
        pending = [
            (channel, channel.post("watch", stream=not channel.shared, port=self.spec.port))
            for channel in self.channels
        ]
        for channel, replies in pending:
            try:
                channel.wait(replies, timeout_s=30)
            except AgentError as error:
                self.log(f"{channel.name}: does not watch: {error}")
        self._started = time.monotonic()

    def tick(self, *, final: bool = False) -> None:
        """Take in everything that is new; waits at most a tenth of a second."""
        if time.monotonic() - self._looked > AWAY_S:
            self._awake = time.monotonic()
        self._take_messages(wait_s=0.0 if final else 0.1, limit_s=None if final else TAKE_S)
        self._statuses.read()
        self.evidence.statuses = self._statuses.statuses
        self.progress.see(self.evidence.statuses)
        for line in self._launcher.read(final=final):
            self._launcher_log = [*self._launcher_log[-400:], line]
            self._take_queue(line)
        for line in self._rank_0.read(final=final):
            self.console.rank_line(line)
        for record in self._metrics.read(final=final):
            self.console.record(record)
            self.progress.take_record(record)
        self._take_offsets()
        self._looked = time.monotonic()

    def is_over(self, runner_code: int | None) -> bool:
        """Whether there is nothing left to wait for. Finds out about failures on the way."""
        now = time.monotonic()
        if runner_code is not None:
            self.evidence.runner_code = runner_code
            return self._launcher_ended(now)
        if all_finished(self.evidence, self.plan):
            self._finished_at = self._finished_at or now
            return now - self._finished_at > EXIT_S
        problem = self._problem(now)
        if problem and self.failed_at is None:
            self.failed_at = now
            self.log(problem)
            for channel in self.channels:
                channel.ping()
        if self.failed_at is not None:
            return self._settled(now)
        if self.leaving_at is not None:
            # The others are saving: they leave by themselves, or are ended after the grace.
            return now - self.leaving_at > self.spec.exp.launch.stop_grace_s
        stuck_s = self.progress.hang.stuck_s(now)
        if stuck_s is not None:
            self.log(f"no progress for {stuck_s:.0f} s; asking every rank for its stacks")
            self.evidence.hang = look_into(
                self.run_dir,
                self.evidence.statuses,
                stuck_s=stuck_s,
                offsets_s=self.evidence.offsets_s,
                channels=self.channels,
                tick=self.tick,
            )
            return True
        late = now - self._started > self.spec.exp.launch.start_timeout_s
        if late and not self._queued and self._not_started():
            self.evidence.start_timeout_s = self.spec.exp.launch.start_timeout_s
            return True
        return False

    def take_rest(self) -> None:
        """What the agents sent until they were done: files that are copied whole come after it,
        or its lines would stand in them twice."""
        self._take_messages(wait_s=0.0, limit_s=None)

    def collect_logs(self) -> None:
        """Read what the verdict needs of the logs, once everything is written."""
        self.evidence.launcher_log = "\n".join(self._launcher_log)
        for rank in self.plan.ranks:
            if rank.rank in self.evidence.exits:
                self.evidence.rank_logs[rank.rank] = tail_text(self.run_dir.rank_log(rank.rank))

    def _launcher_ended(self, now: float) -> bool:
        """The launcher is gone: wait for the last words of every host."""
        if self._exited_at is None:
            self._exited_at = now
            self.log(f"deepspeed ended with code {self.evidence.runner_code}")
            for channel in self.channels:
                if channel.lost_at is None:
                    try:
                        channel.ask("flush", timeout_s=10)
                    except AgentError as error:
                        self.log(f"{channel.name}: {error}")
            return False  # one more look at what they sent
        states = [status.get("state") for status in self.evidence.statuses.values()]
        if len(states) == self.plan.world_size and FINAL_STATES.issuperset(states):
            return True
        # A shared file system may show the last status a little later than the process's end.
        return now - self._exited_at > SHARED_DELAY_S

    def _problem(self, now: float) -> str:
        """The first failure that can be seen now, in words for the log; empty where none can."""
        for rank, status in self.evidence.statuses.items():
            if status.get("state") == "failed":
                return f"rank {rank} failed"
            if status.get("state") == "interrupted" and self.leaving_at is None:
                self.leaving_at = now
                self.log(f"rank {rank} received a stop signal and is exiting")
        for rank, gone_at in self._gone_at.items():
            state = self.evidence.statuses.get(rank, {}).get("state")
            if state not in FINAL_STATES and now - gone_at > self._delay_s(rank):
                return f"rank {rank} exited without an error message"
        limit_s = self.spec.exp.launch.heartbeat_timeout_s
        for channel in self.channels:
            silent = now - max(channel.last_heard, self._awake) > limit_s
            if channel.is_remote and (silent or channel.lost_at is not None):
                self._lose(channel)
                return f"{channel.name} is lost"
        return ""

    def _settled(self, now: float) -> bool:
        """After a failure: whether every host had its chance to tell an earlier one."""
        assert self.failed_at is not None
        waited_s = now - self.failed_at
        if waited_s < (ALL_SAID_S if self._all_said() else SETTLE_S):
            return False
        silent = [
            channel
            for channel in self.channels
            if channel.is_remote
            and channel.name not in self.evidence.lost_hosts
            and channel.last_heard < self.failed_at
        ]
        if silent and now - self.failed_at < PROBE_S:
            return False
        for channel in silent:
            self._lose(channel)
        return True

    def _all_said(self) -> bool:
        statuses, exits = self.evidence.statuses, self.evidence.exits
        return all(
            rank.rank in exits or statuses.get(rank.rank, {}).get("state") in FINAL_STATES
            for rank in self.plan.ranks
        )

    def _delay_s(self, rank: int) -> float:
        host = self.plan.ranks[rank].host
        remote = any(c.is_remote and c.shared for c in self.channels if host in c.hosts)
        return SHARED_DELAY_S if remote else LOCAL_DELAY_S

    def _lose(self, channel: Channel) -> None:
        heard = time.time() - (time.monotonic() - channel.last_heard)
        self.evidence.lost_hosts.setdefault(channel.name, heard)

    def _take_queue(self, line: str) -> None:
        """Slurm may let a job wait for hours: the time to start begins when it has its hosts."""
        if "queued and waiting for resources" in line:
            self._queued = True
        elif "has been allocated resources" in line:
            self._queued, self._started = False, time.monotonic()
        else:
            return
        self.console.say(line)

    def _not_started(self) -> bool:
        return any(rank.rank not in self.evidence.statuses for rank in self.plan.ranks)

    def _take_messages(self, *, wait_s: float, limit_s: float | None) -> None:
        began = time.monotonic()
        deadline = began + wait_s
        while limit_s is None or time.monotonic() - began < limit_s:
            try:
                timeout = deadline - time.monotonic()
                channel, message = self.inbox.get(block=timeout > 0, timeout=max(timeout, 0.001))
            except queue.Empty:
                return
            event = message.get("event")
            if event in ("append", "replace"):
                try:
                    apply_update(self.run_dir, message, base64.b64decode(message["data"]))
                except (OSError, ValueError) as error:
                    # A full disk, for one; the end of the run brings it all.
                    self.log(f"{channel.name}: {message['path']} is not taken over: {error}")
            elif event == "rank_exit" and message["rank"] < self.plan.world_size:
                self._take_exit(channel, message)
            elif event == "lost":
                self.log(f"{channel.name}: the connection to its agent closed")

    def _take_exit(self, channel: Channel, message: Message) -> None:
        self._gone_at.setdefault(message["rank"], time.monotonic())
        oom_kills = message.get("oom_kills", 0) - channel.hello.get("oom_kills", 0)
        self.evidence.exits.setdefault(
            message["rank"],
            RankExit(message["time"] - channel.offset_s, oom_kills, message.get("disk_free")),
        )

    def _take_offsets(self) -> None:
        for rank in self.plan.ranks:
            for channel in self.channels:
                if rank.host in channel.hosts:
                    self.evidence.offsets_s[rank.rank] = channel.offset_s
