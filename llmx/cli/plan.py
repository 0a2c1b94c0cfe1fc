"""``python -m llmx plan [overrides]``; with ``hardware=A,B,C`` one table that compares clusters."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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
    values = _values(checked.words, config_dir)
    check_effects(experiment_from_dict(values), checked.words)
    composed = with_traced_choice(with_checked_inputs(compose(values)))
    return with_learned_time(with_traced_memory(composed, make=True)[0])


def _values(words: Sequence[str], config_dir: str | None) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from llmx.compose.hydra_config import explain_hydra, register_defaults
    from llmx.config.groups import conf_dir

    register_defaults()
    overrides = list(words)
    if not any(word.lstrip("+").startswith("run_dir=") for word in overrides):
        # Hydra's own is of a run that has begun.
        overrides.append(f"run_dir='{Path.cwd() / 'outputs' / 'plan'}'")
    if config_dir:
        overrides.append(f"hydra.searchpath=['file://{Path(config_dir).expanduser().absolute()}']")
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = compose("config", overrides=overrides)
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_hydra(error, list(words))) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
