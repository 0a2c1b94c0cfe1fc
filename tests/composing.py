"""Compose as the command line does, inside a test: ``values(["zero=stage3"])``."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any
from unittest import mock

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from llmx.cli.arguments import as_meant
from llmx.compose.complete import Composed, complete, plan_experiment
from llmx.compose.hydra_config import register_defaults
from llmx.compose.overrides import resolve_alias
from llmx.config import Experiment, experiment_from_dict
from llmx.config.groups import CONF, GROUPS
from llmx.lifecycle.knowledge import informed
from llmx.plan.knowledge import Knowledge
from llmx.plan.network import Network
from llmx.plan.trace import Traces


def _chooses_an_option(override: Override) -> bool:
    key = override.key_or_group
    return key in GROUPS or key.startswith("hydra") or "/" in key or override.package is not None


@functools.cache
def _options(words: tuple[str, ...]) -> DictConfig:
    """The config of these options, unresolved. Hydra takes 0.15 s for it, and hundreds of tests
    set values beside the same options."""
    register_defaults()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", overrides=list(words))


def values(overrides: list[str], *, run_dir: Path | str = "/runs/test") -> dict[str, Any]:
    """The composed, resolved values; Hydra's own run directory is replaced by ``run_dir``."""
    words = as_meant([resolve_alias(word) for word in overrides])
    parsed = OverridesParser.create().parse_overrides([*words, f"run_dir={run_dir}"])
    options = [override.input_line for override in parsed if _chooses_an_option(override)]
    cfg = copy.deepcopy(_options(tuple(options)))
    # As Hydra does behind the options.
    ConfigLoaderImpl._apply_overrides_to_config(
        [override for override in parsed if not _chooses_an_option(override)], cfg
    )
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def composed(overrides: list[str], *, run_dir: Path | str = "/runs/test") -> Composed:
    """Composed, completed, validated and planned."""
    exp = experiment_from_dict(values(overrides, run_dir=run_dir))
    return plan_experiment(*complete(exp))


def planned(overrides: list[str], *, run_dir: Path | str = "/runs/test") -> Composed:
    """The same with traces, where a test has them (``made_up_traces``), and choices by them."""
    return informed(composed(overrides, run_dir=run_dir), choose=True)


def sized(overrides: list[str], *, run_dir: Path | str = "/runs/test") -> Composed:
    """The same as ``composed``, with the networks of the task: sizes and times are known."""
    exp, problems = complete(experiment_from_dict(values(overrides, run_dir=run_dir)))
    return plan_experiment(exp, problems, knowledge=with_networks(exp))


def with_networks(exp: Experiment) -> Knowledge:
    """Knowledge of the networks alone, where they can be built: no micro step is traced."""
    try:
        return Knowledge(traces=Traces({}, networks=networks(exp)))
    except OSError:  # its config is nowhere
        return Knowledge()


def networks(exp: Experiment) -> dict[str, Network]:
    """The networks of the task as they are built, by name; built once for alike experiments."""
    parts = [exp.model, exp.adapter, exp.task.kind, exp.task.options, exp.data.seq_len]
    key = repr(parts)
    if key not in _BUILT:
        from llmx.train.memory_trace import networks_of

        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            _BUILT[key] = networks_of(exp)
    return _BUILT[key]


_BUILT: dict[str, dict[str, Network]] = {}
