"""Runs one experiment to its end, over as many attempts as it takes.

``supervise`` returns a ``Result`` and writes ``result.json`` last. However the run ends, and even
when this process is killed, no process of it is left on any host. A failed attempt is followed by
another one from the newest checkpoint, where ``restart.py`` decides so.

``python -m llmx`` calls it; ``cat RUN_DIR/logs/supervisor.log`` shows what it did and when.
"""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from textwrap import shorten
from typing import TextIO

from llmx.config.schema import Experiment
from llmx.failures.diagnose import Failure
from llmx.launch.files import make_spec
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.attempt import Attempt, local_disk_failure
from llmx.launch.supervision.backoff import Backoff, HostSelection, disk_problem
from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.finalize import (
    finish_tracker,
    print_failure,
    print_report,
    restarts_line,
    start_tracker,
)
from llmx.launch.supervision.journal import Journal, read_resume, supervisor_lock
from llmx.launch.supervision.outcome import AttemptRecord, Result, exit_code_of
from llmx.launch.supervision.restart import Decision, decide
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.launch.transports import transport_of
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, write_json
from llmx.run.snapshot import run_token, write_identity
from llmx.text import clock

CAUSE_CHARACTERS = 160
"""Length of a cause in the console line of a restart; ``attempts.jsonl`` has all of it."""


def supervise(
    exp: Experiment,
    plan: Plan,
    run_dir: RunDir,
    *,
    launch: LaunchSpec | None = None,
    stream: TextIO | None = None,
    is_trial: bool = False,
) -> Result:
    """Launch, monitor, shut down, collect, report. Blocks until the run is over.

    ``is_trial``: whoever waits for it has the report written (``start_report``), while the next
    trial runs.
    LaunchError where another supervisor holds the run already.
    """
    spec = launch or make_spec(exp, plan, run_dir, port=0, token=run_token(run_dir))
    return Supervisor(spec, stream=stream, is_trial=is_trial).run()


class Supervisor:
    """Runs the attempts of one run, and writes its result. Used once."""

    def __init__(
        self, spec: LaunchSpec, *, stream: TextIO | None = None, is_trial: bool = False
    ) -> None:
        self.spec = spec
        """The launch on every host; ``hosts.spec`` is that of the next attempt."""
        self.run_dir = spec.run_dir
        self.launch = spec.exp.launch
        if not transport_of(spec.plan.transport).restarts:
            self.launch = dataclasses.replace(self.launch, max_restarts=0)
        self.stream = stream or sys.stdout
        self.is_trial = is_trial
        self.console = Console(stream, total_steps=spec.exp.task.steps or spec.plan.total_steps)
        self.result = Result(
            run_id=write_identity(spec.run_dir), started=time.time(), launched=False
        )
        self.log = RunLog(self.run_dir.supervisor_log, self.console, self.result.warnings)
        self.journal = Journal(spec.run_dir)
        self.shutdown = ShutdownRequest()
        self.backoff = Backoff(self.log, self.journal, self.shutdown)
        self.hosts = HostSelection(spec, self.backoff)
        self.history: list[AttemptRecord] = []
        self.attempt: Attempt | None = None
        self.number = len(self.journal.attempts)
        self.saved_step: int | None = None
        """The newest checkpoint of this supervisor's attempts."""
        self.tracker: subprocess.Popen[bytes] | None = None

    def run(self) -> Result:
        """Run to the end of the run; the run directory holds ``result.json`` afterwards."""
        with (
            supervisor_lock(self.run_dir, self.result.run_id),
            self.shutdown.handle_signals(self.log.info, stop_file=self.run_dir.stop),
        ):
            self.run_dir.logs.mkdir(parents=True, exist_ok=True)
            self.run_dir.ranks.mkdir(parents=True, exist_ok=True)
            self.run_dir.result.unlink(missing_ok=True)
            self.log.info(f"run directory {self.run_dir.root}")
            try:
                outcome = self._run_attempts()
            except OSError as error:  # the disk of the run directory, between two attempts
                outcome = local_disk_failure(error, self.run_dir)
            finally:
                self.console.close()
            self._write_result(outcome)
            self._finalize()
            self.journal.state("finished", attempt=self.number, why=self.result.outcome)
        return self.result

    def _run_attempts(self) -> Failure:
        """Attempt after attempt, until one is the last; the outcome of the run."""
        first, skip_steps = read_resume(self.run_dir)
        if self.launch.elastic and self.number and (failure := self._select_hosts()):
            return failure  # resumed while a host is still missing
        while True:
            self.number += 1
            # The step that the user chose, until there is a checkpoint after it.
            step = None if any(record.new_checkpoint for record in self.history) else first
            record = self._run_attempt(step, skip_steps)
            decision = decide(self.history, self.launch, self.spec.exp.task)
            if self.shutdown.count and decision.action == "restart":
                decision = Decision("stop", f"{self.shutdown.source} arrived during the shutdown")
            skip_steps = [*skip_steps, *decision.skip_steps]
            self.journal.add_attempt(
                record.to_json(self.number)
                | {"decision": decision.action, "why": decision.why, "wait_s": decision.wait_s}
                | ({"skip_steps": skip_steps} if skip_steps else {})
            )
            outcome = record.outcome
            self.log.debug(f"attempt {self.number}: {outcome.kind}: {outcome.cause}")
            self.log.debug(f"{decision.action}: {decision.why}")
            if decision.action != "restart":
                return self._final_outcome(outcome, decision)
            failure = self._wait_for_restart(record, decision)
            if failure is not None:
                return failure

    def _run_attempt(self, step: int | None, skip_steps: Sequence[int]) -> AttemptRecord:
        """``step``: the one to resume from, None for the newest checkpoint."""
        self.attempt = Attempt(
            self.hosts.spec,
            self.log,
            self.journal,
            self.shutdown,
            number=self.number,
            is_restart=bool(self.history),
            is_trial=self.is_trial,
            on_start=self._on_start,
            step=step,
            skip_steps=skip_steps,
        )
        record = self.attempt.run()
        self.saved_step = record.saved_step or self.saved_step
        record = dataclasses.replace(record, saved_step=self.saved_step)
        self.history.append(record)
        return record

    def _on_start(self) -> None:
        """Ranks are being started; the tracker process lives through all attempts."""
        self.result.launched = True
        if self.tracker is None:
            self.tracker = start_tracker(self.spec)

    def _wait_for_restart(self, record: AttemptRecord, decision: Decision) -> Failure | None:
        """Wait for what the next attempt needs. An outcome where there is no next attempt."""
        outcome = record.outcome
        where = "" if record.last_step is None else f" after step {record.last_step}"
        where += "" if outcome.rank is None else f", rank {outcome.rank}"
        where += f" on {outcome.host}" if outcome.host else ""
        cause = shorten(outcome.cause, CAUSE_CHARACTERS, placeholder=" …")
        self.log.info(f"{outcome.kind}{where}: {cause}")
        saved = "no checkpoint yet"
        if self.saved_step is not None:
            saved = f"newest checkpoint: step {self.saved_step}"
        self.log.info(
            f"restart {decision.restart} of {self.launch.max_restarts} in "
            f"{clock(decision.wait_s)}: {decision.why}; {saved}"
        )
        self.journal.state(
            "waiting", attempt=self.number, why=decision.why, until=time.time() + decision.wait_s
        )
        if not self.backoff.sleep(decision.wait_s):
            return self._interrupted_while_waiting()
        if decision.wait_for == "disk" and self._wait_for_disk(outcome.host):
            return self._interrupted_while_waiting() if self.shutdown.count else outcome
        return self._select_hosts()

    def _wait_for_disk(self, host: str | None) -> str:
        """Wait until the disk of the run directory on ``host`` has space for a checkpoint; the
        problem that is left."""
        where = f"{self.run_dir.root} on {host or 'this machine'}"

        def problem() -> str:
            text = disk_problem(self.hosts.spec, host)
            return text and f"{where} {text}: waiting for the disk"

        return self.backoff.wait(problem, limit_s=self.launch.host_wait_s)

    def _select_hosts(self) -> Failure | None:
        """Select the hosts of the next attempt; an outcome where there is none."""
        failure = self.hosts.select()
        return self._interrupted_while_waiting() if self.shutdown.count else failure

    def _interrupted_while_waiting(self) -> Failure:
        return Failure(
            "interrupted",
            f"stopped by {self.shutdown.source} while waiting to restart",
            self._how_to_resume(),
            stopped_by=self.shutdown.kind,
        )

    def _final_outcome(self, outcome: Failure, decision: Decision) -> Failure:
        """The outcome of the run: that of the last attempt, and what the attempts add to it."""
        if outcome.kind == "interrupted":
            newest = self.run_dir.newest_step()
            saved = f"newest checkpoint: step {newest}" if newest else "no checkpoint was saved"
            if self.saved_step is not None:
                saved = f"checkpoint of step {self.saved_step} saved"
                last = self.history[-1].last_step
                if last is not None and last > self.saved_step:
                    saved += f", reached step {last}"
            self.result.other_fix = outcome.fix
            return dataclasses.replace(
                outcome,
                cause=f"{outcome.cause}; {saved}",
                fix="; ".join(part for part in (self._how_to_resume(), outcome.fix) if part),
            )
        if decision.action == "stop" and self.launch.max_restarts and len(self.history) > 1:
            cause = f"{outcome.cause}\nnot restarted: {decision.why}"
            return dataclasses.replace(outcome, cause=cause)
        return outcome

    def _how_to_resume(self) -> str:
        return f"to resume: python -m llmx resume {shlex.quote(str(self.run_dir.root))}"

    def _write_result(self, outcome: Failure) -> None:
        result = self.result
        result.outcome, result.cause = outcome.kind, outcome.cause
        result.failure = outcome.name
        result.stopped_by = outcome.stopped_by
        result.signal = self.shutdown.signal
        # Commands that are printed can be pasted.
        result.fix = outcome.fix.replace("RUN_DIR", shlex.quote(str(self.run_dir.root)))
        result.failed_rank, result.host = outcome.rank, outcome.host
        result.traceback = outcome.traceback
        if outcome.rank is not None:
            result.log = str(self.run_dir.rank_log(outcome.rank))
        if self.attempt is not None and self.attempt.monitor is not None:
            self.attempt.monitor.progress.fill(result)
        if self.run_dir.final_model.is_dir():
            result.model = str(self.run_dir.final_model)
        result.attempts, result.restarts = len(self.journal.attempts), self.journal.restarts
        result.ended = time.time()
        result.exit_code = exit_code_of(result.outcome, launched=result.launched)
        try:
            write_json(self.run_dir.result, result.to_dict())
        except OSError as error:  # a full disk must not hide what happened
            self.log.warning(f"cannot write result.json: {error}")
        self.log.debug(f"{result.outcome}: {result.cause}")

    def _finalize(self) -> None:
        """End the tracker process, print the failure or the report; nothing here fails the run."""
        timeout_s = self.spec.exp.tracking.finish_timeout_s
        warning = finish_tracker(self.tracker, timeout_s, self.run_dir)
        if warning:
            self.log.warning(warning)
        if not self.result.ok:
            print_failure(self.result, self.run_dir, self.stream)
        if self.result.launched and not self.is_trial:
            warning = print_report(self.run_dir, self.stream if self.result.ok else None)
            if warning:
                self.log.warning(warning)
        line = restarts_line(self.journal.attempts)
        if line:
            self.log.info(line)
