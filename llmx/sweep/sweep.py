"""One sweep while it runs: what is done with each trial, written down as it happens.

The Hydra launcher plugin begins trials, in turn; Hydra calls the job of ``python -m llmx``, which
asks ``next`` for what it is to run, and hands that to ``launch``. The trial then runs in a process
of its own (``process.py``), beside others where there are slots for them (``slots.py``), and the
plugin is told when it ended. Hydra hands a job nothing but its config, so the sweep that runs is
found by ``current()``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from llmx.compose.complete import Composed, complete, plan_experiment
from llmx.compose.short_trial import objective_of
from llmx.config import Experiment, SweepConfig, experiment_from_dict
from llmx.config.hardware_rules import hardware_problems
from llmx.config.schema import FAILURES
from llmx.errors import INTERRUPTED, ConfigError, LlmxError, RunFailed
from llmx.launch import start_report, supervise
from llmx.launch.spec import LaunchSpec
from llmx.launch.transports import transport_of
from llmx.lifecycle.learned import learn
from llmx.plan.types import Plan
from llmx.run.metrics import Metric
from llmx.run.rundir import RunDir
from llmx.sweep import journal as journals
from llmx.sweep.halving import Rungs, at_rung, better
from llmx.sweep.journal import ENDED, RUNNING, Entry, Journal
from llmx.sweep.process import End, Ended, TrialProcess, end_earlier
from llmx.sweep.prune import OutOfMemory, impossible, key_of, needs_more
from llmx.sweep.slots import Placed, Slots, first_of, placed_at, placed_on
from llmx.sweep.slurm import SlurmJob, applies
from llmx.sweep.tracked import Replays
from llmx.text import plural

STOPPED = "stopped"
FAILED = (*FAILURES, "refused", "failed")
MAX_TAG = 64
"""Characters of a tag of Weights & Biases."""
POLL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_CURRENT: ContextVar[Sweep | None] = ContextVar("llmx_sweep", default=None)


def current() -> Sweep | None:
    """The sweep whose trial runs; None of a single run."""
    return _CURRENT.get()


class Process(Protocol):
    """What a trial runs in."""

    run: RunDir

    def poll(self) -> End | None:
        """How it ended; None while it runs."""

    def signal(self, number: int) -> None:
        """Pass a signal on."""


@dataclass
class Taken:
    """A trial that has begun."""

    entry: Entry
    before: Entry
    """What was known of it before."""
    skipped: bool = False
    """Whether it is not run now."""
    composed: Composed | None = None
    """On the first slots of the cluster, wherever it runs, so that trials compare."""
    plan: Plan | None = None
    """On its own slots."""
    placed: Placed | None = None
    ran_on: Placed | None = None
    """The slots that it had in an earlier attempt."""
    process: Process | None = None
    continues: bool = False
    """It goes on from its checkpoint, to the next rung of ``sweep.halving``."""
    put_off: bool = False
    """The sweep ends before it could start."""


class Sweep:
    """The trials of a sweep. They begin in turn; several may run at the same time."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.settings = SweepConfig()
        """``sweep.*`` of the trials, which all have the same."""
        self.on_end: Callable[[Taken, LlmxError | None], None] = lambda taken, error: None
        """Called for each trial whose process has ended."""
        self.on_stop: Callable[[Entry], None] = lambda entry: None
        """Called for each trial that is stopped at a rung."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called often while trials run."""
        self.say: Callable[[str], None] = print
        self.may_fail: Sequence[str] = ()
        """Outcomes from which a search learns: none that ``sweep.fail_fast`` is for."""
        self.stopped_by: int | None = None
        """The signal by which the user ended the sweep."""
        self.ending = False
        """No further trial is started."""
        self.now = Taken(Entry(0, []), Entry(0, []))
        """The trial that began last."""
        self.rung = 0
        """Of ``sweep.halving``; the first is 0."""
        self._whole = False
        """Whether the trials of now train to the end of their runs."""
        self._totals: dict[int, int] = {}
        """Steps of the whole runs of trials, as far as they are known."""
        self._runs: list[Taken] = []
        """Trials whose processes run."""
        self._slots = Slots()
        self._replays = Replays()
        self._seen: dict[str, int] = {}
        """Key -> the first trial that has it."""
        self._out_of_memory: list[tuple[OutOfMemory, tuple[str, float | None] | None]] = []
        """With the devices and the RAM that it had, of a part of the cluster."""
        self._declared: dict[str, Metric] = {}
        """What the tasks of the trials measure."""
        self._told = self._announced = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """While it is the current one. What ends a single run, ends its trials and the sweep."""
        token = _CURRENT.set(self)
        main = threading.current_thread() is threading.main_thread()
        saved: dict[signal.Signals, Any] = {}
        for number in STOP_SIGNALS if main else ():
            # nohup and background shells ignore a signal: then it stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                saved[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)
            _CURRENT.reset(token)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        jobs = [taken for taken in self._runs if isinstance(taken.process, SlurmJob)]
        if number == signal.SIGHUP and jobs:
            # The terminal is gone; the jobs go on, and the sweep can be continued.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stopped_by = self.stopped_by or number
        self.stop(number)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Start no further trial, and end those that run as a single run ends: with the first call
        they may save, with the second they are ended at once."""
        self.ending = True
        for taken in self._runs:
            if taken.process is not None:
                taken.process.signal(number)

    def expect(self, trials: Sequence[tuple[int, Sequence[str]]]) -> None:
        """Trials that are going to run, with their numbers."""
        for index, overrides in trials:
            self.journal.entry(index, overrides)
        self.journal.complete = False
        self.journal.write()

    @property
    def common(self) -> set[str]:
        """The words that all trials share."""
        words = [set(entry.overrides) for entry in self.journal.trials]
        return set.intersection(*words) if words else set()

    def own(self, overrides: Sequence[str]) -> list[str]:
        """The words of a trial that are not those of all."""
        common = self.common
        return [word for word in overrides if word not in common] or list(overrides)

    def begin(self, index: int, overrides: Sequence[str]) -> Taken:
        """The next trial is composed now."""
        before = self.journal.entry(index, overrides)
        self.now = Taken(Entry(index, list(overrides)), before)
        return self.now

    def named(self, exp: Experiment) -> Experiment:
        """The experiment of the trial; trackers show its sweep as the group, unless there is one,
        and what is its own as tags."""
        common = self.common
        own = [word for word in self.now.entry.overrides if word not in common]
        tags = exp.tracking.tags
        short = [word for word in own if len(word) <= MAX_TAG and word not in tags]
        group = exp.tracking.group or self.journal.directory.name
        tracking = dataclasses.replace(exp.tracking, group=group, tags=[*tags, *short])
        return dataclasses.replace(exp, tracking=tracking)

    def next(self, values: Mapping[str, Any]) -> Composed | None:
        """What the trial that began is to run, on slots of its own, for which it waits. None where
        it need not run: it did in an earlier attempt at this sweep, is the same as another one,
        cannot fit, or the sweep ends.

        Raises:
            RunFailed: it failed in an earlier attempt and is not to run again (``sweep.retry``).
            ConfigError: the trials differ in ``sweep.*``.
        """
        taken = self.now
        entry, before = taken.entry, taken.before
        typed = self.named(experiment_from_dict(dict(values)))
        whole, problems = complete(typed)
        composed = taken.composed = plan_experiment(self._first(whole, typed), problems)
        exp = composed.experiment
        self._settle(exp.sweep, exp.checkpoint.metric)
        entry.key = _key(exp, whole)
        entry.run_dir = journals.relative(Path(exp.run_dir), self.journal.directory)
        first = self._seen.setdefault(entry.key, entry.index)
        if self.settings.prune and first != entry.index:
            self._leave_out(taken, "same", f"the same config as trial {first}", same_as=first)
            return None
        known = before.key == entry.key
        if known and self._has_passed(before):
            taken.entry, taken.skipped = before, True
            return None
        goes_on = known and self._halves(exp) and bool(before.rungs)
        stands = self._stands(before.outcome) and not (goes_on and before.outcome == "ok")
        if before.state == ENDED and known and stands:
            taken.entry, taken.skipped = before, True
            self._where_it_ran(taken, whole, typed)
            if not before.good:
                raise RunFailed(
                    f"{before.cause} (not run again: sweep.retry does not name {before.outcome})"
                )
            return None
        if not self._wait_for_room(taken, whole):
            taken.put_off = True
            return None
        if before.state == RUNNING and before.job and self._adopt(taken):
            return None
        if taken.placed is not None:
            placed = _placed(whole, typed, taken.placed)
            composed = plan_experiment(placed)
        taken.plan = composed.plan
        if self.settings.prune and (why := self._too_much(taken, composed.experiment)):
            self._free(taken)
            self._leave_out(taken, "pruned", why, fix="sweep.prune=false runs it all the same")
            self._replays.left_out(
                composed, "pruned", why, entry.fix,
                directory=self.journal.directory, overrides=entry.overrides,
            )  # fmt: skip
            return None
        composed = self._at_rung(composed)
        run = RunDir(Path(exp.run_dir))
        end_earlier(run, grace_s=exp.launch.stop_grace_s + 30, notify=self.say)
        entry.rungs = list(before.rungs) if known else []
        taken.continues = goes_on and run.config.is_file()
        if not taken.continues and (aside := journals.put_aside(run.root)):
            self.say(f"[{entry.index}] the earlier attempt is now {aside.name}")
            run.root.mkdir(parents=True, exist_ok=True)
        entry.state, entry.started = RUNNING, time.time()
        self.journal.put(entry)
        return composed

    def launch(self, exp: Experiment, plan: Plan, run: RunDir, launch: LaunchSpec) -> int:
        """Run the trial that began in a process of its own; returns at once, 0."""
        taken = self.now
        if applies(exp):
            taken.process = job = SlurmJob.submit(launch)
            taken.entry.job = job.number
            self.journal.put(taken.entry)
        else:
            # Beside another one it is slower than a run that has its hosts to itself.
            teaches = taken.placed is None or taken.placed.has_whole_hosts

            def supervised() -> int:
                code = supervise(exp, plan, run, launch=launch, is_trial=True).exit_code
                if code == 0 and teaches:
                    learn(run, exp)
                return code

            taken.process = TrialProcess(run, supervised)
        self._runs.append(taken)
        if self.ending:  # a signal arrived meanwhile
            taken.process.signal(signal.SIGINT)
        return 0

    def wait(self) -> None:
        """Until no trial runs; those that end meanwhile are reported."""
        while self._runs:
            if not self._collect():
                self.on_wait()
                time.sleep(POLL_S)

    def end(
        self,
        taken: Taken,
        outcome: str,
        cause: str,
        fix: str,
        run_dir: Path,
        *,
        declared: Mapping[str, Metric],
        steps: int | None = None,
        total: int | None = None,
        value: float | None = None,
    ) -> Entry:
        """The trial is over. What was not run keeps what is known of it.

        ``declared``: what its task measures. ``value``: its objective, after so many
        ``steps`` of ``total``.
        """
        kind = _kind(taken.placed or taken.ran_on)
        self._free(taken)
        entry, composed = taken.entry, taken.composed
        if not taken.skipped:
            entry.state, entry.outcome, entry.cause, entry.fix = ENDED, outcome, cause, fix
            entry.run_dir = journals.relative(run_dir, self.journal.directory)
            entry.ended = time.time()
            if composed is not None and entry.outcome not in journals.GOOD:
                self._replays.failed(composed, RunDir(run_dir))
            if outcome == "ok" and self.settings.halving is not None:
                entry.rungs = [*entry.rungs[: self.rung], [steps, value]]
        if total is not None:
            self._totals[entry.index] = total
        # Each time: a first trial that was refused has told neither objective nor metrics.
        self._declared.update(declared)
        self.journal.mode = mode_of(self.journal.objective, self._declared)
        if entry.outcome == "oom" and composed is not None:
            plan = taken.plan or composed.plan
            known = OutOfMemory(entry.index, composed.experiment, plan)
            self._out_of_memory.append((known, kind))
        self.journal.put(entry)
        if not taken.skipped and entry.outcome == "ok":
            self._stop_early(entry.index)
        expected = (*journals.GOOD, *self.may_fail, "interrupted")
        if self.settings.fail_fast and entry.outcome not in expected:
            self.stop()
        return entry

    # --- Successive halving ------------------------------------------------------------------

    def halve(self) -> list[int]:
        """The trials that go on to the next rung, which begins; those that do not are stopped.
        Empty where all is trained, or the sweep ends."""
        rungs = self._rungs()
        if rungs is None or self._whole or self.ending:
            return []
        reached = self._reached()
        if not reached or self._is_whole(rungs.stop(self.rung)):
            return []
        left = better(reached, self.journal.mode)[: rungs.keep(len(reached))]
        for index in reached.keys() - set(left):
            self._stop_at_rung(index)
        self.rung += 1
        self._whole = len(left) <= 1 or self._is_whole(rungs.stop(self.rung))
        self._seen.clear()
        going = ", ".join(f"[{index}]" for index in sorted(left))
        steps = "their whole run" if self._whole else f"step {rungs.stop(self.rung)}"
        if left:
            self.say(f"rung {self.rung + 1} of {self._count()}, to {steps}: {going}")
        return sorted(left)

    def _halves(self, exp: Experiment) -> bool:
        return exp.sweep.halving is not None and not exp.dry_run

    def _rungs(self) -> Rungs | None:
        first = self.settings.halving
        return None if first is None else Rungs(first, self.settings.halving_factor)

    def _at_rung(self, composed: Composed) -> Composed:
        """The trial up to the rung of now."""
        exp, rungs = composed.experiment, self._rungs()
        if rungs is None or exp.dry_run:
            return composed
        stop = rungs.stop(self.rung)
        total = exp.task.steps
        if self._whole or (total is not None and stop >= total):
            return composed
        measures = self.journal.objective.startswith("eval/")
        return dataclasses.replace(composed, experiment=at_rung(exp, stop, measures=measures))

    def _has_passed(self, before: Entry) -> bool:
        """Whether a trial has reached this rung, in an earlier attempt at the sweep.

        Raises:
            ConfigError: it was compared at other steps.
        """
        rungs = self._rungs()
        if rungs is None or not before.rungs:
            return False
        if before.outcome == STOPPED:
            return True
        if len(before.rungs) <= self.rung:
            return False
        steps = before.rungs[self.rung][0]
        if len(before.rungs) > self.rung + 1 and steps != rungs.stop(self.rung):
            raise ConfigError(
                f"sweep.halving={rungs.first}, sweep.halving_factor={rungs.factor}: this sweep has "
                f"compared its trials at step {steps:g}. Leave them as they were, or start a new "
                "sweep (sweep.resume=false)."
            )
        return True

    def _reached(self) -> dict[int, float | None]:
        """What was measured at this rung."""
        return {
            entry.index: entry.rungs[self.rung][1]
            for entry in self.journal.trials
            if len(entry.rungs) > self.rung
        }

    def _is_whole(self, stop: int) -> bool:
        """Whether no trial is longer than that."""
        totals = [
            total
            for entry in self.journal.trials
            if len(entry.rungs) >= self.rung and entry.outcome != STOPPED
            if (total := self._totals.get(entry.index)) is not None
        ]
        return bool(totals) and max(totals) <= stop

    def _count(self) -> int:
        """How many rungs there are."""
        rungs = self._rungs()
        assert rungs is not None
        started = sum(bool(entry.rungs) for entry in self.journal.trials)
        return rungs.count(started, max(self._totals.values(), default=None))

    def _stop_early(self, now: int) -> None:
        """Stop what cannot be among the better half any more: its checkpoint is not kept until the
        last trial has reached the rung."""
        rungs = self._rungs()
        if rungs is None or self._whole or self._is_whole(rungs.stop(self.rung)):
            return
        if self.rung == 0:
            going = len(self.journal.trials)
        else:
            going = sum(
                len(entry.rungs) >= self.rung and not self._stopped_before(entry)
                for entry in self.journal.trials
            )
        for index in better(self._reached(), self.journal.mode)[rungs.keep(going) :]:
            self._stop_at_rung(index, say=index != now)

    def _stopped_before(self, entry: Entry) -> bool:
        return entry.outcome == STOPPED and len(entry.rungs) <= self.rung

    def _stop_at_rung(self, index: int, *, say: bool = True) -> None:
        """A trial does not go on; its checkpoints are removed."""
        entry = next(each for each in self.journal.trials if each.index == index)
        if entry.outcome == STOPPED or len(entry.rungs) != self.rung + 1:
            return
        steps, value = entry.rungs[self.rung]
        entry.outcome = STOPPED
        entry.cause = f"at rung {self.rung + 1} of {self._count()}, after {steps or 0:g} steps"
        if value is None or not math.isfinite(value):
            entry.cause += f", without a value of {self.journal.objective}"
        self.journal.put(entry)
        run = RunDir(self.journal.directory / entry.run_dir)
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        if say:
            self.on_stop(entry)

    def finish(self) -> None:
        """Every trial was reached."""
        self._replays.finish()
        self.journal.complete = all(entry.state == ENDED for entry in self.journal.trials)
        self.journal.write()

    def _first(self, whole: Experiment, typed: Experiment) -> Experiment:
        """The trial on the first slots, of those that it needs."""
        count = whole.sweep.slots_per_trial
        if count is None:
            return whole
        problems = list(hardware_problems(whole.hardware, whole.zero))
        if problems:
            raise ConfigError("\n".join(problems))
        first = first_of(whole.hardware, count)
        part = any(len(slots) < host.slots for host, slots in first.shares)
        gpus = whole.hardware.devices[first.device].accelerator == "cuda"
        transport = transport_of(whole.launch.transport)
        if transport.device_choice and not transport.allocates and part and gpus:
            raise ConfigError(
                f"sweep.slots_per_trial={count} with launch.transport={transport.name}: "
                f"{transport.device_choice} GPUs of a host, so trials would share them. Use "
                "launch.transport=pdsh, or whole hosts."
            )
        return _placed(whole, typed, first)

    def _adopt(self, taken: Taken) -> bool:
        """Go on with the Slurm job of an earlier attempt; one of another config is ended."""
        before = taken.before
        job = SlurmJob(RunDir(self.journal.directory / before.run_dir), before.job)
        if before.key == taken.entry.key:
            taken.entry = before
            taken.process = job
            self._runs.append(taken)
            return True
        self.say(f"[{before.index}] ending its Slurm job {before.job}, which is of another config")
        job.signal(signal.SIGTERM)
        while job.poll() is None:
            time.sleep(POLL_S)
        return False

    def _wait_for_room(self, taken: Taken, whole: Experiment) -> bool:
        """Wait for the slots of a trial; False where the sweep ends before."""
        count = self.settings.slots_per_trial

        def room() -> bool:
            if self.ending or whole.dry_run:
                return True
            queued = applies(whole)
            if queued and len(self._runs) >= self.settings.max_jobs:
                return False
            if count is None:
                return queued or not self._runs
            hosts, first = whole.hardware.hosts, first_of(whole.hardware, count)
            taken.placed = self._slots.take(hosts, count, first)
            if queued and taken.placed is None:  # Slurm has the job wait
                self._slots = Slots()
                taken.placed = self._slots.take(hosts, count, first)
            return taken.placed is not None

        self._collect()
        while not room():
            if not self._collect():
                self.on_wait()
                time.sleep(POLL_S)
        taken.entry.slots = str(taken.placed or "")
        return not self.ending

    def _where_it_ran(self, taken: Taken, whole: Experiment, typed: Experiment) -> None:
        """Of a trial that is not run again: what did not fit there spares the larger ones there."""
        if whole.sweep.slots_per_trial is not None and taken.before.outcome == "oom":
            taken.ran_on = placed_at(whole.hardware.hosts, taken.before.slots)
            if taken.ran_on is not None:
                taken.plan = plan_experiment(_placed(whole, typed, taken.ran_on)).plan

    def _free(self, taken: Taken) -> None:
        if taken.placed is not None:
            self._slots.give_back(taken.placed)
            taken.placed = None

    def _collect(self) -> bool:
        """Report the trials whose processes have ended; whether there were any."""
        if self.stopped_by and self._runs and not self._announced:
            self._announced = True
            many = plural(len(self._runs), "trial")
            self.say(f"Stopping {many}; a second Ctrl-C ends them at once")
        ended = []
        for taken in self._runs:
            assert taken.process is not None
            end = taken.process.poll()
            if end is not None:
                ended.append((taken, end))
        for taken, end in ended:
            self._runs.remove(taken)
            if isinstance(taken.process, TrialProcess):  # while the next trial runs
                start_report(taken.process.run)
            assert taken.process is not None
            left_nothing = not taken.process.run.result.is_file()
            stopped = end.code in (-signal.SIGINT, -signal.SIGTERM, INTERRUPTED)
            if self.ending and stopped and left_nothing:
                why = "stopped before its ranks were started"
                error: LlmxError | None = Ended("interrupted", why)
            else:
                error = end.error or _failed(end.code)
            self.on_end(taken, error)
        return bool(ended)

    def _settle(self, settings: SweepConfig, metric: str) -> None:
        """Take over ``sweep.*`` of a trial, which all trials have in common."""
        if self._told and settings != self.settings:
            mine, theirs = vars(self.settings), vars(settings)
            keys = [f"sweep.{key}" for key in mine if mine[key] != theirs[key]]
            raise ConfigError(
                f"{', '.join(keys)}: must be the same for all trials of a sweep. Set it once."
            )
        self.settings, self._told = settings, True
        self.journal.objective = objective_of(settings, metric)

    def _stands(self, outcome: str) -> bool:
        """Whether a trial that ended so in an earlier attempt is not run again."""
        if outcome in ("pruned", "same", "interrupted"):
            return False  # found out anew, or not run to its end
        return outcome in journals.GOOD or outcome not in (self.settings.retry or FAILED)

    def _too_much(self, taken: Taken, placed: Experiment) -> str:
        """``placed``: on its own slots."""
        assert taken.composed is not None
        assert taken.plan is not None
        kind = _kind(taken.placed)
        known = [found for found, where in self._out_of_memory if where == kind]
        exp = taken.composed.experiment
        return impossible(placed, taken.plan) or needs_more(exp, taken.plan, known)

    def _leave_out(
        self, taken: Taken, outcome: str, cause: str, *, fix: str = "", same_as: int | None = None
    ) -> None:
        entry = taken.entry
        entry.state, entry.outcome, entry.cause, entry.fix = ENDED, outcome, cause, fix
        entry.same_as, entry.ended = same_as, time.time()
        taken.skipped = True


def _placed(whole: Experiment, typed: Experiment, placed: Placed) -> Experiment:
    exp = placed_on(whole, placed)
    if typed.zero.hpz_partition_size == 0:  # as completing has set it: the slots of a host
        zero = dataclasses.replace(exp.zero, hpz_partition_size=exp.hardware.hosts[0].slots)
        exp = dataclasses.replace(exp, zero=zero)
    return exp


def _key(exp: Experiment, whole: Experiment) -> str:
    """Without what a part of the cluster adds of this machine: threads and cores."""
    hardware = dataclasses.replace(exp.hardware, env=whole.hardware.env)
    return key_of(dataclasses.replace(exp, hardware=hardware, launch=whole.launch))


def _kind(placed: Placed | None) -> tuple[str, float | None] | None:
    """What tells two parts of a cluster apart for the memory of a trial."""
    return None if placed is None else (placed.device, placed.ram_gib)


def _failed(code: int) -> LlmxError | None:
    if code == 0:
        return None
    return RunFailed(f"the run ended with exit code {code}; its result.json has the cause.")


def mode_of(objective: str, declared: Mapping[str, Metric]) -> str:
    """``max`` or ``min``: which way of the objective is better."""
    name = objective.partition("/")[2]
    better = declared[name].higher_is_better if name in declared else None
    return "max" if objective == "tokens_per_s" or better else "min"
