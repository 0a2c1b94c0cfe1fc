"""The work of the launcher: compose each trial, run it, keep its outcome, go on.

``run_job`` of Hydra changes global state and is not thread-safe, so trials are composed in turn.
One that fails does not stop the others; the sweeper raises its error at the end, so the table of
all of them is printed before. One that the user ended (Ctrl-C) ends the sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
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
from omegaconf import DictConfig, OmegaConf, open_dict

from llmx.compose.overrides import resolve_alias
from llmx.errors import LlmxError
from llmx.observe.report.sweep_table import Trial, print_sweep, read_trial, write_sweep
from llmx.sweep.best import write_best
from llmx.sweep.journal import OWN_WORDS, held, open_journal
from llmx.sweep.sweep import Sweep

if TYPE_CHECKING:
    from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher


class Refused(JobReturn):
    """A job that ended with a message for the user, which has been printed. Hydra's own raises
    the error, too, but first prints a line on overrides."""

    @property
    def return_value(self) -> Any:
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
        return [_run(launcher, index, overrides) for index, overrides in jobs]
    with held(sweep_dir):
        launcher.sweep = launcher.sweep or _open(config, sweep_dir)
        return _run_trials(launcher, launcher.sweep, jobs)


def _run_trials(
    launcher: DeepSpeedLauncher, sweep: Sweep, jobs: Sequence[tuple[int, list[str]]]
) -> list[JobReturn]:
    """The trials of this batch in turn, and the table of all so far."""
    directory, returns = sweep.journal.directory, []
    sweep.expect([(index, filter_overrides(overrides)) for index, overrides in jobs])
    for index, overrides in jobs:
        typed = filter_overrides(overrides)
        own = [word for word in typed if word not in sweep.common]
        print(f"[{index}] {' '.join(own or typed)}", flush=True)
        sweep.begin(index, typed)
        with sweep.running():
            returned = _run(launcher, index, overrides)
        returns.append(returned)
        trial = _ended(sweep, index, typed, returned)
        launcher.trials.append(trial)
        write_sweep(launcher.trials, directory=directory)
        write_best(sweep.journal, launcher.trials)
        if sweep.ends_now(trial.outcome):
            left = jobs[-1][0] - index
            print(f"The sweep ends here; trials not started: {left}", file=sys.stderr)
            break
    sweep.finish()
    sys.stderr.flush()
    print_sweep(launcher.trials, directory=directory, stream=sys.stdout)
    sys.stdout.flush()
    return returns


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
        print(f"[{index}] failed: {returned._return_value}", file=sys.stderr, flush=True)
        if isinstance(returned._return_value, LlmxError):
            values = {each.name: getattr(returned, each.name) for each in fields(returned)}
            returned = Refused(**values)
    return returned


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


def _ended(sweep: Sweep, index: int, overrides: Sequence[str], outcome: JobReturn) -> Trial:
    """Note what became of a trial."""
    error = outcome._return_value if outcome.status is JobStatus.FAILED else None
    assert outcome.hydra_cfg is not None
    run_dir = Path(str(outcome.hydra_cfg.hydra.runtime.output_dir))
    # By default an interpolation, which is of the trial's globals and those are gone.
    plain = OmegaConf.to_container(OmegaConf.create(outcome.cfg), resolve=False)
    named = plain.get("run_dir") if isinstance(plain, dict) else None
    if isinstance(named, str) and named and "${" not in named:
        run_dir = Path(named).absolute()
    trial = read_trial(index, overrides, run_dir, error=error)
    entry = sweep.end(trial.outcome, trial.cause, trial.fix, run_dir, declared=trial.declared)
    if sweep.skipped:
        because = f": {entry.cause}" if entry.cause else " in an earlier attempt at this sweep"
        print(f"[{index}] {entry.outcome}{because}", flush=True)
    if entry.outcome in ("pruned", "same"):
        return Trial(index, tuple(overrides), run_dir, entry.outcome, entry.cause, entry.fix)
    return trial
