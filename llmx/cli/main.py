"""The command line: finds the command that the words name, and runs it.

Light on purpose: the control process imports neither torch nor deepspeed, and has the first rank
started within a second. ``python -m llmx.cli.main COMMAND WORDS`` is how it starts a command
that loads heavy libraries.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.cli.commands import COMMANDS
from llmx.cli.hydra_app import composed_for, run_module, show_config
from llmx.errors import ConfigError, exit_code

if TYPE_CHECKING:
    from llmx.compose.words import Words

STARTS_RANKS = ("train", "resume", "reproduce", "sweep", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors for the user are printed, not raised."""
    typed = list(sys.argv[1:] if argv is None else argv)
    looks = typed[:1] in (["status"], ["watch"])
    reads = " ".join(typed[1:] or ["outputs"]) if looks else ""
    return exit_code(lambda: _dispatch(typed), reads=reads)


def _dispatch(argv: list[str]) -> int:
    # Before --help: words that are being completed may hold one.
    answers = argv[:2] == ["completion", "--answer"]
    if not answers and any(word in ("-h", "--help") for word in argv):
        from llmx.cli.help import command_help, help_text

        print(command_help(argv[0]) if argv[0] in COMMANDS else help_text())
        return 0
    if argv == ["--version"]:
        from llmx import __version__

        print(f"llmx {__version__}")
        return 0
    if argv == ["--hydra-help"]:
        from llmx.cli.help import options_help

        print(options_help())
        return 0
    from llmx.cli.words import parse, split_command

    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("The working directory was deleted. Go to another one: cd.") from error
    if answers:
        from llmx.cli.completion import answer

        return answer(argv[2], argv[3:])
    name, arguments = split_command(argv, tuple(COMMANDS))
    command, words = COMMANDS[name], parse(name, arguments)
    if name in STARTS_RANKS:
        from llmx.hardware.external import is_external, refuse_several

        if is_external(arguments):
            # The others wait there for the process of rank 0, which comes back with STARTED.
            os.execv(sys.executable, [sys.executable, "-m", "llmx.external", *argv])
        refuse_several(os.environ)
    if command.own_process:
        return run_module(__name__, [name, *arguments], takes_ctrl_c=command.takes_ctrl_c)
    return run(name, words)


def run(name: str, words: Words) -> int:
    """Run a command in this process; returns the exit code."""
    command, arguments = COMMANDS[name], tuple[object, ...]([words])
    module, _, function = command.module.partition(":")
    if command.own_process and command.overrides:
        if words.show:
            return show_config(words)
        arguments = composed_for(name, words), words.own
    return int(getattr(importlib.import_module(module), function or "run")(*arguments))


def run_here(name: str, argv: Sequence[str]) -> int:
    """Run a command that has a process of its own in this one; returns the exit code."""
    from llmx.cli.words import parse

    command = COMMANDS[name]
    reads = ", ".join(argv) if command.reads_only else ""
    return exit_code(
        lambda: run(name, parse(name, argv)), interrupted=command.interrupted, reads=reads
    )


if __name__ == "__main__":
    sys.exit(run_here(sys.argv[1], sys.argv[2:]))
