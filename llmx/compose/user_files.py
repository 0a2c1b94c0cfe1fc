"""Checks a user's own YAML files (``--config-dir``) before they are used.

What is wrong is said with file and line: a tab, a brace that is not closed, a key that is there
twice, another encoding, a key or an option that does not exist. Every key of another training tool
is explained at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmx.config.build import hints_of
from llmx.config.foreign import NAMES
from llmx.config.groups import (
    ALIASES,
    GROUPS,
    counterpart,
    find_option,
    hydra_problem,
    no_such_option,
    shown,
)
from llmx.config.schema import Experiment
from llmx.config.yaml_files import check_key, read_text, read_values, read_yaml
from llmx.errors import ConfigError

_ENTRY = re.compile(r"(?P<words>((override|optional)\s+)*)(?P<root>/)?(?P<group>[\w/-]+)(@.*)?$")
_MAX_FILES = 1000
FILES = (".yaml", ".yml", ".json")
"""Endings of what is taken for a file of the user's. JSON is only explained."""


def check_foreign(path: Path) -> None:
    """Raise ConfigError for a file of another training tool, with a line for each of its keys, and
    for any other JSON."""
    is_json = path.suffix == ".json"
    values = _read_json(path) if is_json else read_values(path)
    names = list(_settings(values)) if isinstance(values, dict) else []
    our_names = (*hints_of(Experiment), *GROUPS, *ALIASES, "defaults", "hydra")
    ours = [name for name in names if name.split(".")[0] in our_names]
    foreign = [name for name in names if name in NAMES]
    # More than a quarter: the config.json of a model has one or two of these names.
    if 2 * len(ours) < len(names) < 4 * len(foreign):
        keys = {name: counterpart(name) for name in names}
        lines = [
            f"{shown(name)}: {f'here it is {key}' if key else 'has no counterpart here'}."
            for name, key in keys.items()
        ]
        raise ConfigError(
            f"{path}: is of another tool. Write a YAML file with the keys of llmx "
            "(docs/coming-from.md):\n" + "\n".join(lines)
        )
    if is_json:
        raise ConfigError(f"{path}: is JSON. An experiment is a YAML file: lines of key: value.")


def check_no_file(option: str) -> None:
    """Raise ConfigError for a file in the place of an option of ``experiment``."""
    for name in (option, f"{option}.yaml"):  # SWEEP_DIR/best
        path = os.path.expanduser(name)  # noqa: PTH111 - of Path it raises for ~ and no user's name
        if name.endswith(FILES) and os.path.isfile(path):  # noqa: PTH113 - nor for a name too long
            check_foreign(Path(path))
            raise ConfigError(
                f"experiment={shown(option)}: is a file. Give it alone: python -m llmx "
                f"{shown(name)}."
            )


def _read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ConfigError(f"{path}, line {line}: cannot be read as JSON.") from error


def _settings(values: dict[Any, Any], before: str = "") -> Iterator[str]:
    """The keys of a file; of DeepSpeed's sections each with its dots."""
    for key, value in values.items():
        name = f"{before}{key}"
        if value and isinstance(value, dict) and any(n.startswith(f"{name}.") for n in NAMES):
            yield from _settings(value, f"{name}.")
        else:
            yield name


def check_user_files(choices: Sequence[tuple[str, str]], directories: Sequence[Path]) -> None:
    """Raise ConfigError for the first file of the user's that cannot be used.

    ``choices``: (group, option) as chosen on the command line; what their defaults lists choose
    is followed.
    """
    open_choices, checked = list(choices), set[Path]()
    while open_choices and len(checked) < _MAX_FILES:
        group, name = open_choices.pop()
        path = find_option(group, name, directories)
        if path is None or path in checked:
            continue
        checked.add(path)
        if any(path.is_relative_to(directory) for directory in directories):
            open_choices += _checked(path, group, directories)


def _checked(path: Path, group: str, directories: Sequence[Path]) -> list[tuple[str, str]]:
    if group == "experiment":
        check_foreign(path)
    node = read_yaml(path)
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}, line 1: must be lines of key: value.")
    package = _package(path, group)
    choices: list[tuple[str, str]] = []
    for key, value in node.value:
        if key.value == "defaults":
            choices += _defaults(path, group, value, directories)
        elif package is not None:
            where = f"{package}.{key.value}" if package else key.value
            if where.partition(".")[0] == "hydra":
                _check_hydra(path, where, key, value)
                continue
            check_key(path, where, key, value)
    return choices


def _check_hydra(path: Path, where: str, key: yaml.Node, value: yaml.Node) -> None:
    """``check_key`` for keys of Hydra's own."""
    if isinstance(value, yaml.MappingNode):
        for inner, item in value.value:
            _check_hydra(path, f"{where}.{inner.value}", inner, item)
    elif problem := hydra_problem(where):
        raise ConfigError(f"{path}, line {key.start_mark.line + 1}: {where}: {problem}")


def _package(path: Path, group: str) -> str | None:
    """The config node that the keys of a file set: the group, what a header names, or everything;
    None where Hydra decides."""
    header = re.search(r"^#\s*@package\s+(\S+)", read_text(path), re.MULTILINE)
    if header is None or header[1] in ("_group_", group):
        return group.replace("/", ".")
    if header[1] == "_global_":
        return ""
    return None if header[1].startswith("_") else header[1]


def _defaults(
    path: Path, group: str, node: yaml.Node, directories: Sequence[Path]
) -> Iterator[tuple[str, str]]:
    """The choices of a defaults list; ConfigError for one that does not exist."""
    is_list = isinstance(node, yaml.SequenceNode)
    for entry in node.value if is_list else [node]:
        place, names = f"{path}, line {entry.start_mark.line + 1}", [entry]
        chosen = override = ""
        if is_list and isinstance(entry, yaml.ScalarNode):
            if entry.value == "_self_":
                continue
            chosen = group
        elif is_list and isinstance(entry, yaml.MappingNode) and len(entry.value) == 1:
            key, value = entry.value[0]
            names = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if match := _ENTRY.match(str(key.value)):
                override, chosen = match["words"], match["group"]
                chosen = chosen if match["root"] else f"{group}/{chosen}"
        if not chosen:
            raise ConfigError(
                f"{place}: an entry of defaults is - override /GROUP: OPTION, - OPTION or - _self_."
            )
        last = chosen.rpartition("/")[2]
        if last in GROUPS and last != group and "override" not in override:
            raise ConfigError(
                f"{place}: a group of the config is chosen by override. Write - override /{last}: "
                f"{shown(names[0].value) if names else 'OPTION'}."
            )
        if len(names) > 1 and chosen in GROUPS:
            mix = " Mix data sets with data.sources." if chosen == "data" else ""
            raise ConfigError(
                f"{place}: {chosen} takes one option; of several, Hydra keeps the values of the "
                f"last one.{mix}"
            )
        for item in names:
            parent, _, name = f"{chosen}/{item.value}".rpartition("/")
            if item.tag.endswith(":null") or "${" in name or "optional" in override:
                continue
            if find_option(parent, name, directories) is None:
                raise ConfigError(f"{place}: {no_such_option(parent, name, directories)}")
            yield parent, name
