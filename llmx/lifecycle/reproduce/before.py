"""Everything that differs from then, before a reproduction starts: gathered and sorted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from llmx.compose.complete import Composed
from llmx.config import Experiment
from llmx.lifecycle.hosts import hosts_then_and_now, of_this_machine
from llmx.lifecycle.resume.edited import edited_config
from llmx.lifecycle.resume.history import history
from llmx.plan.balance import is_of
from llmx.plan.types import Plan
from llmx.run.provenance.differences import (
    BREAKS,
    MAY,
    SEVERITIES,
    Difference,
    differences,
    plan_differences,
)
from llmx.run.rundir import RunDir, read_mapping


def all_differences(
    run: RunDir,
    new: Experiment,
    composed: Composed,
    *,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
) -> list[Difference]:
    """Of provenance (``then``, ``now``), hosts, plan and the run's own past; the gravest first."""
    found = [
        *edited_config(run, then),
        *of_this_machine(differences(then, now), composed.plan),
        *hosts_then_and_now(run, new.launch, new.run_dir, composed.plan),
        *plan_differences(
            read_mapping(run.plan),
            as_trained(run, composed.plan),
            ds_then=read_mapping(run.ds_config),
            ds_now=composed.ds_config,
        ),
        *_of_the_run_itself(run, new.deterministic, composed.plan.accelerator),
    ]
    return sorted(found, key=lambda difference: SEVERITIES.index(difference.severity))


def as_trained(run: RunDir, plan: Plan) -> dict[str, Any]:
    """The values of a plan; with the split of then, where its ranks take that from
    ``balance.json``."""
    values = plan.to_dict()
    then = read_mapping(run.plan)
    if then and is_of(read_mapping(run.balance), plan):
        values["batch"] = then["batch"]
    return values


def _of_the_run_itself(
    run: RunDir, deterministic: bool | None, accelerator: str
) -> list[Difference]:
    """What keeps this very run from being repeated bit for bit, whatever the machine."""
    found = []
    if accelerator == "cuda" and not deterministic:
        found.append(
            Difference(
                MAY, "deterministic=false: kernels may differ from run to run", "so", "so",
                "train with deterministic=true to repeat a run bit for bit",
            )
        )  # fmt: skip
    for directory in history(run):
        change = read_mapping(directory / "changes.json")
        if not change:
            continue
        other = [key for key, effect in change["effects"].items() if effect != "same numbers"]
        other += [row["what"] for row in change.get("differs", ())]
        if other and change["step"]:
            found.append(
                Difference(
                    BREAKS, f"resumed at step {change['step']}",
                    f"other {', '.join(other)}", "from the start as it is",
                    f"{os.path.relpath(directory, run.root)}/ has the previous config",
                )
            )  # fmt: skip
    return found
