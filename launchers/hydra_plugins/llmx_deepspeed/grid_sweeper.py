"""``hydra/sweeper=grid``: every combination of the values that were typed; the default.

Hydra's own sweeper composes all trials before the first one starts, and the launcher each of them
once more: half of what a sweep of refused trials takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins import basic_sweeper
from hydra.core.config_store import ConfigStore


class GridSweeper(basic_sweeper.BasicSweeper):
    """Hydra's own, with one look ahead for each choice of files instead of one for each trial."""

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


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="grid",
    node={
        "_target_": "hydra_plugins.llmx_deepspeed.grid_sweeper.GridSweeper",
        "max_batch_size": None,
        "params": None,
    },
    provider="llmx_deepspeed",
)
