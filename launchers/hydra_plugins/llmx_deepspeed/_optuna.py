"""Runs ``hydra/sweeper=optuna``: turns words into distributions and suggestions into trials, and
tells Optuna their objective.

Optuna suggests from a study in memory, which minimises. It begins with what is known: the trials of
the study in ``hydra.sweeper.storage``, and those of this sweep from an earlier attempt. How many
these are is part of the sampler's seed, so that a study or a sweep that goes on gets other
suggestions. The stored study gets each trial when it has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra_plugins.llmx_deepspeed._core import check_any_ended_well, fixed_and_swept, searching

from llmx.compose.overrides import resolve_alias
from llmx.errors import ConfigError
from llmx.text import one_line

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from hydra_plugins.llmx_deepspeed.launcher import OptunaSweeper

    from llmx.run.sweepdir import Sweep, Trial

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler"}
NAME = "trial"
"""The attribute of a stored trial that has its sweep and number."""


def sweep(sweeper: OptunaSweeper, arguments: Sequence[str]) -> None:
    """Search. Where no trial has ended well, the error of the first is raised."""
    optuna = _load()
    if sweeper.sampler not in SAMPLERS:
        raise ConfigError(
            f"hydra.sweeper.sampler={sweeper.sampler}: must be one of {', '.join(SAMPLERS)}."
        )
    for key, least in {"n_trials": 1, "n_jobs": 1, "seed": 0}.items():
        value = getattr(sweeper, key)
        if not isinstance(value, int) or value < least:
            raise ConfigError(
                f"hydra.sweeper.{key}={value}: must be a whole number from {least}. Set e.g. "
                f"hydra.sweeper.{key}={least or 1}."
            )
    fixed, space = _space(sweeper, arguments, optuna)
    stored = Stored(optuna, sweeper)
    with _refused("hydra.sweeper.study_name", STUDY):
        study = optuna.create_study()
        for trial in stored.trials():
            for key in space.keys() & trial.distributions.keys():
                optuna.distributions.check_distribution_compatibility(
                    trial.distributions[key], space[key]
                )
            study.add_trial(trial)
    with searching(sweeper) as runner:
        recorded = runner.sweep.trials
        seed = sweeper.seed + len(study.trials) + len(recorded)
        study.sampler = getattr(optuna.samplers, SAMPLERS[sweeper.sampler])(seed=seed)
        queue, count = [_params(trial, space) for trial in recorded], 0
        while (queue or count < sweeper.n_trials) and not runner.ending:
            size = len(queue) or min(sweeper.n_jobs, sweeper.n_trials - count)
            with _refused("hydra.sweeper.study_name", STUDY):
                for params in queue:
                    study.enqueue_trial(params)
                suggestions = [study.ask(dict(space)) for _ in range(size)]
            words = [[f"{key}={trial.params[key]}" for key in space] for trial in suggestions]
            trials = runner.run(
                {count + at: [*fixed, *own_words] for at, own_words in enumerate(words)}
            )
            for suggestion, trial in zip(suggestions, trials, strict=True):
                if trial.index in runner.ends:
                    suggestion.set_user_attr(NAME, f"{runner.sweep.directory} {trial.index}")
                    value, is_max = _value(runner.sweep, trial), runner.sweep.mode == "max"
                    if value is None:
                        study.tell(suggestion, state=optuna.trial.TrialState.FAIL)
                    else:
                        study.tell(suggestion, -value if is_max else value)
                        stored.open(runner.sweep)
            stored.add(study.trials)
            count, queue = count + size, []
    check_any_ended_well(runner)


STUDY = (
    "A study has one objective, and the same keys and choices in all its sweeps. Set another "
    "hydra.sweeper.study_name."
)


class Stored:
    """The study in ``hydra.sweeper.storage``; nothing without one. It is made when a trial has told
    which values of the objective are better."""

    def __init__(self, optuna: Any, sweeper: OptunaSweeper) -> None:
        self._optuna, self._storage = optuna, sweeper.storage
        self._study: Any = None
        self._name = sweeper.study_name or os.path.abspath(sweeper.config.hydra.sweep.dir)
        with self._accessed():
            if self._storage and self._name in optuna.get_all_study_names(self._storage):
                self._study = optuna.load_study(study_name=self._name, storage=self._storage)

    def _accessed(self) -> Any:
        fix = "Set e.g. hydra.sweeper.storage=sqlite:///study.db, or leave it out."
        return _refused(f"hydra.sweeper.storage={self._storage}", fix)

    @property
    def _sign(self) -> int:
        return -1 if self._study.direction.name == "MAXIMIZE" else 1

    def trials(self) -> list[Any]:
        """Its trials that have ended, of an objective that is minimised."""
        trials = self._study.trials if self._study is not None else []
        return [self._copy(trial) for trial in trials if trial.state.is_finished()]

    def open(self, sweep: Sweep) -> None:
        """Create it for the objective of a sweep; ConfigError where it is of another direction."""
        if not self._storage:
            return
        direction = f"{sweep.mode}imize"
        if self._study is None:
            with self._accessed():
                self._study = self._optuna.create_study(
                    direction=direction, storage=self._storage, study_name=self._name
                )
        elif (self._sign < 0) != (sweep.mode == "max"):
            raise ConfigError(
                f"hydra.sweeper.study_name={self._name}: does not {direction} its objective, as "
                f"sweep.objective={sweep.objective} is. {STUDY}"
            )

    def add(self, trials: Sequence[Any]) -> None:
        """Add the trials that have ended and are not in it."""
        if self._study is None:
            return
        with self._accessed():
            known = {_key(trial) for trial in self._study.trials}
            for trial in trials:
                if trial.state.is_finished() and _key(trial) not in known:
                    self._study.add_trial(self._copy(trial))

    def _copy(self, trial: Any) -> Any:
        return self._optuna.trial.create_trial(
            state=trial.state,
            params=trial.params,
            distributions=trial.distributions,
            value=None if trial.value is None else self._sign * trial.value,
            user_attrs=trial.user_attrs,
        )


def _key(trial: Any) -> tuple[Any, ...]:
    """What a trial is known by: one that is run again has another state."""
    return trial.user_attrs.get(NAME), trial.state


@contextmanager
def _refused(setting: str, fix: str) -> Iterator[None]:
    """ConfigError where Optuna, or the driver of its storage, refuses what a setting asks for."""
    try:
        yield
    except Exception as error:
        reason = one_line(str(error), limit=200).rstrip(".")
        raise ConfigError(f"{setting}: {reason}. {fix}") from error


def _load() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "hydra/sweeper=optuna: optuna is not installed. Install it on this machine: pip "
            "install 'llmx[optuna]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _value(sweep: Sweep, trial: Trial) -> float | None:
    """The objective of a trial; of one that is the same as another, of that one."""
    if trial.same_as is not None:
        (trial,) = sweep.trials_of([trial.same_as])
    value = trial.value(sweep.objective) if trial.outcome == "ok" else None
    return value if value is not None and abs(value) < float("inf") else None


def _params(trial: Trial, space: dict[str, Any]) -> dict[str, Any]:
    """The values of the keys that are searched, of a trial of an earlier attempt."""
    kinds: dict[str, Any] = {"FloatDistribution": float, "IntDistribution": int}
    words = dict(word.partition("=")[::2] for word in trial.overrides)
    return {
        key: kinds.get(type(distribution).__name__, str)(words[key])
        for key, distribution in space.items()
    }


def _space(
    sweeper: OptunaSweeper, arguments: Sequence[str], optuna: Any
) -> tuple[list[str], dict[str, Any]]:
    """The words that all trials have, and the distribution of each key that is searched."""
    params = [resolve_alias(f"{key}={value}") for key, value in (sweeper.params or {}).items()]
    fixed, swept = fixed_and_swept(sweeper, [*params, *arguments])
    space = {}
    for key, word in swept.items():
        with _refused(word.input_line or key, f"Set e.g. '{key}=interval(1, 5)' or {key}=1,5."):
            space[key] = _distribution(word, optuna.distributions)
    if not space:
        raise ConfigError(
            "hydra/sweeper=optuna: nothing is searched. Give a key several values, or an interval: "
            "'optim.lr=tag(log, interval(1e-5, 1e-3))'."
        )
    return list(fixed.values()), space


def _distribution(override: Override, distributions: Any) -> Any:
    value: Any = override.value()
    if override.is_interval_sweep():
        log = "log" in value.tags
        if isinstance(value.start, int) and isinstance(value.end, int):
            return distributions.IntDistribution(value.start, value.end, log=log)
        return distributions.FloatDistribution(float(value.start), float(value.end), log=log)
    if override.is_range_sweep() and not value.shuffle:
        steps: list[Any] = list(override.sweep_iterator())
        if not steps:
            raise ValueError("has no values")
        if all(isinstance(step, int) for step in steps):
            width = steps[1] - steps[0] if len(steps) > 1 else 1
            if width > 0:
                return distributions.IntDistribution(steps[0], steps[-1], step=width)
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
