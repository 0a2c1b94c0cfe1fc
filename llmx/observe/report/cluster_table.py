"""Several clusters for one experiment, side by side. Only rich, imported late.

``python -m llmx plan hardware=a100x8,h100x8`` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from llmx import text as human
from llmx.observe.page import block
from llmx.observe.report.plan_table import SHOWN_STEPS, VERDICTS, by_column, seconds, verdict
from llmx.observe.report.screen import open_console, print_blocks
from llmx.plan.make import without_price
from llmx.plan.types import Plan

if TYPE_CHECKING:
    from llmx.compose.complete import Composed

UNKNOWN = "unknown"


def print_clusters(clusters: Sequence[tuple[str, Composed | str]], *, stream: TextIO) -> None:
    """One column for each cluster, in the order that was asked for; what refuses an experiment is
    a message instead of a plan, and stands below."""
    plans = [composed.plan for _, composed in clusters if not isinstance(composed, str)]
    steps = all(plan.total_steps for plan in plans)
    columns = [
        {"fits": "refused"} if isinstance(composed, str) else cluster_values(composed, steps=steps)
        for _, composed in clusters
    ]
    names = dict.fromkeys(key for column in columns for key in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    title = "The same experiment on each cluster, as predicted"
    blocks = [block("heading", title), by_column([name for name, _ in clusters], rows)]
    print_blocks(open_console(stream), [*blocks, block("text", "\n".join(notes(clusters)))])


def cluster_values(composed: Composed, *, steps: bool) -> dict[str, str]:
    """The column of a cluster, by row; ``steps``: all clusters know the number of steps."""
    plan = composed.plan
    verdicts = {verdict(memory) for memory in plan.memory if memory.capacity_gib}
    fits = next((worst for worst in VERDICTS if worst in verdicts), "not checked")
    peaks = [
        human.gib(memory.total_gib)
        + (f" of {memory.capacity_gib:.0f}" if memory.capacity_gib else "")
        for memory in plan.memory
    ]
    run = "whole run" if steps else f"{SHOWN_STEPS:,} steps"
    values = {
        "devices": _devices(plan),
        "precision": plan.precision,
        **({"chosen": " ".join(plan.chosen.words)} if plan.chosen is not None else {}),
        "fits": fits,
        "peak GiB": ", ".join(peaks) or UNKNOWN,
        **dict.fromkeys(("step", "tokens/s", "MFU", "bottleneck", run), UNKNOWN),
    }
    time = plan.time
    if time is None or not time.step_s:
        return values
    values |= {
        "step": seconds(time.step_s),
        "tokens/s": f"{time.tokens_per_s:,.0f}",
        "MFU": ", ".join(human.percent(part, decimals=1) for _, part in time.mfu) or UNKNOWN,
        "bottleneck": time.bottleneck,
        run: human.duration(3600 * time.hours if steps else SHOWN_STEPS * time.step_s),
    }
    if time.hours:
        values["GPU hours"] = f"{time.device_hours:,.3g}"
    if time.cost is not None:
        values["cost"] = f"{time.cost:,.2f}"
    return values


def notes(clusters: Sequence[tuple[str, Composed | str]]) -> list[str]:
    """Sentences below the table: why a value is unknown or refused, and whether steps differ."""
    lines = []
    plans = {name: composed.plan for name, composed in clusters if not isinstance(composed, str)}
    tokens = {name: plan.batch.tokens_per_step for name, plan in plans.items()}
    if len(set(tokens.values())) > 1:
        listed = ", ".join(f"{value:,} on {name}" for name, value in tokens.items())
        lines.append(
            f"The steps do not have the same number of tokens: {listed}. Set batch.global_batch to "
            "compare the same training."
        )
    if plans and not all(plan.total_steps for plan in plans.values()):
        lines.append(
            "The number of steps is unknown until the data is read: set task.steps for a total."
        )
    for name, plan in plans.items():
        if plan.time is not None and plan.time.unknown:
            lines.append(f"{name}: the time is not known: {plan.time.unknown}.")
    for name, composed in clusters:
        if isinstance(composed, str):
            lines.append(f"{name}: {composed}")
        elif unpriced := without_price(composed.experiment.hardware, composed.plan.hosts):
            lines.append(f"{name}: no price for {', '.join(unpriced)} (hardware.price_per_hour).")
    sources = [text for plan in plans.values() if plan.time for text in plan.time.sources]
    if sources:
        lines.append(f"From: {'; '.join(dict.fromkeys(sources))} (docs/planner.md).")
    return lines


def _devices(plan: Plan) -> str:
    runs = groupby(rank.device for rank in plan.ranks)
    return " + ".join(f"{len(list(run))}{human.TIMES}{name}" for name, run in runs)
