"""The one parser of a command line: argv to the words of a command, by the table of commands."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from llmx.cli.commands import COMMANDS, HYDRA_WORDS, Command, Number
from llmx.compose.overrides import resolve_alias
from llmx.compose.user_files import FILES
from llmx.compose.words import Words
from llmx.config.build import shown
from llmx.config.groups import GROUPS, elsewhere
from llmx.errors import ConfigError, did_you_mean

_INSTEAD = {
    "import": "python -m llmx FILE says what each key of another tool's file is here.",
    "render": "launch.slurm.submit=true submits a job to Slurm; docs/cluster.md has a JobSet and "
    "a TrainJob for Kubernetes.",
    "bundle": 'docs/cluster.md, "No internet access", has the commands of pip, hf and rsync.',
    "queue": "launch.queue=true makes a run wait until other runs have left its hosts.",
    "--lm-eval": " Run lm_eval --model hf --model_args pretrained=RUN/model (docs/evaluation.md)",
}
"""A word that llmx has no more -> what does its work."""
_PRINTS = {word.name: word.choices for word in HYDRA_WORDS if word.choices}
_REFUSED = {
    "--config-path": "the main config is llmx's own; your groups: --config-dir DIR",
    "--config-name": "the main config is llmx's own; a whole run of yours is "
    "--config-dir DIR experiment=NAME",
    "--experimental-rerun": "a run is repeated by python -m llmx reproduce RUN_DIR",
    "--shell-completion": "completion is printed by python -m llmx completion bash|zsh|fish",
    "--version": "give it alone: python -m llmx --version",
}
OPTIONS = {
    word.name: word for word in HYDRA_WORDS if word.name not in ("--help", "-m", "--version")
}


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


def parse(name: str, argv: Sequence[str]) -> Words:
    """Sort the words behind a command, which stand in any order.

    Raises:
        ConfigError: a word cannot be read, or is missing.
    """
    command, words, behind = COMMANDS[name], list(argv), list[str]()
    _check_spelling(name, words)
    if command.passes_on and "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    parsed = _of_config(name, words) if command.overrides else _of_flags(name, words)
    parsed.typed, parsed.behind = tuple(argv), behind
    return parsed


def _of_config(name: str, argv: Sequence[str]) -> Words:
    """The words of a command that takes overrides."""
    command, options = COMMANDS[name], dict[str, str]()
    switches = {word.name: False for word in command.words if not word.value}
    takes_line, bare, keys = "--config-dir" not in _names(command), list[str](), dict[str, str]()
    overrides: list[str] = []
    unread = list(argv)
    while unread:
        word = unread.pop(0)
        key, equal, value = word.partition("=")
        option = "--multirun" if key == "-m" else key
        if not word.startswith("-") or word == "-":
            if command.arguments and ("=" not in word or Path(word).is_dir()):
                bare.append(word)
            elif f"{key}=" in _names(command):
                keys[key] = _own_value(command, key, value)
            else:
                overrides.append(word if takes_line else resolve_alias(word))
            continue
        if word in switches:
            switches[word] = True
            continue
        if not takes_line and option != "--config-dir":
            raise ConfigError(f"{word}: {name} has no such option. It knows --config-dir.")
        if option in _REFUSED:
            raise ConfigError(f"{key}: has no use here: {_REFUSED[option]}.")
        if option not in OPTIONS:
            options_here = (*switches, *OPTIONS)
            hint = elsewhere(option) or did_you_mean(option[:100], options_here)
            raise ConfigError(
                f"{shown(key)}: no such option.{hint} Options: {', '.join(options_here)}."
            )
        takes_value = OPTIONS[option].value != ""
        if equal and not takes_value:
            raise ConfigError(f"{shown(word)}: {option} takes no value.")
        # --cfg and --info may stand before an override, without their value.
        is_alone = option in _PRINTS and unread[:1] != [] and "=" in unread[0]
        if takes_value and not equal and unread and not unread[0].startswith("-") and not is_alone:
            value = unread.pop(0)
        if option in options and option != "--multirun":
            raise ConfigError(f"{key}: is given twice. Give it once.")
        options[option] = value
    modes = [mode for mode in ("--multirun", "--cfg", "--info") if mode in options]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)}: do not go together. Give one of them.")
    if [argument.kind for argument in command.arguments] == ["run"] and len(bare) != 1:
        typed = f" Given: {', '.join(bare)}." if bare else ""
        raise ConfigError(f"{name} takes one run directory: python -m llmx {name} RUN_DIR.{typed}")
    if command.own_process:
        if "--multirun" in options:
            raise ConfigError(f"{name}: takes one config; a sweep (-m) is for training.")
        _check_own(command, overrides)
    return Words(
        **{flag.removeprefix("--"): is_set for flag, is_set in switches.items()},
        bare=bare,
        own=keys,
        overrides=tuple(overrides),
        multirun="--multirun" in options,
        show=dict(_to_print(options)),
        config_dir=_directory(options.get("--config-dir")),
    )


def _own_value(command: Command, key: str, value: str) -> str:
    """The value of a key of the command's own; ConfigError for one that it does not take."""
    (word,) = (word for word in command.words if word.name == f"{key}=")
    if word.choices:
        rule = f"one of {', '.join(word.choices)}"
        is_right = (value := value.lower()) in word.choices
    elif word.number:
        rule, is_right = str(word.number), word.number.read(value) is not None
    else:
        return value
    if not is_right:
        raise ConfigError(f"{key}={shown(value)}: must be {rule}.")
    return value


def _names(command: Command) -> list[str]:
    return [word.name for word in command.words]


def _directory(directory: str | None) -> str | None:
    if directory == "":
        raise ConfigError("--config-dir: needs a directory: --config-dir DIR.")
    # Not Path.expanduser: it raises where the name after ~ is no user's.
    if directory is not None and not Path(os.path.expanduser(directory)).is_dir():  # noqa: PTH111
        where = f"in {Path.cwd()}" if not Path(directory).is_absolute() else "on this machine"
        raise ConfigError(f"--config-dir {shown(directory)}: no such directory {where}.")
    return directory


def _to_print(options: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The options for printing a config instead of starting anything, with their values."""
    for name, allowed in _PRINTS.items():
        if name in options:
            value = options[name] or allowed[0]
            if value not in allowed:
                raise ConfigError(
                    f"{name} {shown(value)}: must be one of {', '.join(allowed)}."
                    f"{did_you_mean(value[:100], allowed)}"
                )
            yield name, value
    for name in ("--resolve", "--package"):
        if name in options:
            if "--cfg" not in options:
                raise ConfigError(f"{name}: only together with --cfg job.")
            if name == "--package" and not re.fullmatch(r"[\w.]+", options[name]):
                raise ConfigError("--package: names a part of the config, e.g. --package optim.")
            yield name, options[name]


def _check_own(command: Command, overrides: Sequence[str]) -> None:
    """ConfigError for a word that is nearly one of the command's own: ``prevew=3``."""
    keys = [name[:-1] for name in _names(command) if name.endswith("=")]
    for word in overrides:
        name, equal, _ = word.partition("=")
        near = difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
        if equal and near and name not in GROUPS and "." not in name:
            raise ConfigError(f'{name}: no such key. Did you mean "{near[0]}"?')


def _check_spelling(name: str, words: Sequence[str]) -> None:
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
        if typed.startswith("--") and (override := options.get(f"{bare}=")):
            raise ConfigError(f"{shown(word)}: write {override.name}{value or override.value}.")
        flag = options.get(f"--{bare.replace('_', '-')}")
        is_key = re.fullmatch(r"[A-Za-z_]\w*=\S*", word) is not None
        if flag and is_key and not is_value and not Path(word).exists():
            value = f" {value or flag.value}" if flag.value else ""
            prompt = " To complete it as a prompt, put it behind -- ." if name == "generate" else ""
            raise ConfigError(f"{shown(word)}: write {flag.name}{value}.{prompt}")


# --- Commands that compose no config ---------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse with errors that are ours; flags are written out in full."""

    def __init__(self, name: str) -> None:
        super().__init__(prog=f"python -m llmx {name}", allow_abbrev=False, add_help=False)
        self.name, command = name, COMMANDS[name]
        for argument in command.arguments:
            self.add_argument(
                argument.name,
                metavar=argument.metavar,
                nargs=argument.count or None,
                type=Path if argument.kind == "run" else str,
            )
        for word in command.words:
            if not word.value:
                self.add_argument(word.name, action="store_true")
                continue
            read: Callable[[str], object] = Path if word.takes in ("path", "directory") else str
            if word.number is not None:
                read = functools.partial(_number, word.number)
            choices = word.choices or None
            self.add_argument(word.name, type=read, choices=choices, default=word.default)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError: what is wrong, and where the flags are listed."""
        message = re.sub(r"^argument ([^:]+): ", r"\1: ", message)
        message = message.replace("the following arguments are required: ", "missing: ")
        end = "" if message.endswith("?") else "."
        raise ConfigError(f"{self.name}: {message}{end} See {self.prog} --help.")


def _of_flags(name: str, words: Sequence[str]) -> Words:
    """The words of a command that has flags and arguments alone."""
    command = COMMANDS[name]
    if command.own_process and command.arguments and not words:
        needed = (argument.metavar for argument in command.arguments if not argument.count)
        raise ConfigError(
            f"{name} needs {' and '.join(needed)}: python -m llmx {name} {command.usage}"
        )
    parser = _Parser(name)
    flags, unread = parser.parse_known_intermixed_args(words)
    if unread:
        problem = "no such option" if unread[0].startswith("-") else "too many words"
        typed = unread[0].strip().partition("=")[0]
        hint = _INSTEAD.get(typed) or did_you_mean(typed, _names(command))
        parser.error(f"{problem}: {' '.join(unread)}{hint and f'.{hint}'}")
    values = vars(flags)
    if values.get("config_dir"):
        values["config_dir"] = _directory(str(values["config_dir"]))
    return Words(**values)


def _number(number: Number, word: str) -> float:
    """The value of a flag that is a number in a range."""
    if (value := number.read(word)) is None:
        raise argparse.ArgumentTypeError(f"{shown(word)} is not {number}")
    return value
