"""``hydra/sweeper=optuna``: a search by Optuna, whose trials are those of any sweep.

Of our own: the published plugin wants an Optuna before 3, ends at the first trial that fails, and
has to be told what is better. Thin, as ``launcher.py``; the work is in ``_optuna``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra_plugins.llmx_deepspeed._sweeper import SearchSweeper


class OptunaSweeper(SearchSweeper):
    """Asks Optuna for trials, and tells it what they measured."""

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

    def sweep(self, arguments: list[str]) -> Any:
        from hydra_plugins.llmx_deepspeed import _optuna

        return _optuna.sweep(self, arguments)


_CONFIG: dict[str, Any] = {
    "_target_": "hydra_plugins.llmx_deepspeed.optuna_sweeper.OptunaSweeper",
    "n_trials": 20,
    "n_jobs": 1,
    "sampler": "tpe",
    "seed": 0,
    "storage": None,
    "study_name": None,
    "params": None,
}
ConfigStore.instance().store(
    group="hydra/sweeper", name="optuna", node=_CONFIG, provider="llmx_deepspeed"
)
