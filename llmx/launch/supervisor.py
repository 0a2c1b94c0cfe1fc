"""Runs one experiment to its end, over as many attempts as it takes.

``supervise`` returns a ``Result`` and writes ``result.json`` last; however the run ends, and even
when this process is killed, no process of it is left on any host. An attempt that fails is
followed by another one from the newest checkpoint, where that makes sense (``restart.py``).

``python -m llmx`` calls it; ``cat RUN_DIR/logs/supervisor.log`` tells what it did and when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from textwrap import shorten
from typing import TextIO

from llmx.config.schema import Experiment
from llmx.launch.aftermath import (
    finish_mirror,
    print_failure,
    print_report,
    restarts_line,
    start_mirror,
)
from llmx.launch.attempt import Attempt, Voice, line_of, of_the_disk
from llmx.launch.console import Console, clock, duration
from llmx.launch.lost import Hosts
from llmx.launch.outcome import Verdict
from llmx.launch.record import Journal, only_supervisor, read_resume, run_id, write_resume
from llmx.launch.restart import Decision, Ended, decide
from llmx.launch.result import Result, exit_code_of
from llmx.launch.signals import Asked
from llmx.launch.spec import LaunchSpec, make_spec
from llmx.launch.waiting import Waiting
from llmx.plan.types import Plan
from llmx.rundir import RunDir, write_json

CAUSE_CHARACTERS = 160
"""Of a cause, in the line that tells a restart; ``attempts.jsonl`` has all of it."""


def supervise(
    exp: Experiment,
    plan: Plan,
    run_dir: RunDir,
    *,
    launch: LaunchSpec | None = None,
    stream: TextIO | None = None,
) -> Result:
    """Launch, watch, end, collect, report. Blocks until the run is over.

    LaunchError where another supervisor holds the run already.
    """
    spec = launch or make_spec(exp, plan, run_dir, port=0, token=run_id(run_dir))
    return Supervisor(spec, stream=stream).run()


class Supervisor:
    """One run. Used once."""

    def __init__(self, spec: LaunchSpec, *, stream: TextIO | None = None) -> None:
        self.run_dir = spec.run_dir
        self.exp, self.launch = spec.exp, spec.exp.launch
        self.console = Console(stream, total_steps=spec.exp.task.steps or spec.plan.total_steps)
        self.stream = stream or sys.stdout
        self.mirror: subprocess.Popen[bytes] | None = None
        self.journal = Journal(spec.run_dir)
        self.asked = Asked()
        self.history: list[Ended] = []
        self.attempt: Attempt | None = None
        self.number = len(self.journal.attempts)
        self.saved_step: int | None = None
        """The newest checkpoint of this supervisor's attempts."""
        self.result = Result(run_token=spec.token, started=time.time(), launched=False)
        waiting = Waiting(
            asked=lambda: self.asked.count > 0,
            wake=self.asked.wake,
            say=self._say,
            countdown=self.console.countdown,
            alive=self.journal.alive,
        )
        self.hosts = Hosts(spec, waiting, self._say, self._warn)
        self.waiting = waiting

    def run(self) -> Result:
        """All of it, in order; the run directory holds ``result.json`` afterwards."""
        token = self.result.run_token
        with only_supervisor(self.run_dir, token), self.asked.listening(self._say):
            self.run_dir.logs.mkdir(parents=True, exist_ok=True)
            self.run_dir.ranks.mkdir(parents=True, exist_ok=True)
            self.run_dir.result.unlink(missing_ok=True)
            self._say(f"run directory {self.run_dir.root}")
            try:
                verdict = self._attempts()
            except OSError as error:  # the disk of the run directory, between two attempts
                verdict = of_the_disk(error, self.run_dir)
            finally:
                self.console.close()
            self._record(verdict)
            self._after()
            self.journal.state("finished", attempt=self.number, why=self.result.outcome)
        return self.result

    def _attempts(self) -> Verdict:
        """Attempt after attempt, until one is the last; its verdict."""
        first, skip_steps = read_resume(self.run_dir)
        if self.launch.elastic and self.number and (gave_up := self._hosts_or_end()):
            return gave_up  # resumed while a host is still away
        while True:
            self.number += 1
            started = time.time()
            # Where it was told to begin, until there is a checkpoint that came after.
            step = None if any(ended.new_checkpoint for ended in self.history) else first
            verdict, ended = self._one_attempt(step, skip_steps)
            decision = decide(self.history, self.launch, self.exp.task)
            if self.asked.count and decision.action == "restart":
                decision = Decision("stop", f"{self.asked.by} arrived while the run was ending")
            skip_steps = [*skip_steps, *decision.skip_steps]
            hosts = [host.name for host in self.hosts.spec.plan.hosts]
            self.journal.ended(
                line_of(self.number, started, verdict, ended, hosts)
                | {"decision": decision.action, "why": decision.why, "wait_s": decision.wait_s}
                | ({"skip_steps": skip_steps} if skip_steps else {})
            )
            self._log(f"attempt {self.number}: {verdict.outcome}: {verdict.cause}")
            self._log(f"{decision.action}: {decision.why}")
            if decision.action != "restart":
                return self._last_word(verdict, decision)
            gave_up = self._until_restart(verdict, decision)
            if gave_up is not None:
                return gave_up

    def _one_attempt(self, step: int | None, skip_steps: list[int]) -> tuple[Verdict, Ended]:
        """``step``: where it begins, None for the newest checkpoint."""
        number = self.number
        voice = Voice(
            console=self.console,
            say=self._say,
            warn=self._warn,
            log=self._log,
            alive=self.journal.alive,
            state=lambda state: self.journal.state(state, attempt=number),
        )

        def before() -> None:
            write_resume(self.run_dir, step=step, skip_steps=skip_steps, attempt=number)

        self.attempt = Attempt(
            self.hosts.spec,
            voice,
            self.asked,
            again=bool(self.history),
            before=before,
            on_start=self._on_start,
        )
        verdict = self.attempt.run()
        ended = self.attempt.ended(verdict)
        self.saved_step = ended.saved_step or self.saved_step
        ended = dataclasses.replace(ended, saved_step=self.saved_step)
        self.history.append(ended)
        return verdict, ended

    def _on_start(self) -> None:
        """Ranks are being started: trackers live from now on through all attempts."""
        self.result.launched = True
        if self.mirror is None:
            self.mirror = start_mirror(self.hosts.whole)

    def _until_restart(self, verdict: Verdict, decision: Decision) -> Verdict | None:
        """Wait for what the next attempt needs. A verdict where there will be none."""
        last = self.history[-1].last_step
        where = "" if last is None else f" after step {last}"
        where += f", rank {verdict.rank}" if verdict.rank is not None else ""
        where += f" on {verdict.host}" if verdict.host else ""
        cause = shorten(verdict.cause, CAUSE_CHARACTERS, placeholder=" …")
        self._say(f"{verdict.outcome}{where}: {cause}")
        saved = "no checkpoint yet"
        if self.saved_step is not None:
            saved = f"newest checkpoint: step {self.saved_step}"
        self._say(
            f"restart {decision.restart} of {self.launch.max_restarts} in "
            f"{duration(decision.wait_s)}: {decision.why}; {saved}"
        )
        self.journal.state(
            "waiting", attempt=self.number, why=decision.why, until=time.time() + decision.wait_s
        )
        if not self.waiting.back_off(decision.wait_s, "restart in"):
            return self._ended_while_waiting()
        if decision.wait_for == "disk" and not self.waiting.disk(
            self.hosts.spec, verdict.host, limit_s=self.launch.host_wait_s
        ):
            return self._ended_while_waiting() if self.asked.count else verdict
        return self._hosts_or_end()

    def _hosts_or_end(self) -> Verdict | None:
        """Choose the hosts of the next attempt; a verdict where there will be none."""
        gave_up = self.hosts.choose()
        return self._ended_while_waiting() if self.asked.count else gave_up

    def _ended_while_waiting(self) -> Verdict:
        return Verdict(
            "interrupted", f"stopped by {self.asked.by} while waiting to restart", self._go_on()
        )

    def _last_word(self, verdict: Verdict, decision: Decision) -> Verdict:
        """The verdict of the run: the last attempt's, with what the attempts together say."""
        if verdict.outcome == "interrupted" and self.result.launched:
            saved = "no checkpoint was saved"
            if self.saved_step is not None:
                saved = f"checkpoint of step {self.saved_step} saved"
                last = self.history[-1].last_step
                if last is not None and last > self.saved_step:
                    saved += f", reached step {last}"
            return dataclasses.replace(
                verdict,
                cause=f"{verdict.cause}; {saved}",
                fix="; ".join(part for part in (self._go_on(), verdict.fix) if part),
            )
        if decision.action == "stop" and self.launch.max_restarts and len(self.history) > 1:
            cause = f"{verdict.cause}\nnot restarted: {decision.why}"
            return dataclasses.replace(verdict, cause=cause)
        return verdict

    def _go_on(self) -> str:
        return f"to resume: python -m llmx resume {self.run_dir.root}"

    def _record(self, verdict: Verdict) -> None:
        """Write ``result.json``."""
        result = self.result
        result.outcome, result.cause, result.fix = verdict.outcome, verdict.cause, verdict.fix
        result.failed_rank, result.host = verdict.rank, verdict.host
        result.traceback = verdict.traceback
        if verdict.rank is not None:
            result.log = str(self.run_dir.rank_log(verdict.rank))
        if self.attempt is not None and self.attempt.watch is not None:
            self.attempt.watch.progress.fill(result)
        if self.run_dir.final_model.is_dir():
            result.model = str(self.run_dir.final_model)
        result.attempts, result.restarts = len(self.journal.attempts), self.journal.restarts
        result.ended = time.time()
        result.exit_code = exit_code_of(result.outcome, launched=result.launched)
        try:
            write_json(self.run_dir.result, result.to_dict())
        except OSError as error:  # a full disk must not hide what happened
            self._warn(f"result.json cannot be written: {error}")
        self._log(f"{result.outcome}: {result.cause}")

    def _after(self) -> None:
        """Trackers end, the report is written; neither can fail the run."""
        warning = finish_mirror(self.mirror, self.exp.tracking.finish_timeout_s, self.run_dir)
        if warning:
            self._warn(warning)
        if not self.result.ok:
            print_failure(self.result, self.run_dir, self.stream)
        if self.result.launched:
            warning = print_report(self.run_dir, self.stream if self.result.ok else None)
            if warning:
                self._warn(warning)
        line = restarts_line(self.journal.attempts)
        if line:
            self._say(line)

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
