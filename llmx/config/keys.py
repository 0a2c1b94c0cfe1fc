"""Dotted keys: which exist, and what is said of one that does not."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from llmx.config.build import hints_of, known_keys, shown
from llmx.config.schema import Experiment
from llmx.errors import did_you_mean

__all__ = ["key_problem", "shown"]


def key_problem(key: str) -> str:
    """What is wrong with a dotted key, in one line; empty for one that the schema knows."""
    hint: Any = Experiment
    parts = key.split(".")
    for index, part in enumerate(parts):
        before = ".".join(parts[:index])
        hint = _without_none(hint)
        if hint is Any:
            return ""
        if dataclasses.is_dataclass(hint):
            inner = hints_of(typing.cast(type, hint))
            if part not in inner:
                return _no_such(key, ".".join(parts[: index + 1]), before, list(inner))
            hint = inner[part]
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif typing.get_origin(hint) is list:
            if not part.isdecimal():
                return f"{shown(key)}: {before} is a list. Set it whole: {before}=[...]."
            hint = typing.get_args(hint)[0]
        else:
            return f"{shown(key)}: {before} is one value, without keys of its own. Set {before}=..."
    return ""


def shape(key: str) -> str:
    """``mapping``, ``list`` or ``value``: what a known key holds; empty where anything goes."""
    hint: Any = Experiment
    for part in key.split("."):
        hint = _without_none(hint)
        if hint is Any:
            return ""
        if dataclasses.is_dataclass(hint):
            hint = hints_of(typing.cast(type, hint))[part]
        else:
            hint = typing.get_args(hint)[-1]
    hint = _without_none(hint)
    if hint is Any:
        return ""
    if dataclasses.is_dataclass(hint) or typing.get_origin(hint) is dict:
        return "mapping"
    return "list" if typing.get_origin(hint) is list else "value"


def _no_such(key: str, where: str, before: str, names: list[str]) -> str:
    from llmx.config.groups import GROUPS

    last = key.rpartition(".")[2]
    homes = [known for known in known_keys() if known.rpartition(".")[2] == last]
    words = f" It exists as {', '.join(homes)}." if homes else ""
    if not words and len(key) < 200:
        words = did_you_mean(where.rpartition(".")[2], names)
        if words and before:
            words = words.replace('"', f'"{before}.', 1)
        words = words or did_you_mean(key, [*known_keys(), *GROUPS])
        if before and words.endswith(f'"{before}"?'):
            words = f" Known here: {', '.join(names)}."
    see = f"help {before.split('.')[0]}" if before else "--help"
    return f"{shown(key)}: no such key.{words} See python -m llmx {see}."


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return hint
