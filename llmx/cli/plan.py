"""``python -m llmx plan [overrides]``; with ``hardware=A,B,C`` it compares clusters in one
table."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from llmx.cli.hydra_app import composed, outputs_dir, train
from llmx.errors import ConfigError, LlmxError

if TYPE_CHECKING:
    from llmx.compose.complete import Composed
    from llmx.compose.words import Words

HARDWARE = "hardware"
_WRITES = {"run_dir", "dry_run"}
"""Keys that ask for the run directory of a plan."""


def run(words: Words, *, stream: TextIO | None = None) -> int:
    """Print one plan, or compare clusters; returns the exit code."""
    from llmx.cli.arguments import checked

    out, names = stream or sys.stdout, compared(words)
    if len(names) > 1:
        return compare(words, names, stream=out)
    dry = words.but(overrides=(*words.overrides, "dry_run=true"))
    typed = checked(dry)[:-1]
    keys = {word.lstrip("+").partition("=")[0] for word in typed}
    if words.multirun or words.show or keys & _WRITES or "dry_run=true" in words.overrides:
        return train(dry)
    from llmx.lifecycle.start import show_plan

    show_plan(composed_line(dry), overrides=typed, stream=out)
    return 0


def compared(words: Words) -> list[str]:
    """The clusters of ``hardware=A,B``; none where a sweep (-m) or a print (--cfg) is asked for."""
    if words.multirun or words.show:
        return []
    chosen = [word for word in words.overrides if word.startswith(f"{HARDWARE}=")]
    last = chosen[-1].partition("=")[2] if chosen else ""
    return [name.strip() for name in last.split(",") if name.strip()]


def compare(words: Words, names: Sequence[str], *, stream: TextIO) -> int:
    """Plan the same experiment on each cluster; writes no run directory."""
    from llmx.lifecycle.knowledge import informed
    from llmx.lifecycle.preflight import check_inputs
    from llmx.observe.report.cluster_table import print_clusters

    shared = [word for word in words.overrides if not word.startswith(f"{HARDWARE}=")]
    plans: list[tuple[str, Composed | str]] = []
    for name in dict.fromkeys(names):
        try:
            on_cluster = composed_line(words.but(overrides=(*shared, f"{HARDWARE}={name}")))
            check_inputs(on_cluster)
            plans.append((name, informed(on_cluster, variants=True, choose=True)))
        except LlmxError as error:
            plans.append((name, str(error)))
    refused = [f"{HARDWARE}={name}: {plan}" for name, plan in plans if isinstance(plan, str)]
    if len(refused) == len(plans):
        # What is wrong with the experiment is said once.
        texts = list(dict.fromkeys(plan for _, plan in plans if isinstance(plan, str)))
        raise ConfigError(texts[0] if len(texts) == 1 else "\n".join(refused))
    print_clusters(plans, stream=stream)
    return 0


def composed_line(words: Words) -> Composed:
    """The experiment of a command line with its first plan; data and models are not looked at."""
    from llmx.compose.complete import complete, plan_experiment

    exp, _, is_placed = composed(words)
    if not is_placed:  # a new one is that of a run that has begun
        place = str(outputs_dir() / "plan")
        exp = dataclasses.replace(exp, run_dir=place, name=exp.name or exp.model.name)
    return plan_experiment(*complete(exp))
