"""Flags of the commands that are programs of their own: one line for a mistake, exit code 2."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from llmx.config.build import shown
from llmx.config.fields import Range
from llmx.errors import ConfigError
from llmx.text import printable


class Parser(argparse.ArgumentParser):
    """argparse, with our messages; flags are written out whole."""

    def __init__(self, *, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where the flags are listed; exit."""
        message = re.sub(r"^argument ([^:]+): ", r"\1: ", message)
        message = message.replace("unrecognized arguments: ", "no such option: ")
        message = message.replace("the following arguments are required: ", "missing: ")
        command = self.prog.split()[-1]
        print(f"llmx: {command}: {printable(message)}. See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(ConfigError.exit_code)


def whole_number(minimum: int, maximum: int = 10**9) -> Callable[[str], int]:
    """The type of a flag that is a whole number in a range."""
    limits = Range(minimum, maximum)

    def read(word: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", word) or not limits.holds(int(word)):
            raise argparse.ArgumentTypeError(f"{shown(word)} is not a whole number {limits}")
        return int(word)

    return read


def positive_number(maximum: float = 10**6) -> Callable[[str], float]:
    """The type of a flag that is a number above 0."""
    limits = Range(above=0, maximum=maximum)

    def read(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not limits.holds(value):
            raise argparse.ArgumentTypeError(f"{shown(word)} is not a number {limits}")
        return value

    return read


def add_trust(parser: argparse.ArgumentParser) -> None:
    """``--trust``, of the commands that load what a run directory names."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code that somebody else's run directory names (docs/security.md)",
    )
