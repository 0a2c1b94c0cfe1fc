"""``hydra/sweeper=tune``: the sweeper that ``python -m llmx tune`` selects.

Thin, as ``launcher.py``; the work is in ``_tune``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.plugins.launcher import Launcher
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


class TuneSweeper(Sweeper):
    """Searches for the fastest configuration that fits; its trials are those of any sweep."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None
        self.hydra_context: HydraContext | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from hydra.core.plugins import Plugins

        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from hydra_plugins.llmx_deepspeed import _tune

        return _tune.sweep(self, arguments)


_CONFIG: dict[str, Any] = {
    "_target_": "hydra_plugins.llmx_deepspeed.tune_sweeper.TuneSweeper",
}
ConfigStore.instance().store(
    group="hydra/sweeper", name="tune", node=_CONFIG, provider="llmx_deepspeed"
)
