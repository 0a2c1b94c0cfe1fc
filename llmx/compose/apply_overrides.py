"""Applies overrides to a snapshot by Hydra, for ``resume`` and ``reproduce``; and writes a snapshot
as overrides, for a run that starts from a saved ``config.yaml``.

A dotted key changes one value; a whole group (``hardware=a100x8``) is composed anew from the
group's file over the schema's defaults, and replaces the snapshot's section.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmx.compose.hydra_config import composed_values, free_mappings, leaves
from llmx.compose.overrides import SET, check_overrides, quoted
from llmx.config import DeviceConfig, Experiment, experiment_from_dict, to_dict
from llmx.config.build import dataclass_from, shown
from llmx.config.by_host import with_texts
from llmx.config.groups import CONF, GROUPS, OPTIONAL_GROUPS
from llmx.config.yaml_files import read_values
from llmx.errors import ConfigError
from llmx.hardware.resolve import with_precisions

_SNAPSHOT = "llmx_snapshot"


def group_of(override: str) -> str | None:
    """``hardware=a100x8`` -> ``hardware``; None for a dotted key."""
    name = override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]
    head = name.split("/", 1)[0]
    return head if head in GROUPS and "." not in name else None


def apply(
    exp: Experiment, overrides: Sequence[str], *, config_dirs: Sequence[str] = ()
) -> Experiment:
    """The experiment with the overrides; ConfigError as at a first start.

    Nothing is completed or checked yet: see ``llmx.compose.complete``.
    """
    if not overrides:
        return exp
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    chosen = _chosen_groups(overrides)
    fresh = to_dict(Experiment())
    base = {k: fresh[k] if k in chosen else value for k, value in to_dict(exp).items()}
    node = OmegaConf.create(_escaped(base))
    for key in free_mappings():
        OmegaConf.set_struct(OmegaConf.select(node, key), False)
    defaults: list[Any] = [f"{_SNAPSHOT}_values", {"hardware/devices": None}]
    defaults += [{group: None} for group in GROUPS if group != "experiment"]
    store = ConfigStore.instance()
    store.store(name=f"{_SNAPSHOT}_values", node=node)
    store.store(name=_SNAPSHOT, node={"defaults": [*defaults, "_self_"]})
    words = check_overrides(overrides, config_dirs=config_dirs)
    if "hardware" in chosen:
        words.insert(0, "hardware/devices=catalogue")
    elif any(word.startswith("hardware.hosts") for word in words):
        words.insert(0, "hardware.kind=static")  # those of kind=local are detected
    values, _ = composed_values(_SNAPSHOT, words, typed=overrides, config_dirs=config_dirs)
    return experiment_from_dict(values)


def _chosen_groups(words: Sequence[str]) -> set[str]:
    """The groups of which an option is chosen; ConfigError for an experiment."""
    for word in words:
        if group_of(word) == "experiment":
            raise ConfigError(
                f"{shown(word)}: a run keeps its experiment. Change its groups and keys: "
                "zero=stage3, optim.lr=1e-4."
            )
    return {group for word in words if (group := group_of(word))}


NOT_COPIED = (
    "schema_version", "run_dir", "dry_run", "launch.detach", "model.resolved",
    "model.resolved_from",
)  # fmt: skip
"""Keys of a saved config that another run of it does not have from there: llmx fills them in, or
they say how that one run was started."""


def as_overrides(exp: Experiment, typed: Sequence[str]) -> list[str]:
    """The overrides that compose a saved experiment again, on this machine and in a run directory
    of its own.

    Every group is left out (``~optim``), so that its values are the schema's defaults but for those
    that are set here. ``typed``: the overrides beside the saved config; a group that they choose
    replaces its section.
    """
    chosen = _chosen_groups(typed)
    hardware, name = exp.hardware, exp.name
    if hardware.kind == "local" or exp.launch.transport == "external":
        hardware = replace(hardware, kind="local", hosts=[])  # those of this machine
    catalogue = _device_types()
    devices = {key: kind for key, kind in hardware.devices.items() if kind != catalogue.get(key)}
    hardware = replace(hardware, devices=devices)
    exp = replace(exp, hardware=hardware, name="" if name == Path(exp.run_dir).name else name)
    words = [f"~{group}" for group in GROUPS if group not in {*chosen, *OPTIONAL_GROUPS, "zero"}]
    defaults = dict(leaves(to_dict(Experiment())))
    del defaults["data.path"]  # nothing composes without one: see hydra_config
    if "zero" not in chosen:  # run directories are named after this choice
        stage = defaults["zero.stage"] = to_dict(exp)["zero"]["stage"]
        words.append(f"zero={stage if stage == 'auto' else f'stage{stage}'}")
    for key, value in leaves(to_dict(exp)):
        is_default = key in defaults and value == defaults[key]
        if key in NOT_COPIED or key.partition(".")[0] in chosen or is_default:
            continue
        word = f"{SET}{key}={quoted(_escaped(value))}"
        if isinstance(value, dict) and not _reads_back(word, value):
            raise ConfigError(
                f"{key}={shown(value)}: has a name that no word of a command line can have. Write "
                f"it into an option of your own: --config-dir DIR {key.partition('.')[0]}=NAME."
            )
        words.append(word)
    return words


def _device_types() -> dict[str, DeviceConfig]:
    """The device types of ``conf/hardware/devices``, as a snapshot has them."""
    values = read_values(CONF / "hardware" / "devices" / "catalogue.yaml")
    return {
        name: with_precisions(dataclass_from(DeviceConfig, device, path=name))
        for name, device in values.items()
    }


def _reads_back(word: str, value: Any) -> bool:
    """Whether a mapping is the same once Hydra has read it: names have no quotes there."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): named(item) for name, item in value.items()}
        return [*map(named, value)] if isinstance(value, list) else value

    try:
        read = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return False
    return bool(named(read) == named(_escaped(value)))


def _escaped(value: Any) -> Any:
    """Text that OmegaConf would read as an interpolation, so that it reads it as text."""
    return with_texts(
        value, lambda text: re.sub(r"(\\*)\$\{", lambda mark: mark[1] * 2 + r"\${", text)
    )
