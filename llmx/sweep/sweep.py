"""One sweep while it runs: what is done with each trial, recorded in ``sweep.json`` as it happens.

A sweeper hands ``Runner.run`` the overrides of trials. They are composed in turn: a trial that is
the same as another one, cannot fit, or ran in an earlier attempt at the sweep is not started. The
others run in processes of their own (``process.py``, ``slurm.py``), beside each other where there
are slots for them (``slots.py``). A trial that fails does not stop the others.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from llmx import text as human
from llmx.compose.complete import Composed, complete, objective_of, plan_experiment
from llmx.config import Experiment, SweepConfig, experiment_from_dict
from llmx.config.hardware_rules import hardware_problems
from llmx.config.schema import FAILURES
from llmx.errors import INTERRUPTED, ConfigError, LlmxError, RunFailed
from llmx.launch import start_report, supervise
from llmx.launch.supervision.signals import catch
from llmx.lifecycle.knowledge import informed
from llmx.lifecycle.learned import learn
from llmx.lifecycle.start import prepare, run_composed
from llmx.observe.page.sweep import report_sweep
from llmx.observe.report.sweep_data import load_sweep, measure
from llmx.observe.report.sweep_table import known_of, write_sweep
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir
from llmx.run.snapshot import put_aside
from llmx.run.sweepdir import RUNNING, Sweep, Trial, identity, is_sweep, load, lock
from llmx.sweep.best import write_best
from llmx.sweep.halving import Halving, prepare_rung
from llmx.sweep.process import End, TrialProcess, end_earlier
from llmx.sweep.prune import OutOfMemory, impossible, key_of, needs_more
from llmx.sweep.screen import Screen
from llmx.sweep.slots import Placed, Slots, first_of, placed_at, placed_on
from llmx.sweep.slurm import SlurmJob, applies
from llmx.text import plural, shorter_path

FAILED = (*FAILURES, "refused", "failed")
MAX_TAG = 64
"""Characters of a tag of Weights & Biases."""
POLL_S = 0.1

Compose = Callable[[int, Sequence[str]], Mapping[str, Any]]
"""Number and overrides of a trial -> the values of its config, with its run directory."""


@dataclass(eq=False)
class Attempt:
    """A trial that is started, or runs."""

    trial: Trial
    typed: Experiment
    """Before it was completed."""
    on_cluster: Experiment
    """Completed, with all slots of the cluster."""
    composed: Composed
    """On the first slots of the cluster, wherever it runs, so that trials compare."""
    plan: Plan
    """On its own slots."""
    placed: Placed | None = None
    process: TrialProcess | SlurmJob | None = None

    def on_slots(self) -> Composed:
        """The trial on its own slots."""
        if self.placed is None:
            return self.composed
        return _informed(_placed(self.on_cluster, self.typed, self.placed))


class Runner:
    """Runs the trials of a sweep. They begin in turn; several may run at the same time."""

    def __init__(
        self, directory: Path, words: Sequence[str], *, cwd: Path, config_dir: str | None,
        compose: Compose,
    ) -> None:  # fmt: skip
        """``words``: the overrides as they were typed in ``cwd``, with ``--config-dir``."""
        self.sweep = Sweep(
            directory, words=list(words), cwd=str(cwd), config_dir=config_dir,
            started=time.time(), pid=os.getpid(), host=socket.gethostname(),
        )  # fmt: skip
        self.compose = compose
        self.ends: dict[int, BaseException | None] = {}
        """The trials that were reached, and the error of each that failed."""
        self.may_fail: Sequence[str] = ()
        """Outcomes from which a search learns: none that ``sweep.fail_fast`` is for."""
        self.stopped_by: int | None = None
        """The signal by which the user ended the sweep."""
        self.ending = False
        """No further trial is started."""
        self._settings: SweepConfig | None = None
        """``sweep.*`` of the trials, which all have the same."""
        self._halving: Halving | None = None
        self._screen = Screen(directory)
        self._running: list[Attempt] = []
        self._values: dict[int, Mapping[str, Any]] = {}
        """Values of the configs of trials, which are the same at each rung."""
        self._slots = Slots()
        self._first_with: dict[str, int] = {}
        """Key -> the first trial that has it."""
        self._out_of_memory: list[OutOfMemory] = []
        self._has_announced_stop = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the lock of the sweep, and continue what an earlier attempt left. What ends a single
        run, ends its trials and the sweep.

        Raises:
            ConfigError: another process runs it, or its directory contains another sweep.
        """
        self._lock = lock(self.sweep.directory)
        saved = catch(self._on_signal)
        try:
            if not self.ends and is_sweep(self.sweep.directory):
                self._continue()
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)
            os.close(self._lock)

    def _continue(self) -> None:
        directory, words = self.sweep.directory, self.sweep.words
        sweep = load(directory)
        if identity(sweep.words) != identity(words) or sweep.cwd != self.sweep.cwd:
            raise ConfigError(
                f"hydra.sweep.dir={directory}: contains another sweep ({' '.join(sweep.words)}). "
                "Give a directory of its own, or continue that one: python -m llmx sweep resume "
                f"{directory}"
            )
        for trial in sweep.trials:
            if trial.state == RUNNING and not trial.job:  # it ended with the sweep
                trial.started = None
        self.sweep = dataclasses.replace(
            sweep, words=words, pid=self.sweep.pid, host=self.sweep.host
        )

    def run(self, jobs: Mapping[int, Sequence[str]]) -> list[Trial]:
        """Run trials to their end, unless the sweep ends early. ``jobs``: overrides by number."""
        for index, overrides in jobs.items():
            self._expect(index, [word for word in overrides if not word.startswith("hydra.")])
        self.sweep.complete = False
        self.sweep.write()
        try:
            self._train(jobs)
            while self._halving is not None and not self.ending:
                going, stopped = self._halving.advance()
                self._show_stopped(stopped)
                if not going:
                    break
                halving = self._halving
                steps = (
                    "their whole run" if halving.is_last else f"step {halving.step(halving.rung)}"
                )
                self._screen.line(
                    f"rung {halving.rung + 1} of {halving.total_rungs}, to {steps}: "
                    f"{', '.join(trial.label for trial in going)}"
                )
                self._train({t.index: jobs[t.index] for t in going if t.index in jobs})
        finally:
            self._screen.close()
        left = jobs.keys() - self.ends.keys()
        if self.ending and (left or self.stopped_by):
            print(
                f"The sweep ends here; trials not started: {len(left)}. To go on: python -m llmx "
                f"sweep resume {shorter_path(self.sweep.directory)}, or the same command again",
                file=sys.stderr,
                flush=True,
            )
        return self.sweep.trials_of(jobs)

    def finish(self) -> None:
        """Every trial was reached: write and print the table, the files and the page of all."""
        self.sweep.complete = all(trial.outcome for trial in self.sweep.trials)
        self.sweep.write()
        report_sweep(load_sweep(self.sweep.directory), self.sweep.directory)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Start no further trial, and end those that run as a single run ends: with the first call
        they may save, with the second they are ended at once."""
        self.ending = True
        for attempt in self._running:
            if attempt.process is not None:
                attempt.process.signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and any(a.trial.job for a in self._running):
            # The terminal is gone; the jobs go on, and the sweep can be continued.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stopped_by = self.stopped_by or number
        self.stop(number)

    def _expect(self, index: int, overrides: Sequence[str]) -> None:
        """A trial that is going to run; what is recorded of it stays if its words are the same."""
        recorded = next((trial for trial in self.sweep.trials if trial.index == index), None)
        if recorded is not None and identity(recorded.overrides) == identity(overrides):
            recorded.overrides = overrides
        else:
            self._put(Trial(index, overrides, self._no_run_dir(index)))

    def _no_run_dir(self, index: int) -> Path:
        return self.sweep.directory / f"{index}_not_run"

    def _place_of(self, index: int, composed: Composed) -> Path:
        """The run directory of a trial; ConfigError for one that is not its alone."""
        place, sweep = Path(composed.experiment.run_dir), self.sweep.directory
        other_dirs = [trial.run_dir for trial in self.sweep.trials if trial.index != index]
        is_shared = any(
            place in {other, *other.parents} or other in place.parents for other in other_dirs
        )
        if is_shared or sweep not in place.parents:
            raise ConfigError(
                f"run_dir={place}: each trial has a directory of its own below {sweep}. Leave out "
                "run_dir."
            )
        return place

    def _put(self, trial: Trial) -> Trial:
        other_trials = [other for other in self.sweep.trials if other.index != trial.index]
        self.sweep.trials = sorted([*other_trials, trial], key=lambda other: other.index)
        return trial

    def _train(self, jobs: Mapping[int, Sequence[str]]) -> None:
        """Trials to their end, or to their next rung."""
        for index, overrides in jobs.items():
            if self.ending:
                break
            try:
                self._begin(index, overrides)
            except Exception as error:
                (trial,) = self.sweep.trials_of([index])
                if trial.state != RUNNING:  # refused
                    trial = self._put(Trial(index, trial.overrides, self._no_run_dir(index)))
                self._conclude(trial, error)
        while self._running:
            self._wait()

    # --- One trial ---------------------------------------------------------------------------

    def _begin(self, index: int, overrides: Sequence[str]) -> None:
        """Start a trial on slots of its own, for which it waits, unless it need not run: it did in
        an earlier attempt at this sweep, is the same as another one, or cannot fit.

        Raises:
            ConfigError: its config is refused.
        """
        (recorded,) = self.sweep.trials_of([index])
        attempt = self._composed(recorded, overrides)
        trial, settings = attempt.trial, attempt.composed.experiment.sweep
        first = self._first_with.setdefault(trial.key, index)
        if settings.prune and first != index:
            self._leave_out(trial, "same", f"the same config as trial {first}", same_as=first)
            return
        if recorded.key == trial.key:
            if _is_over(recorded, settings, self._halving):
                attempt.trial = recorded
                self._keep(attempt)
                return
            trial.rungs = recorded.rungs
        attempt.placed = self._wait_for_room(attempt.on_cluster)
        try:
            if not self.ending:
                self._start(attempt, recorded)
        finally:
            if attempt not in self._running:
                self._slots.give_back(attempt.placed)

    def _composed(self, recorded: Trial, overrides: Sequence[str]) -> Attempt:
        """The trial as these words compose it, planned; ``recorded``: what is known of it."""
        index = recorded.index
        values = self._values.get(index) or self.compose(index, overrides)
        typed = self._named(recorded, experiment_from_dict(dict(values)))
        on_cluster, problems = complete(typed)
        composed = _informed(self._on_first_slots(on_cluster, typed), problems)
        self._agree(composed.experiment)
        if self._halving is not None:
            self._values[index] = values
        key, place = _key(composed.experiment, on_cluster), self._place_of(index, composed)
        trial = Trial(index, recorded.overrides, place, key=key)
        return Attempt(trial, typed, on_cluster, composed, composed.plan)

    def _start(self, attempt: Attempt, recorded: Trial) -> None:
        """Start a trial on its slots, unless it cannot fit, or its Slurm job still runs."""
        trial, placed = attempt.trial, attempt.placed
        if recorded.state == RUNNING:
            job = SlurmJob(RunDir(recorded.run_dir), recorded.job)
            if recorded.key == trial.key:
                attempt.trial, attempt.process = recorded, job
                self._running.append(attempt)
                self._screen.began(f"{self._label(recorded)}: Slurm job {job.number}")
                return
            self._end_job(recorded, job)
        exp, on_slots = attempt.composed.experiment, attempt.on_slots()
        attempt.plan = on_slots.plan
        kind = None if placed is None else placed.kind
        rivals = [oom for oom in self._out_of_memory if oom.kind == kind]
        too_much = impossible(on_slots.experiment, on_slots.plan)
        too_much = too_much or needs_more(exp, on_slots.plan, rivals)
        if exp.sweep.prune and too_much:
            trial.fix = "sweep.prune=false runs it all the same"
            self._leave_out(trial, "pruned", too_much)
            return
        run = RunDir(trial.run_dir)
        end_earlier(run, grace_s=exp.launch.stop_grace_s + 30, notify=self._screen.line)
        continues = self._halving is not None and bool(trial.rungs) and run.config.is_file()
        if not continues and (aside := put_aside(run.root)):
            self._screen.line(f"{trial.label} the earlier attempt is now {aside.name}")
        if self._halving is not None:
            short = self._halving.shortened(on_slots.experiment)
            on_slots = dataclasses.replace(on_slots, experiment=short)
        trial.slots, trial.started = str(placed or ""), time.time()
        self._put(trial)
        self.sweep.write()
        attempt.process = self._launched(attempt, on_slots, continues=continues)
        if attempt.process is None:
            measure(trial, has_ended=True)
            self._conclude(trial, None, composed=on_slots)
            return
        self._running.append(attempt)
        if self.ending:  # a signal arrived meanwhile
            attempt.process.signal(signal.SIGINT)
        where = f" on {trial.slots}" if trial.slots else ""
        did = f"Slurm job {trial.job}" if trial.job else "started"
        self._screen.began(f"{self._label(trial)}: {did}{where}")

    def _launched(
        self, attempt: Attempt, composed: Composed, *, continues: bool
    ) -> TrialProcess | SlurmJob | None:
        """Run a trial in a process of its own; None where it is only planned, or is trained."""
        trial, placed = attempt.trial, attempt.placed
        overrides = list(trial.overrides)
        if composed.experiment.dry_run:
            run_composed(composed, overrides=overrides, is_trial=True)
            return None
        if continues:
            launch = prepare_rung(composed.experiment)
        else:
            launch = prepare(composed, overrides=overrides)
        if launch is None:
            return None
        if applies(launch.exp):
            job = SlurmJob.submit(launch)
            trial.job = job.number
            self.sweep.write()
            return job

        def supervised() -> int:
            exp, run = launch.exp, launch.run_dir
            code = supervise(exp, launch.plan, run, launch=launch, is_trial=True).exit_code
            # Beside another one it is slower than a run that has its hosts to itself.
            if code == 0 and (placed is None or placed.has_whole_hosts):
                learn(run, exp)
            return code

        return TrialProcess(launch.run_dir, supervised, lock=self._lock)

    def _named(self, trial: Trial, exp: Experiment) -> Experiment:
        """The experiment of a trial; trackers show its sweep as the group, unless there is one, and
        what is its own as tags."""
        tags = exp.tracking.tags
        own_words = self.sweep.own_words(trial)
        short = [word for word in own_words if len(word) <= MAX_TAG and word not in tags]
        group = exp.tracking.group or self.sweep.directory.name
        tracking = dataclasses.replace(exp.tracking, group=group, tags=[*tags, *short])
        return dataclasses.replace(exp, tracking=tracking)

    def _agree(self, exp: Experiment) -> None:
        """Take over ``sweep.*`` of a trial; ConfigError where another trial has other values."""
        settings = exp.sweep
        if self._settings is not None and settings != self._settings:
            first, other = vars(self._settings), vars(settings)
            keys = [f"sweep.{key}" for key in first if first[key] != other[key]]
            raise ConfigError(
                f"{', '.join(keys)}: must be the same for all trials of a sweep. Set it once."
            )
        self._settings = settings
        self.sweep.objective = objective_of(exp)
        if settings.halving is not None and self._halving is None and not exp.dry_run:
            self._halving = Halving(self.sweep, settings.halving, settings.halving_factor)

    def _keep(self, attempt: Attempt) -> None:
        """A trial that ran in an earlier attempt at the sweep is not run again."""
        trial = attempt.trial
        if trial.outcome == "oom":  # what did not fit there spares the larger ones there
            attempt.placed = placed_at(attempt.on_cluster.hardware.hosts, trial.slots)
            attempt.plan = attempt.on_slots().plan
            self._remember_oom(attempt)
        measure(trial)
        error: RunFailed | None = None
        if trial.failed:
            error = RunFailed(
                f"{trial.cause} (not run again: sweep.retry does not name {trial.outcome})"
            )
        self._conclude(trial, error)

    def _leave_out(
        self, trial: Trial, outcome: str, cause: str, *, same_as: int | None = None
    ) -> None:
        trial.outcome, trial.cause, trial.same_as = outcome, cause, same_as
        trial.ended = time.time()
        self._conclude(self._put(trial), None)

    def _remember_oom(self, attempt: Attempt) -> None:
        kind = None if attempt.placed is None else attempt.placed.kind
        exp = attempt.composed.experiment
        self._out_of_memory.append(OutOfMemory(attempt.trial.index, exp, attempt.plan, kind))

    def _end_job(self, trial: Trial, job: SlurmJob) -> None:
        self._screen.line(
            f"{trial.label} ending its Slurm job {job.number}, which is of another config"
        )
        job.signal(signal.SIGTERM)
        while job.poll() is None:
            time.sleep(POLL_S)

    # --- Slots -------------------------------------------------------------------------------

    def _on_first_slots(self, on_cluster: Experiment, typed: Experiment) -> Experiment:
        """The trial on the first slots, of those that it needs."""
        if on_cluster.launch.detach:
            raise ConfigError(
                "launch.detach=true: is for a single run, and a sweep waits for its trials. Leave "
                "it out, and start the sweep in tmux or with nohup."
            )
        count = on_cluster.sweep.slots_per_trial
        if count is None:
            return on_cluster
        problems = list(hardware_problems(on_cluster.hardware, on_cluster.zero))
        if problems:
            raise ConfigError("\n".join(problems))
        first = first_of(on_cluster.hardware, count)
        return _placed(on_cluster, typed, first)

    def _wait_for_room(self, on_cluster: Experiment) -> Placed | None:
        """Wait until a trial may start, or the sweep ends; its slots, if it has a part."""
        count, is_queued = on_cluster.sweep.slots_per_trial, applies(on_cluster)
        self._collect()
        while not self.ending and not on_cluster.dry_run:
            if is_queued and len(self._running) >= on_cluster.sweep.max_jobs:
                self._wait()
            elif count is None:
                if is_queued or not self._running:
                    return None
                self._wait()
            else:
                hosts, first = on_cluster.hardware.hosts, first_of(on_cluster.hardware, count)
                placed = self._slots.take(hosts, count, first)
                if is_queued and placed is None:  # Slurm has the job wait
                    self._slots = Slots()
                    placed = self._slots.take(hosts, count, first)
                if placed is not None:
                    return placed
                self._wait()
        return None

    # --- The end of a trial ------------------------------------------------------------------

    def _wait(self) -> None:
        """Report the trials that have ended; a moment later, if there are none."""
        if not self._collect():
            self._screen.tick()
            time.sleep(POLL_S)

    def _collect(self) -> bool:
        """Report the trials whose processes have ended; whether there were any."""
        if self.stopped_by and self._running and not self._has_announced_stop:
            self._has_announced_stop = True
            trials = plural(len(self._running), "trial")
            self._screen.line(f"Stopping {trials}; a second Ctrl-C ends them at once")
        ends = [(a, a.process, a.process.poll()) for a in self._running if a.process is not None]
        for attempt, process, end in ends:
            if end is not None:
                self._running.remove(attempt)
                self._slots.give_back(attempt.placed)
                self._ended(attempt, process.run, end)
        return any(end is not None for *_, end in ends)

    def _ended(self, attempt: Attempt, run: RunDir, end: End) -> None:
        trial = attempt.trial
        if not trial.job:
            start_report(run)  # while the next trial runs
        stopped = end.code in (-signal.SIGINT, -signal.SIGTERM, INTERRUPTED)
        error, outcome = end.error, end.outcome
        if self.ending and stopped and not run.result.is_file():
            error, outcome = RunFailed("stopped before its ranks were started"), "interrupted"
        elif error is None and end.code != 0:
            error = RunFailed(
                f"the run ended with exit code {end.code}; its result.json has the cause."
            )
        measure(trial, has_ended=True)
        if outcome:
            trial.outcome, trial.cause, trial.fix = outcome, f"{error}", ""
        if trial.outcome == "oom":
            self._remember_oom(attempt)
        self._conclude(trial, error, composed=attempt.composed, was_run=True)

    def _conclude(
        self,
        trial: Trial,
        error: BaseException | None,
        *,
        composed: Composed | None = None,
        was_run: bool = False,
    ) -> None:
        """Record and show how a trial ended, or why it was not run.

        ``composed``: where it was started now.
        """
        if not trial.outcome:
            is_refused = isinstance(error, LlmxError) and not RunDir(trial.run_dir).config.is_file()
            planned = composed is not None and composed.experiment.dry_run
            trial.outcome = "refused" if is_refused else "planned" if planned else "failed"
            if error is not None:
                trial.cause = f"{error}" if isinstance(error, LlmxError) else repr(error)
        trial.ended = trial.ended or time.time()
        stopped: list[Trial] = []
        if composed is not None and trial.outcome == "ok" and self._halving is not None:
            stopped = self._halving.record(trial)
        self.ends[trial.index] = error
        self.sweep.write()
        self._show_stopped([other for other in stopped if other is not trial])
        fails_fast = self._settings is not None and self._settings.fail_fast
        if fails_fast and trial.failed and trial.outcome not in (*self.may_fail, "interrupted"):
            self.stop()
        reached = [other for other in self.sweep.trials if other.index in self.ends]
        write_sweep(reached, directory=self.sweep.directory)
        write_best(self.sweep)
        show = self._screen.ended if was_run else self._screen.line
        ending = self._ending(trial, error, was_started=composed is not None, was_run=was_run)
        show(f"{self._label(trial)}: {ending}", failed=error is not None)

    def _ending(
        self, trial: Trial, error: BaseException | None, *, was_started: bool, was_run: bool
    ) -> str:
        """The outcome of a trial, and its cause or what it measured, on one line."""
        if error is not None:
            cause = human.one_line(trial.cause or str(error), limit=300)
            fix = f"; {human.one_line(trial.fix, limit=200)}" if trial.fix else ""
            log = f" (log: {trial.run_dir / 'logs'})" if was_run else ""
            return f"{trial.outcome}: {cause}{fix}{log}"
        if was_started:
            return f"{trial.outcome}  {known_of(trial, self.sweep.objective)}".rstrip()
        because = f": {trial.cause}" if trial.cause else " in an earlier attempt at this sweep"
        return f"{trial.outcome}{because}"

    def _show_stopped(self, trials: Sequence[Trial]) -> None:
        """Trials do not continue to the next rung."""
        if trials:
            self.sweep.write()
        for trial in trials:
            self._screen.line(f"{trial.label} stopped {trial.cause}")

    def _label(self, trial: Trial) -> str:
        """A trial for messages: ``[3] zero=stage1 batch.micro_batch=4``."""
        return f"{trial.label} {' '.join(self.sweep.own_words(trial) or trial.overrides)}"


def _is_over(trial: Trial, settings: SweepConfig, halving: Halving | None) -> bool:
    """Whether a trial of the same config, as an earlier attempt left it, is not run again."""
    if halving is not None and halving.has_passed(trial):
        return True
    if trial.outcome in ("", "pruned", "same", "interrupted"):  # or found out anew
        return False
    if halving is not None and trial.rungs and trial.outcome == "ok":  # to its next rung
        return False
    return trial.is_done or trial.outcome not in (settings.retry or FAILED)


def _informed(exp: Experiment, problems: Sequence[str] = ()) -> Composed:
    """The plan of a trial with its traces, by which it may be left out."""
    return informed(plan_experiment(exp, problems), choose=True, is_trial=True)


def _placed(on_cluster: Experiment, typed: Experiment, placed: Placed) -> Experiment:
    exp = placed_on(on_cluster, placed)
    if typed.zero.hpz_partition_size == 0:  # as completing has set it: the slots of a host
        zero = dataclasses.replace(exp.zero, hpz_partition_size=exp.hardware.hosts[0].slots)
        exp = dataclasses.replace(exp, zero=zero)
    return exp


def _key(exp: Experiment, on_cluster: Experiment) -> str:
    """The key of a trial, without the threads and cores that a part of the cluster adds."""
    hardware = dataclasses.replace(exp.hardware, env=on_cluster.hardware.env)
    return key_of(dataclasses.replace(exp, hardware=hardware, launch=on_cluster.launch))
