"""A plan with the speeds that an earlier run on these hosts has measured."""

from __future__ import annotations

from dataclasses import replace

from llmx.compose.complete import Composed, plan_experiment
from llmx.run.speeds import known_speeds

BY_SPEED = (
    *("batch", "balance", "ranks", "memory", "time", "notes"),
    "grad_accum_dtype",
)
"""Fields of a plan that follow from the split."""


def with_known_speeds(composed: Composed) -> Composed:
    """Planned again where the split is still to be measured and was measured before: the plan then
    shows the split of the run. The ranks decide themselves, by their own caches."""
    exp, plan = composed.experiment, composed.plan
    if plan.balance is None or not plan.balance.pending:
        return composed
    known = known_speeds(exp, plan)
    if known is None:
        return composed
    found = plan_experiment(exp, is_checked=True, known=known)
    plan = replace(plan, **{name: getattr(found.plan, name) for name in BY_SPEED})
    return replace(composed, plan=plan, ds_config=found.ds_config)
