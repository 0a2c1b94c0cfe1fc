"""Compose as the command line does, inside a test: ``values(["zero=stage3"])``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from llmx.cli.arguments import as_meant
from llmx.compose.complete import Composed, complete, plan_experiment
from llmx.compose.hydra_config import register_defaults
from llmx.compose.overrides import resolve_alias
from llmx.config import experiment_from_dict
from llmx.config.groups import CONF


def values(overrides: list[str], *, run_dir: Path | str = "/runs/test") -> dict[str, Any]:
    """The composed, resolved values; Hydra's own run directory is replaced by ``run_dir``."""
    register_defaults()
    words = as_meant([resolve_alias(word) for word in overrides])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra_compose("config", overrides=[*words, f"run_dir={run_dir}"])
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def composed(overrides: list[str], *, run_dir: Path | str = "/runs/test") -> Composed:
    """Composed, completed, validated and planned."""
    exp = experiment_from_dict(values(overrides, run_dir=run_dir))
    return plan_experiment(*complete(exp))
