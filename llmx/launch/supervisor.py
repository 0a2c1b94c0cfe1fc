"""Runs one experiment to its end: starts ``deepspeed``, watches every rank, ends everything.

``supervise`` always returns a ``Result`` and always writes ``result.json``; however the run
ends, and even when this process is killed, no process of it is left on any host.

``python -m llmx`` calls it; ``cat RUN_DIR/logs/supervisor.log`` tells what it did and when.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from llmx.config.schema import Experiment
from llmx.errors import LlmxError
from llmx.launch.aftermath import finish_mirror, print_failure, print_report, start_mirror
from llmx.launch.console import Console, clock
from llmx.launch.ending import Ending
from llmx.launch.fleet import Channel, Message
from llmx.launch.outcome import Verdict, judge
from llmx.launch.prepare import bring, greet, settle, start_agents, survey
from llmx.launch.render import check, check_programs, runner_env
from llmx.launch.result import Result, exit_code_of
from llmx.launch.spec import LaunchSpec, make_spec
from llmx.launch.transports import transport_of
from llmx.launch.watch import Watch
from llmx.plan.types import Plan
from llmx.rundir import RunDir, write_json

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The user asked to end while nothing was running yet."""


def supervise(
    exp: Experiment,
    plan: Plan,
    run_dir: RunDir,
    *,
    launch: LaunchSpec | None = None,
    stream: TextIO | None = None,
) -> Result:
    """Launch, watch, end, collect, report. Blocks until the run is over."""
    spec = launch or make_spec(exp, plan, run_dir, port=0)
    return Supervisor(spec, stream=stream).run()


class Supervisor:
    """One run. Used once."""

    def __init__(self, spec: LaunchSpec, *, stream: TextIO | None = None) -> None:
        self.spec = spec
        self.plan = spec.plan
        self.run_dir = spec.run_dir
        self.console = Console(stream, total_steps=spec.exp.task.steps)
        self.stream = stream or sys.stdout
        self.inbox: queue.Queue[tuple[Channel, Message]] = queue.Queue()
        self.channels: list[Channel] = []
        self.runner: subprocess.Popen[bytes] | None = None
        self.mirror: subprocess.Popen[bytes] | None = None
        self.watch: Watch | None = None
        self.asked = 0
        """How often somebody asked to end the run."""
        self.asked_by = ""
        self.asked_at: float | None = None
        self.preparing = False
        self.result = Result(run_token=spec.token, started=time.time(), launched=False)

    def run(self) -> Result:
        """All of it, in order; the run directory holds ``result.json`` afterwards."""
        self.run_dir.logs.mkdir(parents=True, exist_ok=True)
        self.run_dir.ranks.mkdir(parents=True, exist_ok=True)
        self.run_dir.result.unlink(missing_ok=True)
        with self._signals():
            try:
                self.preparing = True
                self._prepare()
                self.preparing = False
                self._start()
                self._watch()
                verdict = self._conclude()
            except Interrupted:
                verdict = Verdict("interrupted", f"ended by {self.asked_by} before the start")
            except LlmxError as error:
                verdict = not_started(error)
            finally:
                self.preparing = False
                self.console.close()
                self._end_processes()
            self._record(verdict)
            self._after()
        return self.result

    def _prepare(self) -> None:
        check(self.spec.exp, self.plan)
        check_programs(self.spec.exp, self.plan)
        self.channels = start_agents(self.spec, self.inbox)
        greet(self.spec, self.channels)
        for warning in survey(self.spec, self.channels):
            self._warn(warning)
        self.spec = settle(self.spec, self.channels)
        bring(self.spec, self.channels, self._say)
        self.watch = Watch(self.spec, self.channels, self.inbox, self.console, self._log)
        self.watch.begin()

    def _start(self) -> None:
        argv = transport_of(self.plan.transport).argv(self.spec)
        env = runner_env(self.spec)
        hosts = ", ".join(f"{host.name} ({host.slots})" for host in self.plan.hosts)
        self._say(f"launching {self.plan.world_size} ranks over {self.plan.transport}: {hosts}")
        self._say(f"run directory {self.run_dir.root}")
        self.result.launched = True
        with self.run_dir.launcher_log.open("ab") as log:
            # A group of its own: DeepSpeed answers a Ctrl-C with `pkill -f` on a pattern that
            # is common to all its launches, so it must never see one.
            self.runner = subprocess.Popen(
                argv,
                cwd=self.run_dir.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._log(f"deepspeed is process {self.runner.pid}; port {self.spec.port}")
        self.mirror = start_mirror(self.spec)

    def _watch(self) -> None:
        """Until the run is over or has to be ended."""
        assert self.watch is not None
        assert self.runner is not None
        while True:
            self.watch.tick()
            if self.asked:
                self.watch.evidence.interrupted_at = self.asked_at
                self.watch.evidence.interrupted_by = self.asked_by
                self._say(f"{self.asked_by}: ending the run; once more ends it at once")
                return
            code = self.runner.poll()
            if self.watch.is_over(code):
                return

    def _conclude(self) -> Verdict:
        """End what is left everywhere, then judge on all that was written."""
        assert self.watch is not None
        graceful = self.watch.failed_at is None
        grace_s = self.spec.exp.launch.stop_grace_s if graceful else 3.0
        self._end_processes(grace_s)
        self.watch.tick(final=True)
        self.watch.collect_logs()
        return judge(self.watch.evidence, self.plan)

    def _end_processes(self, grace_s: float = 3.0) -> None:
        """End the run on every host, bring its outputs back, let the agents go."""
        ending = Ending(self.spec, asked=lambda: self.asked, log=self._log, warn=self._warn)
        channels, self.channels = self.channels, []
        channels = ending.end(channels, grace_s=grace_s, launched=self.runner is not None)
        if self.runner is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.runner.wait(timeout=5)
                if self.watch is not None and code >= 0:
                    self.watch.evidence.runner_code = code
            ending.bring_back(channels)
        for channel in channels:
            channel.close(timeout_s=5)

    def _record(self, verdict: Verdict) -> None:
        """Write ``result.json``."""
        result = self.result
        result.outcome, result.cause, result.fix = verdict.outcome, verdict.cause, verdict.fix
        result.failed_rank, result.host = verdict.rank, verdict.host
        result.traceback = verdict.traceback
        if verdict.rank is not None:
            result.log = str(self.run_dir.rank_log(verdict.rank))
        if self.watch is not None:
            self.watch.fill(result)
        if self.run_dir.final_model.is_dir():
            result.model = str(self.run_dir.final_model)
        result.ended = time.time()
        result.exit_code = exit_code_of(result.outcome, launched=result.launched)
        try:
            write_json(self.run_dir.result, result.to_dict())
        except OSError as error:  # a full disk must not hide what happened
            self._warn(f"result.json cannot be written: {error}")
        self._log(f"{result.outcome}: {result.cause}")

    def _after(self) -> None:
        """Trackers end, the report is written; neither can fail the run."""
        warning = finish_mirror(self.mirror, self.spec.exp.tracking.finish_timeout_s, self.run_dir)
        if warning:
            self._warn(warning)
        if not self.result.ok:
            print_failure(self.result, self.run_dir, self.stream)
        if self.result.launched:
            warning = print_report(self.run_dir, self.stream if self.result.ok else None)
            if warning:
                self._warn(warning)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and a closed terminal end the run in order; Ctrl-Z is refused."""
        saved = {}
        try:
            for number in _ENDING:
                # nohup and background shells have a signal ignored: then so do we.
                if signal.getsignal(number) != signal.SIG_IGN:
                    saved[number] = signal.signal(number, self._ask_to_end)
            saved[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._refuse_to_pause)
        except ValueError:
            saved = {}  # not the main thread: whoever owns it ends us
        try:
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)

    def _ask_to_end(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "hang-up"}
        self.asked_by = self.asked_by or names[signal.Signals(number)]
        self.asked_at = self.asked_at or time.time()
        if self.preparing:
            raise Interrupted

    def _refuse_to_pause(self, number: int, frame: FrameType | None) -> None:
        self._say("Ctrl-Z is refused: a paused supervisor would end the run; use tmux or nohup")

    def _say(self, text: str) -> None:
        self.console.say(text)
        self._log(text)

    def _warn(self, text: str) -> None:
        self.result.warnings.append(text)
        self._say(f"warning: {text}")

    def _log(self, text: str) -> None:
        with (
            contextlib.suppress(OSError),  # a full disk
            self.run_dir.supervisor_log.open("a", encoding="utf-8") as stream,
        ):
            stream.write(f"{clock()} {text}\n")


def not_started(error: LlmxError) -> Verdict:
    """The verdict on a launch that was given up before a rank existed."""
    from llmx.errors import ConfigError, DataError

    outcome = {ConfigError: "config", DataError: "data"}.get(type(error), "comm")
    return Verdict(outcome, str(error))
