"""Checks a user's own YAML files (``--config-dir``) before they are used.

What is wrong is said with file and line: a tab, a brace that is not closed, a key that is there
twice, another encoding, a key or an option that does not exist. Every key of another training tool
is explained at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
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
    lookup,
    no_such_option,
    option_names,
    shown,
)
from llmx.config.schema import Experiment
from llmx.config.yaml_files import check_texts, read_text, read_values, read_yaml
from llmx.errors import ConfigError

_ENTRY = re.compile(r"^(?:override\s+|optional\s+)*(?P<root>/)?(?P<group>[\w/-]+)(?:@.*)?$")
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
            check_keys(path, where, key, value)
            check_texts(path, value, lookup(where)[0])
    return choices


def _check_hydra(path: Path, where: str, key: yaml.Node, value: yaml.Node) -> None:
    """``check_keys`` for keys of Hydra's own."""
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


def check_keys(path: Path, where: str, key: yaml.Node, value: yaml.Node) -> None:
    """ConfigError with file and line where the dotted key ``where``, or one below it, is none of
    the schema's. ``key``, ``value``: its nodes in the file."""
    hint, problem = lookup(where)
    kind = typing.get_origin(hint)
    if not _is_open(value):
        if (dataclasses.is_dataclass(hint) or kind is dict) and not isinstance(
            value, yaml.MappingNode
        ):
            problem = f"{where} must be a mapping: lines of name: value below it."
        elif kind is list and not isinstance(value, yaml.SequenceNode):
            problem = f"{where} must be a list: lines that begin with - below it."
    if problem:
        raise ConfigError(f"{path}, line {key.start_mark.line + 1}: {problem}")
    # The names in a mapping of values are the user's, dots and all.
    has_keys = dataclasses.is_dataclass(typing.get_args(hint)[-1] if kind else hint)
    entries = {where: value}
    if kind is list and isinstance(value, yaml.SequenceNode):
        entries = {f"{where}.{index}": entry for index, entry in enumerate(value.value)}
    for place, entry in entries.items():
        if isinstance(entry, yaml.MappingNode) and has_keys:
            for inner, item in entry.value:
                if inner.value != "<<":
                    check_keys(path, f"{place}.{inner.value}", inner, item)


def _is_open(node: yaml.Node) -> bool:
    """Whether a value is set elsewhere: null, ``???`` or an interpolation."""
    return isinstance(node, yaml.ScalarNode) and (
        node.tag.endswith(":null") or node.value == "???" or "${" in node.value
    )


def _defaults(
    path: Path, group: str, node: yaml.Node, directories: Sequence[Path]
) -> Iterator[tuple[str, str]]:
    """The choices of a defaults list; ConfigError for one that does not exist."""
    if not isinstance(node, yaml.SequenceNode):
        raise ConfigError(
            f"{path}, line {node.start_mark.line + 1}: defaults is a list, e.g. "
            "- override /zero: stage3."
        )
    for entry in node.value:
        line = entry.start_mark.line + 1
        if isinstance(entry, yaml.ScalarNode):
            if entry.value != "_self_":
                parent, _, name = f"{group}/{entry.value}".rpartition("/")
                yield _existing(path, line, parent, name, directories, entry.value)
            continue
        pairs = entry.value if isinstance(entry, yaml.MappingNode) else []
        match = _ENTRY.match(str(pairs[0][0].value)) if len(pairs) == 1 else None
        if match is None:
            raise ConfigError(
                f"{path}, line {line}: an entry of defaults is - override /GROUP: OPTION, "
                "- OPTION or - _self_."
            )
        key, value = pairs[0]
        chosen = match["group"] if match["root"] else f"{group}/{match['group']}"
        if match["root"] and chosen in GROUPS and "override" not in key.value:
            raise ConfigError(
                f"{path}, line {line}: the config already has the group {chosen}. Write "
                f"- override /{chosen}: {shown(value.value)}."
            )
        names = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if len(names) > 1 and chosen in GROUPS:
            mix = " Mix data sets with data.sources." if chosen == "data" else ""
            raise ConfigError(
                f"{path}, line {line}: {chosen} takes one option; of several, Hydra keeps the "
                f"values of the last one.{mix}"
            )
        for item in names:
            name = str(item.value)
            if item.tag.endswith(":null") or "${" in name or "optional" in key.value:
                continue
            yield _existing(path, line, chosen, name, directories, name)


def _existing(
    path: Path, line: int, group: str, name: str, directories: Sequence[Path], written: str
) -> tuple[str, str]:
    if find_option(group, name, directories) is None:
        if option_names(group, directories):
            raise ConfigError(f"{path}, line {line}: {no_such_option(group, name, directories)}")
        last = group.split("/")[-1]
        hint = f" Write - override /{last}: {shown(written)}." if last in GROUPS else ""
        raise ConfigError(f"{path}, line {line}: {group}={shown(name)}: no such option.{hint}")
    return group, name
