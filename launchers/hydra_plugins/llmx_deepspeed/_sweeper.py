"""What the sweepers of llmx share: the launcher that takes their trials.

Not scanned by Hydra (its name begins with ``_``) and abstract, so no plugin of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.plugins.launcher import Launcher
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


class SearchSweeper(Sweeper):
    """Hands trials to a launcher as it goes."""

    config: DictConfig | None = None
    launcher: Launcher | None = None
    hydra_context: HydraContext | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from hydra.core.plugins import Plugins

        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
