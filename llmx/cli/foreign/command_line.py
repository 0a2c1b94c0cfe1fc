"""Commands of other tools in a shell file: ``deepspeed train.py --lr 1``, ``torchrun``,
``accelerate launch``, ``trl sft``, ``llamafactory-cli train``, ``axolotl train``."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llmx.cli.foreign.convert import as_number
from llmx.config.build import shown
from llmx.config.yaml_files import read_text, read_values
from llmx.errors import ConfigError

LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "python", "python3")
TRAINERS = {"llamafactory-cli": "llama-factory", "axolotl": "axolotl", "trl": "trl"}
_FLAGS = ("force_multi", "no_ssh_check", "standalone", "module", "no_local_rank", "use_deepspeed",
          "multi_gpu", "no_python", "launch", "m")  # fmt: skip
"""Flags of launchers that take no value."""


@dataclass(frozen=True)
class Command:
    """A command, sorted."""

    tool: str
    """``trl-sft``, ``llama-factory``, ``axolotl``; empty for a script."""
    values: dict[str, Any] = field(default_factory=dict)
    """Of the script, with those of its YAML file."""
    launcher: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables before the command."""


def read_command(path: Path) -> Command:
    """The one training command of a shell file; ConfigError where there is none, or several."""
    commands = [words for words in _commands(path) if _starts(words) is not None]
    if len(commands) != 1:
        programs = ", ".join((*LAUNCHERS[:3], *TRAINERS))
        raise ConfigError(
            f"{path}: has {len(commands) or 'no'} commands of {programs}. Leave the one to import."
        )
    words = commands[0]
    start = _starts(words) or 0
    variables = dict(word.partition("=")[::2] for word in words[:start])
    return _sorted(words[start:], variables, path)


def _commands(path: Path) -> list[list[str]]:
    """The words of each line, with variables of the file filled in."""
    variables: dict[str, str] = {}
    commands = []
    for line in re.sub(r"\\\r?\n", " ", read_text(path)).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a part of the script that is no command of its own

        words = [_filled(word, variables) for word in words]
        if words[:1] == ["export"]:
            words = words[1:]
        assigned = [re.fullmatch(r"(\w+)=(.*)", word) for word in words]
        if words and all(assigned):
            variables |= {match[1]: match[2] for match in assigned if match}
        elif words:
            commands.append(words)
    return commands


def _filled(word: str, variables: dict[str, str]) -> str:
    """A word with ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` of known variables replaced."""
    return re.sub(
        r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)",
        lambda match: variables.get(match[1] or match[3], match[2] or match[0]),
        word,
    )


def _starts(words: list[str]) -> int | None:
    """Where the program of a training command stands; None for another command."""
    for index, word in enumerate(words):
        if "=" in word and not word.startswith("-"):
            continue
        name = word.rpartition("/")[2]
        is_python = name.startswith("python") and any(w.endswith(".py") for w in words[index:])
        return index if name in TRAINERS or name in LAUNCHERS[:3] or is_python else None
    return None


def _sorted(words: list[str], variables: dict[str, str], path: Path) -> Command:
    program, rest = words[0].rpartition("/")[2], words[1:]
    launcher: dict[str, Any] = {}
    while program not in TRAINERS and rest:
        word = rest.pop(0)
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("-"):
            _, equal, value = word.partition("=")
            takes = not equal and name not in _FLAGS and rest and not rest[0].startswith("-")
            if name not in ("launch", "m"):
                launcher[name] = as_number(rest.pop(0) if takes else value or True)
        elif word.endswith(".py") or word.rpartition("/")[2] in TRAINERS:
            break
    else:
        word = words[0]
    program = word.rpartition("/")[2]
    tool = TRAINERS.get(program, "")
    if tool:
        command = rest.pop(0) if rest else ""
        tool = f"trl-{command}" if tool == "trl" else tool
    elif program in ("sft.py", "dpo.py", "reward.py"):
        tool = f"trl-{program.removesuffix('.py')}"
    return Command(tool, _script_values(rest, path), launcher, variables)


def _script_values(words: list[str], path: Path) -> dict[str, Any]:
    """``--key value``, ``--key=value``, ``key=value``, and those of a YAML file, which they win
    over."""
    values: dict[str, Any] = {}
    typed: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word in ("&", "&&", ";", "|") or re.match(r"[&12]*>", word):
            break
        name, equal, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if word.endswith((".yaml", ".yml")) and not equal:
            values |= _file(word, path)
            continue
        if not word.startswith("-") and not equal:
            raise ConfigError(f"{path}: {shown(word)} is no --key value. Leave it out.")
        items = [value] if equal else []
        while not equal and words and not words[0].startswith("-"):
            if re.match(r"[&12]*>|[&;|]", words[0]):
                break
            items.append(words.pop(0))
        if name == "config" and len(items) == 1:
            values |= _file(items[0], path)
            continue
        read = [as_number(_value(item)) for item in items]
        typed[name] = read[0] if len(read) == 1 else read or True
    for name, value in {**values, **typed}.items():
        if isinstance(value, str) and re.search(r"\$[\w{]", value):
            raise ConfigError(
                f"{path}: {name}={shown(value)}: the variable is not set in the file. Write the "
                "value."
            )
    return {**values, **typed}


def _value(word: str) -> Any:
    """A word of a command line as YAML reads it; as it is where that is another number: 007."""
    value = yaml.safe_load(word) if word else ""
    is_other = type(value) is int and str(value) != word
    return word if is_other else value


def _file(name: str, path: Path) -> dict[str, Any]:
    """The values of a YAML file that a command names, relative to the working directory or to the
    shell file."""
    place = next((p for p in (Path(name), path.parent / name) if p.is_file()), None)
    if place is None:
        raise ConfigError(f"{path}: {name}: no such file in {Path.cwd()}. Give an existing path.")
    values = as_number(read_values(place))
    return values if isinstance(values, dict) else {}
