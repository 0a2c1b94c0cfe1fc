"""``python -m llmx plan [overrides]``; with ``hardware=A,B,C`` it compares clusters in one
table."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from llmx.cli.hydra_app import composed, outputs_dir, run_hydra
from llmx.errors import ConfigError, LlmxError

if TYPE_CHECKING:
    from llmx.cli.arguments import Line
    from llmx.compose.complete import Composed

HARDWARE = "hardware"
_WRITES = {"run_dir", "dry_run"}
"""Keys that ask for the run directory of a plan."""


def main(words: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Print one plan, or compare clusters; returns the exit code."""
    from llmx.cli.arguments import read_line

    out, names = stream or sys.stdout, compared(words)
    if len(names) > 1:
        return compare(words, names, stream=out)
    line = read_line([*words, "dry_run=true"])
    typed = line.checked().words[:-1]
    keys = {word.lstrip("+").partition("=")[0] for word in typed}
    if line.multirun or line.show or keys & _WRITES or "dry_run=true" in words:
        return run_hydra([*words, "dry_run=true"])
    from llmx.lifecycle.start import show_plan

    show_plan(composed_line(line), overrides=typed, stream=out)
    return 0


def compared(words: Sequence[str]) -> list[str]:
    """The clusters of ``hardware=A,B``; none where a sweep (-m) or a print (--cfg) is asked for."""
    if any(word.startswith("-") and word != "--config-dir" for word in words):
        return []
    last = [word.partition("=")[2] for word in words if word.startswith(f"{HARDWARE}=")][-1:]
    return [name for words in last for word in words.split(",") if (name := word.strip())]


def compare(words: Sequence[str], names: Sequence[str], *, stream: TextIO) -> int:
    """Plan the same experiment on each cluster; writes no run directory."""
    from llmx.cli.arguments import read_line
    from llmx.observe.report.cluster_table import print_clusters

    line = read_line(words)
    shared = [word for word in line.overrides if not word.startswith(f"{HARDWARE}=")]
    plans: list[tuple[str, Composed | str]] = []
    for name in dict.fromkeys(names):
        try:
            overrides = (*shared, f"{HARDWARE}={name}")
            plans.append((name, planned(dataclasses.replace(line, overrides=overrides))))
        except LlmxError as error:
            plans.append((name, str(error)))
    refused = [f"{HARDWARE}={name}: {plan}" for name, plan in plans if isinstance(plan, str)]
    if len(refused) == len(plans):
        # What is wrong with the experiment is said once.
        texts = list(dict.fromkeys(plan for _, plan in plans if isinstance(plan, str)))
        raise ConfigError(texts[0] if len(texts) == 1 else "\n".join(refused))
    print_clusters(plans, stream=stream)
    return 0


def planned(line: Line) -> Composed:
    """The experiment of a command line, composed and planned as ``plan`` does; writes nothing."""
    from llmx.lifecycle.knowledge import informed
    from llmx.lifecycle.preflight import check_inputs

    composed = composed_line(line)
    check_inputs(composed)
    return informed(composed, make=True, choose=True)


def composed_line(line: Line) -> Composed:
    """The experiment of a command line with its first plan; data and models are not looked at."""
    from llmx.compose.complete import complete, plan_experiment

    exp, _, is_placed = composed(line)
    if not is_placed:  # a new one is that of a run that has begun
        place = str(outputs_dir() / "plan")
        exp = dataclasses.replace(exp, run_dir=place, name=exp.name or exp.model.name)
    return plan_experiment(*complete(exp))
