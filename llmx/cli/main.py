"""The command line: finds the command that the words name, and runs it.

Light on purpose: the control process imports neither torch nor deepspeed, and has the first rank
started within a second. ``python -m llmx.cli.main COMMAND WORDS`` is how it starts a command
that loads heavy libraries.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llmx.cli.commands import COMMANDS, Command, Runs
from llmx.cli.hydra_app import run_hydra, run_module
from llmx.errors import exit_code

STARTS_RANKS = ("train", "resume", "reproduce", "sweep", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors for the user are printed, not raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    looks = words[:1] in (["status"], ["watch"])
    return exit_code(lambda: _dispatch(words), reads=" ".join(words[1:] or ["outputs"]) * looks)


def _dispatch(words: list[str]) -> int:
    # Before --help: words that are being completed may hold one.
    answers = words[:2] == ["completion", "--answer"]
    if words[:1] != ["help"] and not answers and any(word in ("-h", "--help") for word in words):
        from llmx.cli.help import command_help, help_text

        print(command_help(words[0]) if words[0] in COMMANDS else help_text())
        return 0
    if words == ["--version"]:
        from llmx import __version__

        print(f"llmx {__version__}")
        return 0
    if words == ["--hydra-help"]:
        from llmx.cli.arguments import OPTIONS_HELP

        print(OPTIONS_HELP, end="")
        return 0
    from llmx.cli.arguments import check_spelling, split_command, split_own
    from llmx.errors import ConfigError

    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("The working directory was deleted. Go to another one: cd.") from error
    name, arguments = split_command(words, tuple(COMMANDS))
    command = COMMANDS[name]
    check_spelling(name, arguments)
    if name in STARTS_RANKS:
        from llmx.hardware.external import is_external, refuse_several

        if is_external(arguments):
            # The others wait there for the process of rank 0, which comes back with STARTED.
            argv = [sys.executable, "-m", "llmx.external", *words]
            os.execv(sys.executable, argv)
        refuse_several(os.environ)
    if command.runs == Runs.CONFIG:
        if not command.module:
            return run_hydra(arguments)
        own_keys, overrides = split_own(arguments, command.own_keys)
        return run_hydra(overrides, command=name, own_keys=own_keys)
    if command.runs == Runs.WORDS:
        return int(_function(command, "main")(arguments))
    from llmx.cli.flags import parse

    options = parse(name, arguments)
    if command.runs == Runs.PROCESS:
        return run_module(__name__, [name, *arguments], takes_ctrl_c=command.takes_ctrl_c)
    return int(_function(command, "run")(options))


def _function(command: Command, usual: str) -> Callable[..., int]:
    """The function that runs a command: ``module`` or ``module:function``."""
    module, _, name = command.module.partition(":")
    function: Callable[..., int] = getattr(importlib.import_module(module), name or usual)
    return function


def run_here(name: str, words: Sequence[str]) -> int:
    """Run a command of flags in this process; returns the exit code."""
    from llmx.cli.flags import parse

    command = COMMANDS[name]

    def program() -> int:
        options = parse(name, words)
        return int(importlib.import_module(command.module).run(options))

    reads = ", ".join(words) if command.reads_only else ""
    return exit_code(program, interrupted=command.interrupted, reads=reads)


if __name__ == "__main__":
    sys.exit(run_here(sys.argv[1], sys.argv[2:]))
