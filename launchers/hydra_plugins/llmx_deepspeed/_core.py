"""Runs the launcher: composes each trial with Hydra, and hands it to ``llmx.sweep``."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
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

from llmx.compose.effects import without_effect
from llmx.compose.hydra_config import explain_hydra, resolved
from llmx.config import experiment_from_dict
from llmx.errors import ConfigError, LlmxError
from llmx.run.sweepdir import OWN_WORDS, WELL
from llmx.sweep.sweep import Runner

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from hydra.types import HydraContext
    from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher, SearchSweeper


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
    config, context = launcher.config, launcher.hydra_context
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    jobs = dict(enumerate(map(list, job_overrides), initial_job_idx))
    if "schema_version" not in config:  # Hydra runs any function with its launchers
        Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        return [_plain(launcher, index, overrides) for index, overrides in jobs.items()]
    if str(config.hydra.sweeper._target_).endswith(".GridSweeper"):
        _check_effects(context, config, jobs.values())  # others do not tell all trials beforehand
    runner = launcher.runner = launcher.runner or make_runner(context, config)
    with runner.running():
        trials = runner.run(jobs)
        runner.finish()
    if runner.stopped_by:
        raise KeyboardInterrupt
    returns = []
    for trial in trials:
        if trial.index in runner.ends:
            error = runner.ends[trial.index]
            kind = Refused if isinstance(error, LlmxError) else JobReturn
            returned = kind(overrides=[*trial.overrides])
            returned.status = JobStatus.FAILED if error else JobStatus.COMPLETED
            returned.return_value = error or trial.value(runner.sweep.objective)
            returns.append(returned)
    return returns


def make_runner(context: HydraContext, config: DictConfig) -> Runner:
    """The runner of the sweep in ``hydra.sweep.dir``."""
    directory = Path(os.path.abspath(str(config.hydra.sweep.dir)))
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.update(config.hydra.job.env_set)
    # As they were typed: ${...} in a word is the trial's to resolve.
    typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    config_dirs = [str(path).removeprefix("file://") for path in config.hydra.searchpath]
    return Runner(
        directory,
        [word for word in (*typed["hydra"], *typed["task"]) if not word.startswith(OWN_WORDS)],
        cwd=Path(str(config.hydra.runtime.cwd)),
        config_dir=next(iter(config_dirs), None),
        compose=lambda index, overrides: trial_values(context, config, index, overrides),
    )


@contextmanager
def searching(sweeper: SearchSweeper) -> Iterator[Runner]:
    """The sweep of a search, which runs its trials as it goes; at the end its table is written."""
    launcher = sweeper.config.hydra.launcher._target_
    if not str(launcher).endswith(".DeepSpeedLauncher"):
        name = type(sweeper).__name__.removesuffix("Sweeper").lower()
        raise ConfigError(f"hydra/sweeper={name}: works with hydra/launcher=deepspeed alone.")
    runner = make_runner(sweeper.hydra_context, sweeper.config)
    with runner.running():
        try:
            yield runner
        finally:
            runner.finish()
    if runner.stopped_by:
        raise KeyboardInterrupt


def fixed_and_swept(
    sweeper: SearchSweeper, arguments: Sequence[str]
) -> tuple[dict[str, str], dict[str, Override]]:
    """The words that all trials have by key, and those with several values; the last counts."""
    parser = OverridesParser.create(config_loader=sweeper.hydra_context.config_loader)
    words: dict[str, Override] = {}
    for word in parser.parse_overrides(list(arguments)):
        words.pop(word.get_key_element(), None)  # the sampler draws in the order of the last words
        words[word.get_key_element()] = word
    swept = {key: word for key, word in words.items() if word.is_sweep_override()}
    values = {k: w.get_value_element_as_str() for k, w in words.items() if k not in swept}
    return {key: f"{key}={value}" for key, value in values.items()}, swept


def check_any_ended_well(runner: Runner) -> None:
    """Raise the error of the first trial, where none has ended well."""
    if not any(trial.outcome in WELL for trial in runner.sweep.trials):
        for error in filter(None, runner.ends.values()):
            raise error


def trial_values(
    context: HydraContext, config: DictConfig, index: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """The values of a trial's config, with its run directory.

    Raises:
        ConfigError: a value cannot be resolved.
    """
    composed = _trial_config(context, config, index, overrides)
    try:
        values, _ = resolved(composed, lambda of: str(Path(of.sweep.dir, of.sweep.subdir)))
    except OmegaConfBaseException as error:
        raise ConfigError(explain_hydra(error, filter_overrides(overrides))) from error
    return {**values, "run_dir": os.path.abspath(values["run_dir"])}


def _trial_config(
    context: HydraContext, config: DictConfig, index: int, overrides: Sequence[str]
) -> DictConfig:
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = f"job_id_for_{index}"
        composed.hydra.job.num = index
    return composed


def _check_effects(
    context: HydraContext, config: DictConfig, jobs: Collection[Sequence[str]]
) -> None:
    """ConfigError for words that no trial reads: some are for some of the trials."""
    unread: dict[str, str] | None = None
    for overrides in jobs:
        try:
            exp = experiment_from_dict(trial_values(context, config, 0, overrides))
        except (LlmxError, HydraException):
            continue  # says so itself when it begins
        of_trial = without_effect(exp, filter_overrides(overrides), command="sweep")
        unread = {k: text for k, text in (unread or of_trial).items() if k in of_trial}
        if not unread:
            return
    if unread:
        raise ConfigError("\n".join(unread.values()))


def _plain(launcher: DeepSpeedLauncher, index: int, overrides: list[str]) -> JobReturn:
    """Run a job of another application in this process."""
    config, context = launcher.config, launcher.hydra_context
    # run_job sets the globals of the job; the sweep's own come back afterwards.
    state = Singleton.get_state()
    returned = run_job(
        hydra_context=context,
        task_function=launcher.task_function,
        config=_trial_config(context, config, index, overrides),
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    Singleton.set_state(state)
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    if returned.status is JobStatus.FAILED:
        print(f"[{index}] failed: {returned._return_value}", file=sys.stderr, flush=True)
    return returned
