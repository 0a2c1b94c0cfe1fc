"""``hydra/sweeper=tune``: the sweeper that ``python -m llmx tune`` selects.

Thin, as ``launcher.py``; the work is in ``_tune``.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from hydra_plugins.llmx_deepspeed._sweeper import SearchSweeper


class TuneSweeper(SearchSweeper):
    """Searches for the fastest configuration that fits; its trials are those of any sweep."""

    def sweep(self, arguments: list[str]) -> Any:
        from hydra_plugins.llmx_deepspeed import _tune

        return _tune.sweep(self, arguments)


_CONFIG: dict[str, Any] = {
    "_target_": "hydra_plugins.llmx_deepspeed.tune_sweeper.TuneSweeper",
}
ConfigStore.instance().store(
    group="hydra/sweeper", name="tune", node=_CONFIG, provider="llmx_deepspeed"
)
