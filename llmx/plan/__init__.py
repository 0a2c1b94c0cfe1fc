"""Pure planning: batch algebra, rank layout, precision, memory, and DeepSpeed's JSON."""

from llmx.plan.ds_config import ds_config
from llmx.plan.make import make_plan
from llmx.plan.types import BatchPlan, HostPlan, MemoryPlan, Plan, RankPlan

__all__ = [
    "BatchPlan",
    "HostPlan",
    "MemoryPlan",
    "Plan",
    "RankPlan",
    "ds_config",
    "make_plan",
]
