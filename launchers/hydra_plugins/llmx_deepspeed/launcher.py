"""``hydra/launcher=deepspeed``, and the sweepers ``grid``, ``optuna`` and ``tune``.

Thin, as Hydra imports this module at every start; the work is in ``_core``, ``_optuna`` and
``_tune``. ``python -m llmx --info plugins`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins import basic_sweeper
from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from llmx.sweep.sweep import Runner


class SetUp:
    """What Hydra gives to a launcher and to a sweeper."""

    config: DictConfig
    task_function: TaskFunction
    hydra_context: HydraContext

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config


class DeepSpeedLauncher(SetUp, Launcher):
    """Hands the trials of a sweeper to ``llmx.sweep``."""

    runner: Runner | None = None
    """Runner of the sweep; a sweeper may hand over its trials in parts."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from hydra_plugins.llmx_deepspeed import _core

        return _core.launch(self, job_overrides=job_overrides, initial_job_idx=initial_job_idx)


class GridSweeper(basic_sweeper.BasicSweeper):
    """Every combination of the values that were typed, the default: Hydra's own sweeper with one
    look ahead for each choice of files. Hydra composes all trials before the first one starts, and
    each of them again then: half of what a sweep of refused trials takes."""

    def _parse_config(self) -> list[str]:
        from llmx.compose.overrides import resolve_alias

        return [resolve_alias(word) for word in super()._parse_config()]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose before anything runs what may not compose: the files that the trials choose.

        Their other words are values of keys, which were checked as they were typed.
        """
        first = {tuple(filter(_chooses, words)): words for words in reversed(batch)}
        super().validate_batch_is_legal(list(reversed(first.values())))


def _chooses(word: str) -> bool:
    """Whether a word may choose a file, as ``zero=stage3`` or ``optim@second.optim=adamw``."""
    key = word.partition("=")[0]
    return "." not in key or "@" in key


class SearchSweeper(SetUp, Sweeper):
    """Chooses its trials as it goes, and runs them itself. Abstract, so no plugin."""

    config: DictConfig
    hydra_context: HydraContext


class OptunaSweeper(SearchSweeper):
    """Asks Optuna for trials, and tells it what they measured.

    The published plugin wants an Optuna before 3, ends at the first trial that fails, and has to be
    told what is better.
    """

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        sampler: str,
        seed: int,
        storage: str | None,
        study_name: str | None,
        params: Mapping[str, str] | None,
    ) -> None:
        self.n_trials, self.n_jobs = n_trials, n_jobs
        self.sampler, self.seed = sampler, seed
        self.storage, self.study_name = storage, study_name
        self.params = params

    def sweep(self, arguments: list[str]) -> None:
        from hydra_plugins.llmx_deepspeed import _optuna

        _optuna.sweep(self, arguments)


class TuneSweeper(SearchSweeper):
    """Searches for the fastest configuration that fits: what ``python -m llmx tune`` selects."""

    def sweep(self, arguments: list[str]) -> None:
        from hydra_plugins.llmx_deepspeed import _tune

        _tune.sweep(self, arguments)


def _store(group: str, name: str, plugin: type, **values: Any) -> None:
    target = f"hydra_plugins.llmx_deepspeed.launcher.{plugin.__name__}"
    ConfigStore.instance().store(
        group=group, name=name, node={"_target_": target, **values}, provider="llmx_deepspeed"
    )


_store("hydra/launcher", "deepspeed", DeepSpeedLauncher)
_store("hydra/sweeper", "grid", GridSweeper, max_batch_size=None, params=None)
_store("hydra/sweeper", "tune", TuneSweeper)
_store(
    "hydra/sweeper", "optuna", OptunaSweeper,
    n_trials=20, n_jobs=1, sampler="tpe", seed=0, storage=None, study_name=None, params=None,
)  # fmt: skip
