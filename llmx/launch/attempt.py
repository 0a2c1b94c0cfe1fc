"""One attempt of a run: prepare, start ``deepspeed``, watch every rank, end everything, judge.

However an attempt ends, no process of it is left on any host. What comes next (another attempt,
or the end) is decided by ``supervisor.py``.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmx.doctor.diagnose import NOTES
from llmx.errors import ConfigError, DataError, LlmxError
from llmx.launch.collect import Collector
from llmx.launch.console import Console
from llmx.launch.ending import Ending
from llmx.launch.fleet import Channel, Message
from llmx.launch.outcome import Verdict, judge
from llmx.launch.prepare import (
    Unreachable,
    bring,
    clear,
    greet,
    settle,
    start_agents,
    survey,
)
from llmx.launch.render import check, check_programs, runner_env
from llmx.launch.restart import Ended
from llmx.launch.signals import Asked, Interrupted
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import transport_of
from llmx.launch.watch import Watch
from llmx.rundir import RunDir

FAILURE_GRACE_S = 3.0
"""For ranks to leave when another one has failed: there is nothing to save any more."""


@dataclass
class Voice:
    """How an attempt speaks: to the user, and to the log."""

    console: Console
    say: Callable[[str], None]
    warn: Callable[[str], None]
    log: Callable[[str], None]
    alive: Callable[[], None]
    """Called several times a second while the attempt goes on."""
    state: Callable[[str], None] = field(default=lambda state: None)
    """``preparing``, ``running``, ``ending``."""


class Attempt:
    """Used once. ``spec`` is final (port, interfaces) after ``run``."""

    def __init__(
        self,
        spec: LaunchSpec,
        voice: Voice,
        asked: Asked,
        *,
        again: bool,
        before: Callable[[], None],
        on_start: Callable[[], None],
    ) -> None:
        self.spec, self.voice, self.asked = spec, voice, asked
        self.again = again
        """Not the first attempt: what was said then is not said again."""
        self.before, self.on_start = before, on_start
        self.started = time.time()
        self.inbox: queue.Queue[tuple[Channel, Message]] = queue.Queue()
        self.channels: list[Channel] = []
        self.runner: subprocess.Popen[bytes] | None = None
        self.watch: Watch | None = None
        self.collector: Collector | None = None

    def run(self) -> Verdict:
        """All of it, in order."""
        lost: tuple[str, ...] = ()
        try:
            self.voice.state("preparing")
            self.asked.interruptible = True
            if self.asked.count:
                raise Interrupted
            self._prepare()
            self.asked.interruptible = False
            self._start()
            self._watch_ranks()
            return self._conclude()
        except Interrupted:
            return Verdict("interrupted", f"stopped by {self.asked.by} before the start")
        except LlmxError as error:
            lost = error.hosts if isinstance(error, Unreachable) else ()
            return not_started(error, lost)
        except OSError as error:
            return of_the_disk(error, self.spec.run_dir)
        finally:
            self.asked.interruptible = False
            self.voice.console.close()
            self._end_processes(FAILURE_GRACE_S)

    def ended(self, verdict: Verdict) -> Ended:
        """What the decision about a restart needs."""
        progress, new = self.watch.progress if self.watch else None, self._new_step()
        first = progress.first_step if progress else None
        return Ended(
            outcome=verdict.outcome,
            cause=verdict.cause,
            name=verdict.name,
            launched=self.runner is not None,
            first_step=first,
            last_step=progress.last_step if progress else None,
            saved_step=new or first or None,
            new_checkpoint=new is not None,
            failed_step=verdict.step,
            lost_hosts=verdict.lost_hosts,
        )

    def _new_step(self) -> int | None:
        """The newest checkpoint that this attempt made: as rank 0 said, or as it lies here (the
        attempt may have ended between the commit and the word)."""
        progress = self.watch.progress if self.watch else None
        if progress is None or progress.first_step is None:
            return None
        found = [] if progress.saved_step is None else [progress.saved_step]
        for path in self.spec.run_dir.checkpoints.glob("step-*/manifest.json"):
            with contextlib.suppress(OSError, ValueError):  # it may just be removed
                if path.stat().st_mtime >= self.started:
                    found.append(int(path.parent.name.removeprefix("step-")))
        return max((step for step in found if step > progress.first_step), default=None)

    def _prepare(self) -> None:
        spec, voice = self.spec, self.voice
        self.before()
        check(spec.exp, spec.plan)
        check_programs(spec.exp, spec.plan)
        self.channels = start_agents(spec, self.inbox)
        greet(spec, self.channels)
        clear(spec, self.channels, voice.say)
        for warning in survey(spec, self.channels):
            (voice.log if self.again else voice.warn)(warning)
        self.spec = spec = settle(spec, self.channels)
        bring(spec, self.channels, voice.log if self.again else voice.say)
        self.collector = Collector(spec, self.channels, voice.log)
        self.collector.push_missing(voice.say)
        self.watch = Watch(spec, self.channels, self.inbox, voice.console, voice.log)
        self.watch.begin()

    def _start(self) -> None:
        spec = self.spec
        argv = transport_of(spec.plan.transport).argv(spec)
        env = runner_env(spec)
        hosts = ", ".join(f"{host.name} ({host.slots})" for host in spec.plan.hosts)
        ranks = "1 rank" if spec.plan.world_size == 1 else f"{spec.plan.world_size} ranks"
        self.voice.say(f"launching {ranks} over {spec.plan.transport}: {hosts}")
        with spec.run_dir.launcher_log.open("ab") as log:
            # A group of its own: DeepSpeed answers a Ctrl-C with `pkill -f` on a pattern that
            # is common to all its launches, so it must never see one.
            self.runner = subprocess.Popen(
                argv,
                cwd=spec.run_dir.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.voice.log(f"deepspeed is process {self.runner.pid}; port {spec.port}")
        self.voice.state("running")
        self.on_start()
        if self.collector is not None:
            self.collector.start()

    def _watch_ranks(self) -> None:
        """Until the attempt is over or has to be ended."""
        assert self.watch is not None
        assert self.runner is not None
        while True:
            self.watch.tick()
            self.voice.alive()
            if self.asked.count:
                self.watch.evidence.interrupted_at = self.asked.at
                self.watch.evidence.interrupted_by = self.asked.by
                grace_s = self.spec.exp.launch.stop_grace_s
                self.voice.say(
                    f"{self.asked.by}: ranks save a checkpoint and exit within {grace_s:.0f} s; "
                    "a second signal ends them at once"
                )
                return
            if self.watch.is_over(self.runner.poll()):
                return

    def _conclude(self) -> Verdict:
        """End what is left everywhere, then judge on all that was written."""
        assert self.watch is not None
        self.voice.state("ending")
        self.watch.evidence.ended_at = time.time()
        if self.asked.count and self.watch.failed_at is None:
            self._end_processes(self.spec.exp.launch.stop_grace_s, save=True)
        else:
            self._end_processes(FAILURE_GRACE_S)
        self.watch.tick(final=True)
        self.watch.collect_logs()
        return judge(self.watch.evidence, self.spec.plan)

    def _end_processes(self, grace_s: float, *, save: bool = False) -> None:
        """End the attempt on every host, bring its outputs back, let the agents go."""
        lost = set(self.watch.evidence.lost_hosts) if self.watch else set()
        for channel in self.channels:
            if channel.name in lost:  # nobody waits for its answers, the collector neither
                channel.lost_at = channel.lost_at or time.time()
        collector, self.collector = self.collector, None
        if collector is not None:
            collector.stop()
        asked = self.asked
        ending = Ending(
            self.spec,
            lost=lost,
            asked=lambda: asked.count,
            log=self.voice.log,
            warn=self.voice.warn,
        )
        channels, self.channels = self.channels, []
        launched = self.runner is not None
        channels = ending.end(channels, grace_s=grace_s, launched=launched, save=save)
        if self.runner is not None and channels:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.runner.wait(timeout=5)
                if self.watch is not None and code >= 0:
                    self.watch.evidence.runner_code = code
            if self.watch is not None:
                self.watch.take_rest()
            ending.bring_back(channels)
            if collector is not None:
                collector.finish([c for c in channels if c.lost_at is None])
        for channel in channels:
            channel.close(timeout_s=5 if channel.lost_at is None else 0.2)


def not_started(error: LlmxError, lost: tuple[str, ...] = ()) -> Verdict:
    """The verdict on a launch that was given up before a rank existed."""
    outcome = {ConfigError: "config", DataError: "data"}.get(type(error), "comm")
    return Verdict("host_lost" if lost else outcome, str(error), lost_hosts=lost)


def of_the_disk(error: OSError, run_dir: RunDir) -> Verdict:
    """The verdict where this process itself could not read or write."""
    where = error.filename or run_dir.root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Verdict("disk_full", f"{where}: no space left on the disk", NOTES["disk_full"])
    return Verdict(
        "crash",
        f"the supervisor cannot continue: {where}: {error.strerror or error}",
        f"check the file system of {run_dir.root} (mount, dmesg), then: python -m llmx resume "
        f"{run_dir.root}",
    )


def line_of(
    number: int, started: float, verdict: Verdict, ended: Ended, hosts: list[str]
) -> dict[str, object]:
    """The line of ``attempts.jsonl`` without the decision."""
    return {
        "attempt": number,
        "started": started,
        "ended": time.time(),
        "outcome": verdict.outcome,
        "cause": verdict.cause,
        "rank": verdict.rank,
        "host": verdict.host,
        "first_step": ended.first_step,
        "last_step": ended.last_step,
        "saved_step": ended.saved_step,
        "hosts": hosts,
    }
