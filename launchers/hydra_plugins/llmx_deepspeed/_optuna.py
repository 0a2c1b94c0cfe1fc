"""The work of ``hydra/sweeper=optuna``: words to distributions, suggestions to trials of the
launcher, their objective back to Optuna.

Which way the objective is better is known once the first trial has told it. The same seed and the
same values make the same suggestions, so a search that was killed goes on by the same command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra_plugins.llmx_deepspeed._core import finish

from llmx.errors import ConfigError
from llmx.observe.report.sweep_data import objective_of

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from hydra.core.utils import JobReturn
    from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher
    from hydra_plugins.llmx_deepspeed.optuna_sweeper import OptunaSweeper

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler"}


def sweep(sweeper: OptunaSweeper, arguments: Sequence[str]) -> list[JobReturn]:
    """The search; returns the JobReturns of the trials. Where none has ended well, the error of the
    first is raised."""
    optuna = _load()
    if sweeper.sampler not in SAMPLERS:
        raise ConfigError(
            f"hydra.sweeper.sampler={sweeper.sampler}: must be one of {', '.join(SAMPLERS)}."
        )
    launcher = cast("DeepSpeedLauncher", sweeper.launcher)
    if type(launcher).__name__ != "DeepSpeedLauncher":
        raise ConfigError("hydra/sweeper=optuna: works with hydra/launcher=deepspeed alone.")
    fixed, space = _space(sweeper, arguments, optuna)
    launcher.searches = True
    search = _Search(sweeper, optuna, launcher, fixed, space)
    try:
        search.run()
    finally:
        finish(launcher)
    if not any(trial.outcome in ("ok", "planned") for trial in launcher.trials):
        for returned in search.returns:
            _ = returned.return_value  # raises the error of the trial
    return search.returns


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


class _Search:
    def __init__(
        self,
        sweeper: OptunaSweeper,
        optuna: Any,
        launcher: DeepSpeedLauncher,
        fixed: Sequence[str],
        space: Mapping[str, Any],
    ) -> None:
        self.sweeper, self.optuna, self.launcher = sweeper, optuna, launcher
        self.fixed, self.space = fixed, space
        self.returns: list[JobReturn] = []

    def run(self) -> None:
        """Trials in batches of ``n_jobs``. The first one alone, which tells the direction."""
        study = self._study("minimize", stored=False)
        count = 0
        while count < self.sweeper.n_trials:
            size = 1 if count == 0 else min(self.sweeper.n_jobs, self.sweeper.n_trials - count)
            asked = [study.ask(dict(self.space)) for _ in range(size)]
            jobs = [
                [*self.fixed, *(f"{key}={trial.params[key]}" for key in self.space)]
                for trial in asked
            ]
            returned = self.launcher.launch(jobs, initial_job_idx=count)
            self.returns += returned
            values = [self._value(count + offset) for offset in range(len(returned))]
            if count == 0:
                study = self._first(asked[0], values[0] if values else None)
            else:
                for trial, value in zip(asked, values, strict=False):
                    state = self.optuna.trial.TrialState.FAIL if value is None else None
                    study.tell(trial, value, state=state)
            count += size
            if len(returned) < size or (self.launcher.sweep and self.launcher.sweep.ending):
                break

    def _study(self, direction: str, *, stored: bool) -> Any:
        sampler = getattr(self.optuna.samplers, SAMPLERS[self.sweeper.sampler])
        return self.optuna.create_study(
            direction=direction,
            # Another beginning than that of the first trial, which would be suggested again.
            sampler=sampler(seed=self.sweeper.seed + stored),
            storage=self.sweeper.storage if stored else None,
            study_name=self.sweeper.study_name if stored else None,
            load_if_exists=True,
        )

    def _first(self, trial: Any, value: float | None) -> Any:
        """The study, now that the direction is known, with the trial that was run before."""
        sweep = self.launcher.sweep
        mode = sweep.journal.mode if sweep is not None else "min"
        study = self._study("maximize" if mode == "max" else "minimize", stored=True)
        states = self.optuna.trial.TrialState
        study.add_trial(
            self.optuna.trial.create_trial(
                state=states.FAIL if value is None else states.COMPLETE,
                params=trial.params,
                distributions=trial.distributions,
                value=value,
            )
        )
        return study

    def _value(self, index: int) -> float | None:
        """The objective of a trial; of one that is the same as another, of that one."""
        assert self.launcher.sweep is not None
        journal = self.launcher.sweep.journal
        found = {trial.index: trial for trial in self.launcher.trials}
        entry = next(each for each in journal.trials if each.index == index)
        at = index if entry.same_as is None else entry.same_as
        if at not in found or found[at].outcome != "ok":
            return None
        value = objective_of(found[at], journal.objective)
        return value if value is not None and abs(value) < float("inf") else None


def _space(
    sweeper: OptunaSweeper, arguments: Sequence[str], optuna: Any
) -> tuple[list[str], dict[str, Any]]:
    """The words that all trials have, and the distribution of each key that is searched."""
    assert sweeper.hydra_context is not None
    params = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=sweeper.hydra_context.config_loader)
    fixed: dict[str, str] = {}
    space: dict[str, Any] = {}
    for override in parser.parse_overrides([*params, *arguments]):
        key = override.get_key_element()
        fixed.pop(key, None)
        space.pop(key, None)
        if override.is_sweep_override():
            space[key] = _distribution(override, optuna.distributions)
        else:
            fixed[key] = f"{key}={override.get_value_element_as_str()}"
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
        if all(isinstance(each, int) for each in steps):
            width = steps[1] - steps[0] if len(steps) > 1 else 1
            if width > 0:
                return distributions.IntDistribution(steps[0], steps[-1], step=width)
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
