"""OpenMP threads of a rank: its share of the cores of its host. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from llmx.config.accelerators import ACCELERATORS
from llmx.config.schema import Experiment

SHARED_BY = "LLMX_RANKS_PER_HOST"
"""How many ranks share the cores of a host, where other runs use its other slots."""
BESIDE_A_GPU = 8
"""A rank with a GPU gains nothing from more, unless it updates offloaded weights."""


def threads_per_rank(
    exp: Experiment, accelerator: str, *, cores: int, ranks: int, environment: Mapping[str, str]
) -> int:
    """``ranks`` of this run, or as many as ``environment`` names, share the ``cores`` of a host."""
    shared_by = environment.get(SHARED_BY, "")
    share = cores // max(ranks, int(shared_by) if shared_by.isdecimal() else 1)
    updates_on_cpu = not ACCELERATORS[accelerator].is_gpu or exp.zero.offload_optimizer != "none"
    return max(1, share if updates_on_cpu else min(BESIDE_A_GPU, share))
