"""Runs ``hydra/sweeper=optuna``: turns words into distributions and suggestions into trials, and
tells Optuna their objective.

Which way the objective is better is known once the first trial has told it. The same seed and the
same values make the same suggestions, so a search that was killed is continued by the same command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra_plugins.llmx_deepspeed._core import check_any_ended_well, fixed_and_swept, searching

from llmx.compose.overrides import resolve_alias
from llmx.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from hydra_plugins.llmx_deepspeed.launcher import OptunaSweeper

    from llmx.run.sweepdir import Sweep, Trial

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler"}


def sweep(sweeper: OptunaSweeper, arguments: Sequence[str]) -> None:
    """Search. Where no trial has ended well, the error of the first is raised."""
    optuna = _load()
    if sweeper.sampler not in SAMPLERS:
        raise ConfigError(
            f"hydra.sweeper.sampler={sweeper.sampler}: must be one of {', '.join(SAMPLERS)}."
        )
    fixed, space = _space(sweeper, arguments, optuna)
    states = optuna.trial.TrialState

    def make_study(direction: str, *, is_first: bool) -> Any:
        sampler = getattr(optuna.samplers, SAMPLERS[sweeper.sampler])
        return optuna.create_study(
            direction=direction,
            # Another beginning than that of the first trial, which would be suggested again.
            sampler=sampler(seed=sweeper.seed + (not is_first)),
            storage=None if is_first else sweeper.storage,
            study_name=None if is_first else sweeper.study_name,
            load_if_exists=True,
        )

    with searching(sweeper) as runner:
        # The first trial runs alone, as it tells the direction.
        study, count, size = make_study("minimize", is_first=True), 0, 1
        while count < sweeper.n_trials and not runner.ending:
            suggestions = [
                study.ask(dict(space)) for _ in range(min(size, sweeper.n_trials - count))
            ]
            values = [[f"{key}={trial.params[key]}" for key in space] for trial in suggestions]
            trials = runner.run({count + at: [*fixed, *words] for at, words in enumerate(values)})
            if count == 0:
                mode = runner.sweep.mode
                study = make_study("maximize" if mode == "max" else "minimize", is_first=False)
                value = _value(runner.sweep, trials[0])
                study.add_trial(
                    optuna.trial.create_trial(
                        state=states.FAIL if value is None else states.COMPLETE,
                        params=suggestions[0].params,
                        distributions=suggestions[0].distributions,
                        value=value,
                    )
                )
            else:
                for suggestion, trial in zip(suggestions, trials, strict=True):
                    if trial.index in runner.ends:
                        value = _value(runner.sweep, trial)
                        study.tell(suggestion, value, state=states.FAIL if value is None else None)
            count += len(suggestions)
            size = sweeper.n_jobs
    check_any_ended_well(runner)


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


def _space(
    sweeper: OptunaSweeper, arguments: Sequence[str], optuna: Any
) -> tuple[list[str], dict[str, Any]]:
    """The words that all trials have, and the distribution of each key that is searched."""
    params = [resolve_alias(f"{key}={value}") for key, value in (sweeper.params or {}).items()]
    fixed, swept = fixed_and_swept(sweeper, [*params, *arguments])
    space = {key: _distribution(word, optuna.distributions) for key, word in swept.items()}
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
        if all(isinstance(step, int) for step in steps):
            width = steps[1] - steps[0] if len(steps) > 1 else 1
            if width > 0:
                return distributions.IntDistribution(steps[0], steps[-1], step=width)
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
