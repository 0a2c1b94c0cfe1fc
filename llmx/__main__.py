"""The command line: ``python -m llmx [command] [overrides]``; ``llmx`` is the same.

Light on purpose: the control process imports neither torch nor deepspeed, and starts
``deepspeed`` within a second.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmx.errors import ConfigError, LlmxError, did_you_mean

LIGHT = ("resume", "reproduce", "status", "watch")
"""Commands that are a module ``llmx.NAME`` with a ``main(words)``, run in this process."""

HEAVY = ("report", "generate", "export", "compare", "bench")
"""Commands that load heavy libraries: ``python -m llmx.NAME``, in a process of their own."""

OWN_HELP = ("bench", "compare", "export", "generate", "report")
"""Commands with flags of their own, which ``export --help`` lists."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors for the user are printed, not raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except LlmxError as error:
        print(f"llmx: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has seen enough (`| head`); Python must not complain of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    # Before --help: words that are being completed may hold one.
    if words[:1] == ["help"]:
        from llmx.topics import main as help_main

        return help_main(words[1:])
    if words[:1] == ["completion"] and words[1:2] not in (["-h"], ["--help"]):
        from llmx.completion import main as completion_main

        return completion_main(words[1:])
    if len(words) == 2 and words[0] in OWN_HELP and words[1] in ("-h", "--help"):
        return _module(words[0], words[1:])
    if any(word in ("-h", "--help") for word in words):
        print(_help(words))
        return 0
    if words == ["--version"]:
        from llmx import __version__

        print(f"llmx {__version__}")
        return 0
    from llmx.arguments import split_command, split_own
    from llmx.help import COMMANDS
    from llmx.job import CONFIG_COMMANDS

    command, rest = split_command(words, tuple(COMMANDS))
    if command == "plan":
        return _hydra([*rest, "dry_run=true"])
    if command == "sweep":
        return _sweep(rest)
    if command in LIGHT:
        main_of_command = importlib.import_module(f"llmx.{command}").main
        code: int = main_of_command(rest)
        return code
    if command in HEAVY:
        return _module(command, rest)
    if command in CONFIG_COMMANDS:
        own, overrides = split_own(rest, CONFIG_COMMANDS[command].own_keys)
        return _hydra(overrides, command=command, own=own)
    return _hydra(rest)


def _help(words: list[str]) -> str:
    """A command's own help where it has one, else the whole."""
    from llmx.commands import COMMANDS

    if words[0] in COMMANDS and words[0] not in OWN_HELP:
        from llmx.topics import command_help

        return command_help(words[0])
    from llmx.help import help_text

    return help_text()


def _sweep(words: list[str]) -> int:
    from llmx.arguments import sweep_overrides
    from llmx.catalogue import sweeps_dir

    names = sorted(path.stem for path in sweeps_dir().glob("*.yaml"))
    if not words:
        raise ConfigError(f"sweep needs a name or a YAML file. Committed: {', '.join(names)}.")
    path = Path(words[0]) if words[0].endswith(".yaml") else sweeps_dir() / f"{words[0]}.yaml"
    if not path.is_file():
        hint = did_you_mean(words[0], names)
        raise ConfigError(f"no sweep {words[0]!r}.{hint} Committed: {', '.join(names)}.")
    return _hydra(["--multirun", *sweep_overrides(path), *words[1:]])


def _module(command: str, words: list[str]) -> int:
    """Commands that load heavy libraries run in a process of their own."""
    if not words and command != "bench":
        needs = "two run directories" if command == "compare" else "a run directory"
        names = "RUN_A RUN_B" if command == "compare" else "RUN_DIR"
        raise ConfigError(f"{command} needs {needs}: python -m llmx {command} {names}")
    return subprocess.run([sys.executable, "-m", f"llmx.{command}", *words], check=False).returncode


def _hydra(words: list[str], *, command: str | None = None, own: Sequence[str] = ()) -> int:
    """Hand the overrides to Hydra; its launcher plugin takes over in a multirun.

    ``command``: hand the composed config to this command, with its ``own`` words, instead of
    starting a run.
    """
    from llmx.arguments import options_last, resolve_alias, with_demo

    overrides = [resolve_alias(word) for word in words]
    # Completion hands over half-typed words: they are nobody's overrides yet.
    if not any(word.startswith(("-sc", "--shell-completion")) for word in words):
        overrides = options_last(overrides)
        plain = [word for word in overrides if not word.startswith("-")]
        if len(with_demo(plain)) > len(plain):
            overrides.insert(0, "experiment=demo")
        if any(word in ("-m", "--multirun") for word in overrides):
            if command:
                raise ConfigError(f"{command} takes one config; a sweep (-m) is for training.")
            overrides.insert(0, _name_cells_by_axes(overrides))

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from llmx.catalogue import conf_dir
    from llmx.defaults import register_defaults
    from llmx.explain import explain_hydra
    from llmx.job import require_success, run_command, run_job

    register_defaults()
    ended: list[int | LlmxError] = []

    def job(cfg: DictConfig) -> int:
        hydra_config = HydraConfig.get()
        try:
            values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            assert isinstance(values, dict)
            values = {str(key): value for key, value in values.items()}
            if command:
                code = run_command(command, values, own=own)
                _remove_if_empty(Path(hydra_config.runtime.output_dir))
            else:
                code = run_job(values, overrides=list(hydra_config.overrides.task))
            if hydra_config.mode == RunMode.MULTIRUN:
                require_success(code)
        except (LlmxError, OmegaConfBaseException) as error:
            # Hydra made the directory; one that nothing was written to is not a run.
            _remove_if_empty(Path(hydra_config.runtime.output_dir))
            problem = error if isinstance(error, LlmxError) else ConfigError(explain_hydra(error))
            if hydra_config.mode == RunMode.MULTIRUN:
                raise problem from error
            # Raised inside, Hydra would print its own words around ours.
            ended.append(problem)
            return problem.exit_code
        ended.append(code)
        return code

    # Without it Hydra prints its own traceback and exits before our message can be made.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    decorated = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    saved, sys.argv = sys.argv, ["llmx", *overrides]
    try:
        decorated(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_hydra(error)) from error
    finally:
        sys.argv = saved
    for end in ended:
        if isinstance(end, LlmxError):
            raise end
    return next((end for end in ended if isinstance(end, int) and end), 0)


def _name_cells_by_axes(words: list[str]) -> str:
    """The override by which a sweep's directories are named after what differs between them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from llmx.explain import explain_hydra

    plain = [word for word in words if not word.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(plain)
    except HydraException as error:
        raise ConfigError(explain_hydra(error)) from error
    fixed = [word.key_or_group for word in parsed if not word.is_sweep_override()]
    return f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"


def _remove_if_empty(directory: Path) -> None:
    """Remove a directory that Hydra made for nothing, and ``outputs`` if it held only that."""
    for path in (directory, directory.parent):
        if not path.is_dir() or any(path.iterdir()):
            return
        path.rmdir()


if __name__ == "__main__":
    sys.exit(main())
