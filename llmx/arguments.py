"""What the user typed, before Hydra sees it: aliases, commands, the demo default. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from llmx.errors import ConfigError, did_you_mean

ALIASES = {"zero_stage": "zero"}
"""Other spellings of a group, accepted wherever an override is written."""

_ALIAS = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<name>[A-Za-z_]+)(?P<rest>[=.@].*)?$")
_WITH_VALUE = frozenset(
    "--config-path -cp --config-name -cn --config-dir -cd --package -p --cfg -c "
    "--experimental-rerun".split()
)
_WITH_CHOICE = frozenset({"--info", "-i"})
"""Hydra's options that take a value, always or perhaps."""

_WHOLE_RUN = ("experiment", "model", "data")


def resolve_alias(override: str) -> str:
    """As Hydra reads it: ``zero_stage=stage3`` -> ``zero=stage3``, ``data.path=数据.jsonl`` ->
    ``data.path='数据.jsonl'``; anything else unchanged."""
    override = _quoted(override)
    match = _ALIAS.match(override)
    if match is None or match["name"] not in ALIASES:
        return override
    return f"{match['sign'] or ''}{ALIASES[match['name']]}{match['rest'] or ''}"


def _quoted(override: str) -> str:
    """Values with letters beyond ASCII in quotes, without which Hydra's grammar takes none.

    Where there are quotes or brackets, the user has said what belongs together.
    """
    key, equal, value = override.partition("=")
    if not equal or value.isascii() or any(mark in value for mark in "'\"[]{}()\\"):
        return override
    words = [word if word.isascii() else f"'{word}'" for word in value.split(",")]
    return f"{key}={','.join(words)}"


def split_command(argv: Sequence[str], commands: Sequence[str]) -> tuple[str, list[str]]:
    """``(command, rest)``; ``train`` when the first word is no command.

    Raises ConfigError for a bare word that is neither a command nor an override.
    """
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        return "train", list(argv)
    if argv[0] in commands:
        return argv[0], list(argv[1:])
    raise ConfigError(
        f'"{argv[0]}" is neither a command nor key=value.{did_you_mean(argv[0], commands)} '
        f"Commands: {', '.join(commands)}. See python -m llmx --help."
    )


def options_last(words: Sequence[str]) -> list[str]:
    """Overrides first, then Hydra's options, each with its value.

    argparse takes only one run of positional words, so ``--config-dir D a=1 -m b=2`` would be
    refused; people write the two in any order.
    """
    overrides: list[str] = []
    options: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        options.append(word)
        takes = word in _WITH_VALUE or (word in _WITH_CHOICE and rest[:1] and "=" not in rest[0])
        if takes and rest and not rest[0].startswith("-"):
            options.append(rest.pop(0))
    return [*overrides, *options]


def split_own(words: Sequence[str], keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(own, overrides)``: words like ``preview=3`` that are a command's own, and the rest."""
    own = [word for word in words if word.split("=", 1)[0] in keys]
    return own, [word for word in words if word not in own]


def with_demo(overrides: Sequence[str]) -> list[str]:
    """Add ``experiment=demo`` when nothing says what to train: no experiment, model or data."""
    chosen = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    if any(group in chosen for group in _WHOLE_RUN):
        return list(overrides)
    return ["experiment=demo", *overrides]


def sweep_overrides(path: Path) -> list[str]:
    """The overrides of a committed sweep file: ``grid`` (key: list) and ``overrides`` (list)."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not isinstance(values.get("grid"), dict):
        raise ConfigError(f"{path}: a sweep has a grid, e.g. grid: {{zero: [stage1, stage2]}}.")
    unknown = set(values) - {"grid", "overrides"}
    if unknown:
        raise ConfigError(f"{path}: unknown key {sorted(unknown)[0]}; a sweep has grid, overrides.")
    fixed = [str(item) for item in values.get("overrides") or []]
    axes = []
    for key, choices in values["grid"].items():
        if not isinstance(choices, list) or not choices:
            raise ConfigError(f"{path}: grid.{key} is {choices!r}; an axis is a list of values.")
        axes.append(f"{key}={','.join(_literal(choice) for choice in choices)}")
    return [*fixed, *axes]


def _literal(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
