"""``hydra/launcher=deepspeed``: runs the trials of a multirun one after another.

Thin and discoverable, as Hydra scans this package at every start; the work is in ``_core``.
``python -m llmx --info plugins`` lists it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from llmx.observe.report.sweep_table import Trial
    from llmx.sweep.sweep import Sweep


class DeepSpeedLauncher(Launcher):
    """One trial at a time, each through the same code as a single run."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.task_function: TaskFunction | None = None
        self.hydra_context: HydraContext | None = None
        self.trials: list[Trial] = []
        self.sweep: Sweep | None = None
        self.searches = False
        """Whether a sweeper hands over trials as it goes, and finishes the sweep itself."""
        self.may_fail: Sequence[str] = ()
        """``Sweep.may_fail``."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from hydra_plugins.llmx_deepspeed import _core

        return _core.launch(self, job_overrides=job_overrides, initial_job_idx=initial_job_idx)


_CONFIG: dict[str, Any] = {
    "_target_": "hydra_plugins.llmx_deepspeed.launcher.DeepSpeedLauncher",
}
ConfigStore.instance().store(
    group="hydra/launcher", name="deepspeed", node=_CONFIG, provider="llmx_deepspeed"
)
