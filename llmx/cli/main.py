"""The command line: which command the words name, and where it is.

Light on purpose: the control process imports neither torch nor deepspeed, and starts
``deepspeed`` within a second.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from llmx.cli.commands import COMMANDS, CONFIG_COMMANDS, HEAVY, LIGHT, TAKES_CTRL_C
from llmx.cli.hydra_app import run_hydra, run_module
from llmx.errors import ConfigError, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors for the user are printed, not raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    looks = words[:1] in (["status"], ["watch"])
    return exit_code(lambda: _dispatch(words), reads=" ".join(words[1:] or ["outputs"]) * looks)


def _dispatch(words: list[str]) -> int:
    # Before --help: words that are being completed may hold one.
    if words[:1] == ["help"]:
        from llmx.cli.topics import main as help_main

        return help_main(words[1:])
    if words[:1] == ["completion"] and words[1:2] not in (["-h"], ["--help"]):
        from llmx.cli.completion import main as completion_main

        return completion_main(words[1:])
    if any(word in ("-h", "--help") for word in words):
        if words[0] in HEAVY:
            return _module(words[0], ["--help"])
        print(_help(words))
        return 0
    if words == ["--version"]:
        from llmx import __version__

        print(f"llmx {__version__}")
        return 0
    if words == ["--hydra-help"]:
        from llmx.cli.arguments import OPTIONS_HELP

        print(OPTIONS_HELP, end="")
        return 0
    from llmx.cli.arguments import split_command, split_own

    command, rest = split_command(words, tuple(COMMANDS))
    if command == "plan":
        from llmx.cli.plan import main as plan_main

        return plan_main(rest)
    if command == "sweep":
        from llmx.cli.sweep import main as sweep_main

        return sweep_main(rest)
    if command == "tune":
        from llmx.cli.tune import main as tune_main

        return tune_main(rest)
    if command in LIGHT:
        main_of_command = importlib.import_module(LIGHT[command]).main
        code: int = main_of_command(rest)
        return code
    if command in HEAVY:
        return _module(command, rest)
    if command in CONFIG_COMMANDS:
        own, overrides = split_own(rest, CONFIG_COMMANDS[command].own_keys)
        return run_hydra(overrides, command=command, own=own)
    return run_hydra(rest)


def _help(words: list[str]) -> str:
    """A command's own help where one is named, else the whole."""
    if words[0] in COMMANDS:
        from llmx.cli.topics import command_help

        return command_help(words[0])
    from llmx.cli.help import help_text

    return help_text()


def _module(command: str, words: list[str]) -> int:
    """Commands that load heavy libraries run in a process of their own."""
    if not words:
        needs = "two run directories" if command == "compare" else "a run directory"
        names = "RUN_A RUN_B" if command == "compare" else "RUN_DIR"
        if command in TAKES_CTRL_C:
            needs, names = "a run directory, or that of a model", "RUN|MODEL"
        raise ConfigError(f"{command} needs {needs}: python -m llmx {command} {names}")
    return run_module(HEAVY[command], words, takes_ctrl_c=command in TAKES_CTRL_C)
