"""Parses the words of a command with argparse, by the table of commands."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from llmx.cli.commands import COMMANDS, Number, Runs, Word
from llmx.config.build import shown
from llmx.errors import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse with errors that are ours; flags are written out in full."""

    def __init__(self, name: str) -> None:
        """``name``: of a command that has flags."""
        super().__init__(prog=f"python -m llmx {name}", allow_abbrev=False, add_help=False)
        self.name = name
        command = COMMANDS[name]
        self.flags = [word.name for word in command.words if word.name.startswith("-")]
        for argument in command.arguments:
            self.add_argument(
                argument.name,
                metavar=argument.metavar,
                nargs=argument.count or None,
                type=Path if argument.kind == "run" else str,
            )
        for word in command.words:
            if word.name in self.flags:
                self._add(word)

    def _add(self, word: Word) -> None:
        if not word.value:
            self.add_argument(word.name, action="store_true")
            return
        read: Callable[[str], object] = Path if word.takes in ("path", "directory") else str
        if word.number is not None:
            read = _reader(word.number)
        self.add_argument(word.name, type=read, choices=word.choices or None, default=word.default)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError: what is wrong, and where the flags are listed."""
        message = re.sub(r"^argument ([^:]+): ", r"\1: ", message)
        message = message.replace("the following arguments are required: ", "missing: ")
        end = "" if message.endswith("?") else "."
        raise ConfigError(f"{self.name}: {message}{end} See {self.prog} --help.")


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """The options of a command with flags.

    ``options.keys`` has its own words ``KEY=VALUE``, ``options.behind`` what stands behind ``--``.

    Raises:
        ConfigError: a word cannot be read, or is missing.
    """
    command, behind = COMMANDS[name], list[str]()
    words = list(words)
    if command.passes_on and "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    keys: dict[str, str] = {}
    if command.own_keys:
        words, keys = _split_keys(name, words)
    elif not any(argument.count == "*" for argument in command.arguments):
        # ``to=gguf`` is ``--to=gguf``, as other commands take KEY=VALUE.
        flags = tuple(f"{word.name[2:]}=" for word in command.words if word.value)
        words = [f"--{word}" if word.startswith(flags) else word for word in words]
    if command.runs == Runs.PROCESS and command.arguments and not words:
        needs = " and ".join(
            argument.metavar for argument in command.arguments if not argument.count
        )
        raise ConfigError(f"{name} needs {needs}: python -m llmx {name} {command.usage}")
    parser = Parser(name)
    options, unread = parser.parse_known_intermixed_args(words)
    if unread:
        problem = "no such option" if unread[0].startswith("-") else "too many words"
        hint = did_you_mean(unread[0].strip().partition("=")[0], parser.flags)
        parser.error(f"{problem}: {' '.join(unread)}{hint and f'.{hint}'}")
    options.keys, options.behind = keys, behind
    return options


def _split_keys(name: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Flags and bare words, and the own keys of a command; ConfigError for another ``x=1``."""
    arguments, keys, names = [], {}, COMMANDS[name].own_keys
    for word in words:
        key, _, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][\w.]*=\S*", word) or Path(word).exists():
            arguments.append(word)
        elif key in names:
            keys[key] = value
        else:
            as_prompt = f" To complete {word} as a prompt, put it behind -- ."
            raise ConfigError(
                f"{word}: {name} has no key {key}.{did_you_mean(key, names)} It has "
                f"{', '.join(names)}.{as_prompt if name == 'generate' else ''}"
            )
    return arguments, keys


def _reader(number: Number) -> Callable[[str], float]:
    """The type of a flag that is a number in a range."""
    noun = "whole number" if number.kind is int else "number"

    def read(word: str) -> float:
        try:
            value = number.kind(word) if len(word) <= 18 else math.nan
        except ValueError:
            value = math.nan
        if not number.limits.holds(value):
            raise argparse.ArgumentTypeError(f"{shown(word)} is not a {noun} {number.limits}")
        return value

    return read
