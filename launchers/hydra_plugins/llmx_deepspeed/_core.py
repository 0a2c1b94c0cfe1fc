"""The work of the launcher: compose each trial, have it run, keep its outcome, go on.

``run_job`` of Hydra changes global state and is not thread-safe, so trials are composed in turn,
up to the point where the run would be launched. From there on a trial is a process of its own, and
the next one is composed; it waits until there are slots for it. One that fails does not stop the
others; the sweeper raises its error at the end, so the table of all of them is printed before. One
that the user ended (Ctrl-C) ends the sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from llmx import text as human
from llmx.compose.effects import without_effect
from llmx.compose.overrides import resolve_alias
from llmx.config import Experiment, experiment_from_dict
from llmx.errors import ConfigError, LlmxError
from llmx.observe.report.command import best_lines_of, write_report
from llmx.observe.report.sweep_data import CSV, STOPPED, load_sweep, objective_of
from llmx.observe.report.sweep_page import PAGE
from llmx.observe.report.sweep_table import (
    MARKDOWN,
    Trial,
    known_of,
    near,
    print_sweep,
    read_trial,
    write_sweep,
)
from llmx.sweep.best import write_best
from llmx.sweep.journal import OWN_WORDS, Entry, held, open_journal
from llmx.sweep.process import Ended
from llmx.sweep.screen import Screen
from llmx.sweep.sweep import Sweep, Taken

if TYPE_CHECKING:
    from hydra.types import HydraContext
    from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher


class Refused(JobReturn):
    """A job that ended with a message for the user, which has been printed. Hydra's own raises
    the error, too, but first prints a line on overrides."""

    @property
    def return_value(self) -> Any:
        if self.status is JobStatus.COMPLETED:
            return self._return_value
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def launch(
    launcher: DeepSpeedLauncher, *, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Run what must run; returns the JobReturns in order, failed ones included."""
    setup_globals()
    config = launcher.config
    assert config is not None
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
    sweep_dir.mkdir(parents=True, exist_ok=True)
    jobs = [
        (initial_job_idx + offset, [resolve_alias(override) for override in raw])
        for offset, raw in enumerate(job_overrides)
    ]
    if "schema_version" not in config:  # Hydra runs any function with its launchers
        return [_plain(launcher, index, overrides) for index, overrides in jobs]
    if str(config.hydra.sweeper._target_).endswith(".GridSweeper"):
        _check_effects(launcher, jobs)  # other sweepers do not tell all their trials beforehand
    with held(sweep_dir):
        launcher.sweep = launcher.sweep or _open(config, sweep_dir)
        return Batch(launcher, launcher.sweep, jobs).run()


def _check_effects(launcher: DeepSpeedLauncher, jobs: Sequence[tuple[int, list[str]]]) -> None:
    """ConfigError for words that no trial reads: some are for some of the trials."""
    config, context = launcher.config, launcher.hydra_context
    assert config is not None
    assert context is not None
    unread: dict[str, str] | None = None
    for _, overrides in jobs:
        try:
            exp = composed_trial(context, config, overrides, run_dir="")
        except (LlmxError, HydraException, OmegaConfBaseException):
            continue  # says so itself when it begins
        of_trial = without_effect(exp, filter_overrides(overrides), command="sweep")
        unread = {k: text for k, text in (unread or of_trial).items() if k in of_trial}
        if not unread:
            return
    if unread:
        raise ConfigError("\n".join(unread.values()))


def composed_trial(
    context: HydraContext, config: DictConfig, overrides: Sequence[str], *, run_dir: str
) -> Experiment:
    """The experiment of these words, as the trial will be composed; not completed."""
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        del composed["hydra"]
        composed.run_dir = run_dir
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return experiment_from_dict(values)


class Batch:
    """The trials of one call of the launcher, and the table of all so far."""

    def __init__(
        self, launcher: DeepSpeedLauncher, sweep: Sweep, jobs: Sequence[tuple[int, list[str]]]
    ) -> None:
        self.launcher, self.sweep, self.jobs = launcher, sweep, jobs
        self.directory = sweep.journal.directory
        self.screen = Screen(self.directory)
        self.returns: dict[int, JobReturn] = {}

    def run(self) -> list[JobReturn]:
        """All of them, unless the sweep ends early; what they returned, in order."""
        sweep = self.sweep
        sweep.on_end, sweep.on_wait, sweep.say = self._over, self.screen.tick, self.screen.line
        sweep.on_stop, sweep.may_fail = self._stopped, self.launcher.may_fail
        sweep.expect([(index, filter_overrides(overrides)) for index, overrides in self.jobs])
        try:
            with sweep.running():
                self._train(self.jobs)
                while going := sweep.halve():
                    self._train([job for job in self.jobs if job[0] in going])
        finally:
            self.screen.close()
        left = len(self.jobs) - len(self.returns)
        if sweep.ending and left:
            print(
                f"The sweep ends here; trials not started: {left}. To go on: python -m llmx sweep "
                f"resume {near(self.directory)}",
                file=sys.stderr,
            )
        sys.stderr.flush()
        if not self.launcher.searches:
            finish(self.launcher)
        returned = [self.returns[index] for index in sorted(self.returns)]
        if sweep.stopped_by:
            raise KeyboardInterrupt
        return returned

    def _train(self, jobs: Sequence[tuple[int, list[str]]]) -> None:
        """Trials to their end, or to their next rung."""
        for index, overrides in jobs:
            if self.sweep.ending:
                break
            self._begin(index, overrides)
        self.sweep.wait()

    def _begin(self, index: int, overrides: list[str]) -> None:
        """Compose a trial, and have it run where it must."""
        typed = filter_overrides(overrides)
        taken = self.sweep.begin(index, typed)
        returned = _run(self.launcher, index, overrides)
        if taken.put_off:
            return
        self.returns[index] = returned
        if taken.process is None:
            error = returned._return_value if returned.status is JobStatus.FAILED else None
            self._over(taken, error)
        else:
            where = f" on {taken.entry.slots}" if taken.entry.slots else ""
            did = f"Slurm job {taken.entry.job}" if taken.entry.job else "started"
            self.screen.began(f"{self._label(taken)}: {did}{where}")

    def _over(self, taken: Taken, error: BaseException | None) -> None:
        """A trial has ended, or was not run at all."""
        sweep, index, returned = self.sweep, taken.entry.index, self.returns[taken.entry.index]
        was_run = taken.process is not None
        if error is not None and returned.status is not JobStatus.FAILED:
            returned = _refused(returned, error)
        trial = _ended(sweep, taken, returned)
        self.returns[index] = returned
        others = [each for each in self.launcher.trials if each.index != index]
        self.launcher.trials[:] = sorted([*others, trial], key=lambda each: each.index)
        write_sweep(self.launcher.trials, directory=self.directory)
        write_best(sweep.journal, self.launcher.trials)
        if returned.status is not JobStatus.FAILED:
            returned.return_value = objective_of(trial, sweep.journal.objective)
        line = f"{self._label(taken)}: {self._how(taken, trial, error)}"
        if was_run:
            self.screen.ended(line, failed=returned.status is JobStatus.FAILED)
        else:
            self.screen.line(line, failed=returned.status is JobStatus.FAILED)

    def _stopped(self, entry: Entry) -> None:
        """A trial does not go on to its next rung."""
        trials = self.launcher.trials
        trials[:] = [
            replace(each, outcome=entry.outcome, cause=entry.cause)
            if each.index == entry.index
            else each
            for each in trials
        ]
        self.screen.line(f"[{entry.index}] stopped {entry.cause}")

    def _label(self, taken: Taken) -> str:
        """``[3] zero=stage1 batch.micro_batch=4``."""
        return f"[{taken.entry.index}] {' '.join(self.sweep.own(taken.entry.overrides))}"

    def _how(self, taken: Taken, trial: Trial, error: BaseException | None) -> str:
        entry = taken.entry
        if error is not None:
            cause = human.one_line(trial.cause or str(error), limit=300)
            fix = f"; {human.one_line(trial.fix, limit=200)}" if trial.fix else ""
            log = f" (log: {trial.run_dir / 'logs'})" if taken.process is not None else ""
            return f"{entry.outcome or trial.outcome}: {cause}{fix}{log}"
        if taken.skipped:
            because = f": {entry.cause}" if entry.cause else " in an earlier attempt at this sweep"
            return f"{entry.outcome}{because}"
        known = known_of(trial, self.sweep.journal.objective, [trial])
        return f"{trial.outcome}  {known}".rstrip()


def finish(launcher: DeepSpeedLauncher) -> None:
    """Every trial was reached: the table, the files and the page of all of them."""
    if launcher.sweep is None:
        return
    launcher.sweep.finish()
    directory = launcher.sweep.journal.directory
    sweep = load_sweep(directory)
    try:
        write_report(sweep, directory)
    except OSError as error:  # a full disk: what can be printed is printed all the same
        print(f"{error.filename}: not written ({error.strerror})", file=sys.stderr)
    print_sweep(
        sweep.trials,
        directory=directory,
        stream=sys.stdout,
        best=best_lines_of(sweep),
        files=(CSV, MARKDOWN, PAGE),
    )
    sys.stdout.flush()


def _plain(launcher: DeepSpeedLauncher, index: int, overrides: list[str]) -> JobReturn:
    """A job of another application."""
    returned = _run(launcher, index, overrides)
    if returned.status is JobStatus.FAILED:
        print(f"[{index}] failed: {returned._return_value}", file=sys.stderr, flush=True)
    return returned


def _run(launcher: DeepSpeedLauncher, index: int, overrides: list[str]) -> JobReturn:
    """One job, through the same function as a single run; a failure is returned, not raised."""
    config, context = launcher.config, launcher.hydra_context
    assert config is not None
    assert context is not None
    assert launcher.task_function is not None
    cell = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(cell):
        cell.hydra.job.id = f"job_id_for_{index}"
        cell.hydra.job.num = index
        cell.hydra.job.override_dirname = human.file_name(str(cell.hydra.job.override_dirname))
    # run_job sets the globals of the job; the sweep's own come back afterwards.
    state = Singleton.get_state()
    returned = run_job(
        hydra_context=context,
        task_function=launcher.task_function,
        config=cell,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    Singleton.set_state(state)
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    if returned.status is JobStatus.FAILED:
        return _refused(returned, returned._return_value)
    return returned


def _refused(returned: JobReturn, error: BaseException) -> JobReturn:
    """What a job that failed returns; what is no message for the user keeps Hydra's own form."""
    values = {each.name: getattr(returned, each.name) for each in fields(returned)}
    values |= {"status": JobStatus.FAILED, "_return_value": error}
    return (Refused if isinstance(error, LlmxError) else JobReturn)(**values)


def _open(config: DictConfig, sweep_dir: Path) -> Sweep:
    """The sweep of the directory: a new one, or one to be continued."""
    # As they were typed: ${...} in a word is the trial's to resolve.
    typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    words = [word for word in (*typed["hydra"], *typed["task"]) if not word.startswith(OWN_WORDS)]
    directory = next(
        (
            str(source.path)
            for source in config.hydra.runtime.config_sources
            if source.provider == "command-line"
        ),
        None,
    )
    journal = open_journal(
        sweep_dir, words, cwd=Path(str(config.hydra.runtime.cwd)), config_dir=directory
    )
    return Sweep(journal)


def _ended(sweep: Sweep, taken: Taken, outcome: JobReturn) -> Trial:
    """Note what became of a trial."""
    index, overrides = taken.entry.index, taken.entry.overrides
    error = outcome._return_value if outcome.status is JobStatus.FAILED else None
    assert outcome.hydra_cfg is not None
    run_dir = Path(str(outcome.hydra_cfg.hydra.runtime.output_dir))
    # By default an interpolation, which is of the trial's globals and those are gone.
    plain = OmegaConf.to_container(OmegaConf.create(outcome.cfg), resolve=False)
    named = plain.get("run_dir") if isinstance(plain, dict) else None
    if isinstance(named, str) and named and "${" not in named:
        run_dir = Path(named).absolute()
    trial = read_trial(index, overrides, run_dir, error=error)
    if isinstance(error, Ended):
        trial = replace(trial, outcome=error.outcome, cause=f"{error}", fix="")
    entry = sweep.end(
        taken,
        trial.outcome,
        trial.cause,
        trial.fix,
        run_dir,
        declared=trial.declared,
        steps=trial.steps,
        total=trial.total_steps,
        value=objective_of(trial, sweep.journal.objective),
    )
    if entry.outcome == STOPPED:
        return replace(trial, outcome=entry.outcome, cause=entry.cause)
    if entry.outcome in ("pruned", "same"):
        return Trial(index, tuple(overrides), run_dir, entry.outcome, entry.cause, entry.fix)
    return trial
