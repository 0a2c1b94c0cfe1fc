"""The words of a command line before Hydra sees them: commands, options, the demo default. Pure."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.cli.commands import COMMANDS, HYDRA_WORDS
from llmx.compose.overrides import Checked, check_overrides, quoted, resolve_alias
from llmx.compose.user_files import FILES, check_foreign, check_keys
from llmx.config import Experiment
from llmx.config.build import shown
from llmx.config.groups import ALIASES, GROUPS, elsewhere, lookup
from llmx.errors import ConfigError, did_you_mean

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
_INSTEAD = {
    "import": "python -m llmx FILE says what each key of another tool's file is here.",
    "render": "launch.slurm.submit=true submits a job to Slurm; docs/cluster.md has a JobSet and "
    "a TrainJob for Kubernetes.",
    "bundle": 'docs/cluster.md, "No internet access", has the commands of pip, hf and rsync.',
    "queue": "launch.queue=true makes a run wait until other runs have left its hosts.",
}
"""A word that is no command -> what does its work."""


def split_command(argv: Sequence[str], commands: Sequence[str]) -> tuple[str, list[str]]:
    """``(command, rest)``; ``train`` when the first word is no command.

    Raises ConfigError for a bare word that is neither a command nor an override.
    """
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        return "train", list(argv)
    if argv[0] in commands:
        return argv[0], list(argv[1:])
    if argv[0].endswith(FILES):
        return "train", list(argv)
    if argv[0] in _INSTEAD:
        raise ConfigError(f"{argv[0]}: no such command. {_INSTEAD[argv[0]]}")
    raise ConfigError(
        f'"{argv[0]}" is neither a command nor key=value.{did_you_mean(argv[0], commands)} '
        f"Commands: {', '.join(commands)}. See python -m llmx --help."
    )


@dataclass(frozen=True)
class Line:
    """A command line that composes a config, sorted."""

    overrides: tuple[str, ...]
    multirun: bool = False
    config_dir: str | None = None
    show: tuple[str, ...] = ()
    """What to print instead of starting anything, in Hydra's words: ``--cfg job``."""

    def checked(self) -> Checked:
        """The overrides and those that they imply, as Hydra takes them."""
        words, directories = as_meant(self.overrides), [self.config_dir] if self.config_dir else []
        return check_overrides(
            words, multirun=self.multirun, config_dirs=directories, commands=tuple(COMMANDS)
        )


_PRINTS = {word.name: word.choices for word in HYDRA_WORDS if word.choices}
_REFUSED = {
    "--config-path": "the main config is llmx's own; your groups: --config-dir DIR",
    "--config-name": "the main config is llmx's own; a whole run of yours is "
    "--config-dir DIR experiment=NAME",
    "--experimental-rerun": "a run is repeated by python -m llmx reproduce RUN_DIR",
    "--shell-completion": "completion is printed by python -m llmx completion bash|zsh|fish",
    "--version": "give it alone: python -m llmx --version",
}
OPTIONS = ("--multirun", "--cfg", "--resolve", "--package", "--info", "--config-dir")
OPTIONS_HELP = """\
Options of every command that takes a config:
  -m, --multirun      comma lists become a sweep: -m zero=stage2,stage3
  --config-dir DIR    a directory with your own groups: DIR/hardware/mine.yaml
  --cfg job           print the composed config (also: hydra, all)
  --package GROUP     only this part of it
  --resolve           with the values of ${...}
  --info [all]        how it was composed (also: config, defaults, defaults-tree, plugins,
                      searchpath)
"""


def read_line(words: Sequence[str]) -> Line:
    """Sort overrides and options, which stand in any order; ConfigError for what cannot be."""
    overrides: list[str] = []
    options: dict[str, str] = {}
    unread = list(words)
    while unread:
        word = unread.pop(0)
        if not word.startswith("-") or word == "-":
            overrides.append(word)
            continue
        typed, equal, value = word.partition("=")
        name = "--multirun" if typed == "-m" else typed
        if name in _REFUSED:
            raise ConfigError(f"{typed}: has no use here: {_REFUSED[name]}.")
        if name not in OPTIONS:
            hint = elsewhere(name) or did_you_mean(name[:100], OPTIONS)
            raise ConfigError(
                f"{shown(typed)}: no such option.{hint} Options: {', '.join(OPTIONS)}."
            )
        takes_value = name in ("--package", "--config-dir") or name in _PRINTS
        if equal and not takes_value:
            raise ConfigError(f"{shown(word)}: {name} takes no value.")
        # --cfg and --info may stand before an override, without their value.
        bare = name in _PRINTS and unread[:1] != [] and "=" in unread[0]
        if takes_value and not equal and unread and not unread[0].startswith("-") and not bare:
            value = unread.pop(0)
        if name in options and name != "--multirun":
            raise ConfigError(f"{typed}: is given twice. Give it once.")
        options[name] = value
    modes = [name for name in ("--multirun", "--cfg", "--info") if name in options]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)}: do not go together. Give one of them.")
    show = tuple(_to_print(options))
    directory = options.get("--config-dir")
    if directory == "":
        raise ConfigError("--config-dir: needs a directory: --config-dir DIR.")
    # Not Path.expanduser: it raises where the name after ~ is no user's.
    if directory is not None and not Path(os.path.expanduser(directory)).is_dir():  # noqa: PTH111
        where = f"in {Path.cwd()}" if not Path(directory).is_absolute() else "on this machine"
        raise ConfigError(f"--config-dir {shown(directory)}: no such directory {where}.")
    return Line(tuple(overrides), multirun="--multirun" in options, config_dir=directory, show=show)


def _to_print(options: Mapping[str, str]) -> Iterator[str]:
    """Hydra's words for printing a config instead of starting anything."""
    for name, allowed in _PRINTS.items():
        if name in options:
            value = options[name] or allowed[0]
            if value not in allowed:
                raise ConfigError(
                    f"{name} {shown(value)}: must be one of {', '.join(allowed)}."
                    f"{did_you_mean(value[:100], allowed)}"
                )
            yield from (name, value)
    for name in ("--resolve", "--package"):
        if name in options:
            if "--cfg" not in options:
                raise ConfigError(f"{name}: only together with --cfg job.")
            if name == "--package" and not re.fullmatch(r"[\w.]+", options[name]):
                raise ConfigError("--package: names a part of the config, e.g. --package optim.")
            yield from filter(None, (name, options[name]))


def check_spelling(name: str, words: Sequence[str]) -> None:
    """ConfigError for an option of a command in the spelling of others: ``out=X`` where it is
    ``--out X``, ``--step N`` where it is ``step=N``."""
    command = COMMANDS[name]
    options = {word.name: word for word in command.words}
    before = ""
    for word in words:
        if word == "--" and command.passes_on:
            return
        is_value = before in options and options[before].value != ""
        before = word
        typed, _, value = word.partition("=")
        bare = typed.removeprefix("--").replace("-", "_")
        if typed.startswith("--") and (own := options.get(f"{bare}=")):
            raise ConfigError(f"{shown(word)}: write {own.name}{value or own.value}.")
        flag = options.get(f"--{bare.replace('_', '-')}")
        is_key = re.fullmatch(r"[A-Za-z_]\w*=\S*", word) is not None
        if flag and is_key and not is_value and not Path(word).exists():
            prompt = " To complete it as a prompt, put it behind -- ." * (name == "generate")
            value = f" {value or flag.value}" if flag.value else ""
            raise ConfigError(f"{shown(word)}: write {flag.name}{value}.{prompt}")


def split_own(words: Sequence[str], keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(own, overrides)``: words like ``preview=3`` that are a command's own, and the rest."""
    own_words = [word for word in words if word.split("=", 1)[0] in keys]
    for word in words:
        name, equal, _ = word.partition("=")
        near = difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
        if equal and near and name not in (*keys, *GROUPS) and "." not in name:
            raise ConfigError(f'{name}: no such key. Did you mean "{near[0]}"?')
    return own_words, [word for word in words if word not in own_words]


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
    from llmx.config.yaml_files import read_yaml, values_of

    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give an experiment file, or key=value.")
    check_foreign(path)
    node = read_yaml(path, Experiment)
    values = values_of(node) or {}
    if isinstance(values, list):
        return _typed_then(path, values)
    if not isinstance(node or MappingNode("", []), MappingNode):
        raise ConfigError(f"{path}, line 1: must be lines of key: value.")
    for key, value in node.value if node else ():
        name = str(key.value)
        is_option = name in (*GROUPS, *ALIASES) and isinstance(value, ScalarNode)
        if not (is_option or "/" in name or name.split(".")[0] in ("defaults", "hydra", "<<")):
            check_keys(path, name, key, value)
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

    from llmx.config.yaml_files import check_texts, read_yaml, values_of

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
        for choice in choices.value if isinstance(choices, SequenceNode) else ():
            check_texts(path, choice, lookup(key.value)[0])
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
