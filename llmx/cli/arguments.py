"""What typed words stand for: experiment files, saved configs, sweep files, the demo default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmx.cli.commands import COMMANDS
from llmx.compose.overrides import check_overrides, quoted, resolve_alias
from llmx.compose.user_files import FILES, check_foreign
from llmx.compose.words import Words
from llmx.config import Experiment
from llmx.config.build import shown
from llmx.config.groups import ALIASES, GROUPS, lookup
from llmx.errors import ConfigError

_WHOLE_RUN = ("experiment", "model", "data")
IMPLIED = {
    "model.path": "model=hf",
    "data.path": "data=file",
    "data.sources": "data=mixture",
    "hardware.hosts": "hardware=static",
    "hardware.path": "hardware=hostfile",
}
"""Key -> the option that reads it. The options of ``conf/config.yaml`` do not."""
_NOTHING = ("", "null", "demo", "[]")


def checked(words: Words) -> list[str]:
    """The overrides of a command line and those that they imply, as Hydra takes them."""
    return check_overrides(
        as_meant(words.overrides),
        multirun=words.multirun,
        config_dirs=words.config_dirs,
        commands=tuple(COMMANDS),
    )


def as_meant(overrides: Sequence[str]) -> list[str]:
    """The words with what they imply.

    A YAML file stands for the words in it, a saved config for those that compose it again; all
    other words win over it, wherever they stand. ``model.path=X`` alone is ``model=hf
    model.path=X``, unless an experiment has chosen the groups. Without experiment, model and data
    the demo is run.
    """
    from llmx.compose.apply_overrides import as_overrides

    words, saved = list[str](), dict[str, Experiment]()
    for word in overrides:
        content: list[str] | Experiment = [word]
        if "=" not in word and word.endswith(FILES):
            content = read_words(Path(word).expanduser())
        if isinstance(content, list):
            words += content
        else:
            saved[word] = content
    if len(saved) > 1:
        raise ConfigError(f"{' and '.join(saved)}: each is the whole config of a run. Give one.")
    for exp in saved.values():
        words = [*as_overrides(exp, [resolve_alias(word) for word in words]), *words]
    typed = dict(word.lstrip("+~").partition("=")[::2] for word in words)
    implied = [
        option
        for key, option in IMPLIED.items()
        if typed.get(key, "") not in _NOTHING and option.partition("=")[0] not in typed
    ]
    if implied and typed.get("experiment", "null") == "null":
        words = [*implied, *words]
        typed |= dict(option.split("=") for option in implied)
    if not any(group in typed for group in _WHOLE_RUN):
        words.insert(0, "experiment=demo")
    return words


def read_words(path: Path) -> list[str] | Experiment:
    """The overrides that a file stands for, ``python -m llmx my.yaml``; of the ``config.yaml`` of a
    run its experiment.

    An experiment file has the keys of ``--cfg job``; ``model: llama3_8b`` chooses an option, and so
    does an entry of ``defaults``. A list, the ``overrides.yaml`` of a run, has the words that were
    typed then; relative paths start where they are read. ConfigError for a wrong key, with its
    line.
    """
    from yaml import MappingNode, ScalarNode

    from llmx.compose.hydra_config import leaves
    from llmx.config import experiment_of_snapshot
    from llmx.config.yaml_files import check_key, check_value, read_yaml, values_of

    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give an experiment file, or key=value.")
    check_foreign(path)
    node = read_yaml(path)
    values = values_of(node) or {}
    if isinstance(values, list):
        return _typed_then(path, values)
    if not isinstance(node or MappingNode("", []), MappingNode):
        raise ConfigError(f"{path}, line 1: must be lines of key: value.")
    for key, value in node.value if node else ():
        name = str(key.value)
        is_option = name in (*GROUPS, *ALIASES) and isinstance(value, ScalarNode)
        if is_option or "/" in name:
            check_value(path, name, value, str)
        elif name.split(".")[0] not in ("defaults", "hydra", "<<"):
            check_key(path, name, key, value)
    if "schema_version" in values:
        return experiment_of_snapshot(values, source=str(path))
    words = list(_chosen(path, node, values.pop("defaults"))) if "defaults" in values else []
    return words + [
        f"{key}={value if key in GROUPS else quoted(value)}" for key, value in leaves(values)
    ]


def _typed_then(path: Path, words: list[Any]) -> list[str]:
    """The words of an ``overrides.yaml``, without those that place that one run."""
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"{path}: a list has words, as the overrides.yaml of a run: - zero=stage3"
        )
    if words[:1] and words[0].startswith("reproduce="):
        raise ConfigError(
            f"{path}: has the words of a reproduction, which change another run. Give "
            f"{path.with_name('config.yaml')}."
        )
    return [word for word in words if word.partition("=")[0] not in ("run_dir", "dry_run")]


def _chosen(path: Path, node: Any, defaults: object) -> Iterator[str]:
    """The overrides that a defaults list stands for. ``node``: of the whole file."""
    at = next(value for key, value in node.value if key.value == "defaults")
    entries = zip(defaults, at.value, strict=True) if isinstance(defaults, list) else [({}, at)]
    for entry, place in entries:
        if entry == "_self_":
            continue
        pairs = list(entry.items()) if isinstance(entry, dict) else []
        if len(pairs) != 1 or not isinstance(pairs[0][1], str):
            raise ConfigError(
                f"{path}, line {place.start_mark.line + 1}: write - GROUP: OPTION. An experiment "
                "file takes no other entry of defaults."
            )
        group, option = pairs[0]
        yield f"{str(group).split()[-1].lstrip('/')}={option}"


def sweep_overrides(path: Path) -> list[str]:
    """The overrides of a committed sweep file: ``grid`` (key: list) and ``overrides`` (list)."""
    from yaml import MappingNode, SequenceNode

    from llmx.config.yaml_files import check_value, read_yaml, values_of

    node = read_yaml(path)
    values = values_of(node)
    if not isinstance(node, MappingNode) or not isinstance(values.get("grid"), dict):
        raise ConfigError(f"{path}: a sweep has a grid, e.g. grid: {{zero: [stage1, stage2]}}.")
    unknown = set(values) - {"grid", "overrides"}
    if unknown:
        raise ConfigError(
            f"{path}: {shown(sorted(map(str, unknown))[0])}: no such key. A sweep has grid and "
            "overrides."
        )
    fixed = values.get("overrides") or []
    if not isinstance(fixed, list) or not all(isinstance(item, str) for item in fixed):
        raise ConfigError(
            f"{path}: overrides={shown(fixed)}: must be a list of words, e.g. "
            "[experiment=demo, task.steps=20]."
        )
    (grid,) = (value for key, value in node.value if key.value == "grid")
    for key, choices in grid.value:
        hint = lookup(key.value)[0]
        is_option = "/" in key.value or dataclasses.is_dataclass(hint)
        is_text = is_option or hint is str
        for choice in choices.value if is_text and isinstance(choices, SequenceNode) else ():
            check_value(path, key.value, choice, str)
    axes = []
    for key, choices in values["grid"].items():
        if not isinstance(choices, list) or not choices:
            raise ConfigError(
                f"{path}: grid.{key}={shown(choices)}: an axis is a list of values, e.g. [1, 2]."
            )
        if any(isinstance(choice, list | dict) for choice in choices):
            raise ConfigError(
                f"{path}: grid.{key}={shown(choices)}: the values of an axis are single ones. Make "
                "an option of each, in a group of your own (--config-dir)."
            )
        axes.append(f"{key}={','.join(_literal(choice) for choice in choices)}")
    return [*fixed, *axes]


def _literal(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, str) and "," in value and not value.startswith(("[", "{", "'", '"')):
        # One value, which a sweep would read as several.
        return '"{}"'.format(value.replace("\\", "\\\\").replace('"', '\\"'))
    return str(value).lower() if isinstance(value, bool) else str(value)
