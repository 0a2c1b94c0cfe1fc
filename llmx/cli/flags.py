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

_ELSEWHERE = {
    "--lm-eval": " Run lm_eval --model hf --model_args pretrained=RUN/model (docs/evaluation.md)"
}
"""Options that belong to another program, and the fix."""


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

    ``options.behind`` has what stands behind ``--``.

    Raises:
        ConfigError: a word cannot be read, or is missing.
    """
    command, behind = COMMANDS[name], list[str]()
    words = list(words)
    if command.passes_on and "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    if command.runs == Runs.PROCESS and command.arguments and not words:
        needs = " and ".join(
            argument.metavar for argument in command.arguments if not argument.count
        )
        raise ConfigError(f"{name} needs {needs}: python -m llmx {name} {command.usage}")
    parser = Parser(name)
    options, unread = parser.parse_known_intermixed_args(words)
    if unread:
        problem = "no such option" if unread[0].startswith("-") else "too many words"
        typed = unread[0].strip().partition("=")[0]
        hint = _ELSEWHERE.get(typed) or did_you_mean(typed, parser.flags)
        parser.error(f"{problem}: {' '.join(unread)}{hint and f'.{hint}'}")
    options.behind = behind
    return options


def _reader(number: Number) -> Callable[[str], float]:
    """The type of a flag that is a number in a range."""
    noun = "whole number" if number.kind is int else "number"

    def read(word: str) -> float:
        try:
            value = number.kind(word) if len(word) <= 20 else math.nan
        except ValueError:
            value = math.nan
        if not number.limits.holds(value):
            raise argparse.ArgumentTypeError(f"{shown(word)} is not a {noun} {number.limits}")
        return value

    return read
