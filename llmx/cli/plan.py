"""``python -m llmx plan [overrides]``; with ``hardware=A,B,C`` one table that compares clusters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from llmx.cli.commands import COMMANDS
from llmx.cli.hydra_app import run_hydra
from llmx.errors import ConfigError, LlmxError

if TYPE_CHECKING:
    from llmx.compose.complete import Composed

HARDWARE = "hardware"


def main(words: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Print one plan, or compare clusters; returns the exit code."""
    names = compared(words)
    if len(names) < 2:
        keep = any(word.startswith(("dry_run=", "hydra.run.dir=")) for word in words)
        return run_hydra([*words, "dry_run=true"], keep=keep)
    return compare(words, names, stream=stream or sys.stdout)


def compared(words: Sequence[str]) -> list[str]:
    """The clusters of ``hardware=A,B``; none where a sweep (-m) or a print (--cfg) is asked for."""
    if any(word.startswith("-") and word != "--config-dir" for word in words):
        return []
    last = [word.partition("=")[2] for word in words if word.startswith(f"{HARDWARE}=")][-1:]
    return [name for value in last for each in value.split(",") if (name := each.strip())]


def compare(words: Sequence[str], names: Sequence[str], *, stream: TextIO) -> int:
    """Plan the same experiment on each cluster; writes no run directory."""
    from llmx.cli.arguments import read_line
    from llmx.observe.report.cluster_table import print_clusters

    line = read_line(words)
    others = [word for word in line.overrides if not word.startswith(f"{HARDWARE}=")]
    found: list[tuple[str, Composed | str]] = []
    for name in dict.fromkeys(names):
        try:
            found.append((name, planned([*others, f"{HARDWARE}={name}"], line.config_dir)))
        except LlmxError as error:
            found.append((name, str(error)))
    refused = [f"{HARDWARE}={name}: {plan}" for name, plan in found if isinstance(plan, str)]
    if len(refused) == len(found):
        # What is wrong with the experiment is said once.
        texts = list(dict.fromkeys(plan for _, plan in found if isinstance(plan, str)))
        raise ConfigError(texts[0] if len(texts) == 1 else "\n".join(refused))
    print_clusters(found, stream=stream)
    return 0


def planned(overrides: Sequence[str], config_dir: str | None) -> Composed:
    """The experiment of these words, composed and planned as ``plan`` does; nothing is written."""
    from llmx.cli.arguments import as_meant
    from llmx.compose.complete import compose
    from llmx.compose.effects import check_effects
    from llmx.compose.hydra_config import composed_values, register_defaults
    from llmx.compose.overrides import check_overrides
    from llmx.config import experiment_from_dict
    from llmx.lifecycle.learned import with_learned_time
    from llmx.lifecycle.memory import with_traced_choice, with_traced_memory
    from llmx.lifecycle.preflight import with_checked_inputs

    checked = check_overrides(
        as_meant(overrides),
        config_dirs=[config_dir] if config_dir else [],
        commands=tuple(COMMANDS),
    )
    words = list(checked.words)
    if not any(word.lstrip("+").startswith("run_dir=") for word in words):
        # Hydra's own is of a run that has begun.
        words.append(f"run_dir='{Path.cwd() / 'outputs' / 'plan'}'")
    register_defaults()
    directories = [config_dir] if config_dir else []
    values = composed_values("config", words, typed=checked.words, config_dirs=directories)
    check_effects(experiment_from_dict(values), checked.words)
    composed = with_traced_choice(with_checked_inputs(compose(values)))
    return with_learned_time(with_traced_memory(composed, make=True)[0])
