"""``data=[mine,{alpaca: 0.5}]``: named data sets, mixed.

A data set gets its name by a file ``data/NAME.yaml`` in a directory that ``--config-dir`` names.
Its path, format and columns become one of ``data.sources``, with the weight that stands beside the
name.

    python -m llmx plan --config-dir ~/llmx 'data=[mine,{alpaca: 0.5}]'
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from llmx.compose.user_files import read_text, read_yaml
from llmx.config.groups import find_option, no_such_option
from llmx.config.keys import shown
from llmx.config.schema import SourceConfig
from llmx.errors import ConfigError

_OF_A_SOURCE = {field.name for field in fields(SourceConfig)}


def mixture_of(entries: Sequence[Any], typed: set[str], directories: Sequence[Path]) -> list[str]:
    """The overrides that mix these data sets. ``typed``: the keys on the command line, which hold
    for the whole mixture."""
    sources = []
    for entry in entries:
        for name, weight in entry.items() if isinstance(entry, dict) else [(entry, 1)]:
            path = find_option("data", str(name), directories)
            if path is None:
                raise ConfigError(no_such_option("data", shown(name), directories))
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ConfigError(f"data=[{{{name}: {shown(weight)}}}]: the weight is a number.")
            sources.append({**_source(path, typed), "weight": weight})
    if not sources:
        raise ConfigError("data=[]: names no data set. Write data=[NAME,{NAME: WEIGHT}].")
    listed = ",".join(_written(source) for source in sources)
    return ["data=mixture", f"data.sources=[{listed}]"]


def _source(path: Path, typed: set[str]) -> dict[str, Any]:
    """The values of one data set as an entry of ``data.sources``."""
    read_yaml(path)  # says what is wrong with the file
    values = yaml.safe_load(read_text(path)) or {}
    if values.get("path") in (None, "", "???"):
        raise ConfigError(
            f"{path}: has no path, so data=[{path.stem}] names no data. Write data/NAME.yaml with "
            "path: FILE into a directory of your own: --config-dir DIR."
        )
    columns = {**(values.get("columns") or {}), **(values.pop("data_map", None) or {})}
    for key in values.keys() - _OF_A_SOURCE - {"name"}:
        if f"data.{key}" not in typed:
            raise ConfigError(
                f"{path}: data.{key} holds for a whole mixture, not for one of its data sets. Type "
                f"data.{key}={shown(values[key])}, or leave it out of the file."
            )
    return {**{k: v for k, v in values.items() if k in _OF_A_SOURCE}, "columns": columns}


def _written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
