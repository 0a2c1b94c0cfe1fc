"""The command line: ``python -m llmx [command] [overrides]``; ``llmx`` is the same.

Light on purpose: the control process imports neither torch nor deepspeed, and starts
``deepspeed`` within a second.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmx.cli.commands import COMMANDS, HEAVY, LIGHT
from llmx.errors import ConfigError, LlmxError, did_you_mean, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors for the user are printed, not raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _dispatch(words))


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
    from llmx.lifecycle.start import CONFIG_COMMANDS

    command, rest = split_command(words, tuple(COMMANDS))
    if command == "plan":
        return _hydra([*rest, "dry_run=true"])
    if command == "sweep":
        return _sweep(rest)
    if command in LIGHT:
        main_of_command = importlib.import_module(LIGHT[command]).main
        code: int = main_of_command(rest)
        return code
    if command in HEAVY:
        return _module(command, rest)
    if command in CONFIG_COMMANDS:
        own, overrides = split_own(rest, CONFIG_COMMANDS[command].own_keys)
        return _hydra(overrides, command=command, own=own)
    return _hydra(rest)


def _help(words: list[str]) -> str:
    """A command's own help where one is named, else the whole."""
    if words[0] in COMMANDS:
        from llmx.cli.topics import command_help

        return command_help(words[0])
    from llmx.cli.help import help_text

    return help_text()


def _sweep(words: list[str]) -> int:
    from llmx.cli.arguments import sweep_overrides
    from llmx.config.groups import sweeps_dir

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
    from llmx.lifecycle.start import exit_code_of_process

    process = subprocess.run([sys.executable, "-m", HEAVY[command], *words], check=False)
    return exit_code_of_process(process.returncode)


def _hydra(words: list[str], *, command: str | None = None, own: Sequence[str] = ()) -> int:
    """Compose the config and start what it describes; a sweep goes through the launcher plugin.

    ``command``: hand the composed config to this command, with its ``own`` words, instead of
    starting a run.
    """
    from llmx.cli.arguments import read_line, with_demo
    from llmx.compose.overrides import check_overrides

    line = read_line(words)
    if command and line.multirun:
        raise ConfigError(f"{command}: takes one config; a sweep (-m) is for training.")
    checked = check_overrides(
        with_demo(line.overrides),
        multirun=line.multirun,
        config_dirs=[line.config_dir] if line.config_dir else [],
    )
    argv = list(checked.words)
    if line.multirun:
        # A sweep's directories are named after what differs between its jobs.
        fixed = ",".join(checked.fixed)
        argv = [f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]", *argv, "--multirun"]
    if line.config_dir:
        argv += ["--config-dir", str(Path(line.config_dir).expanduser())]
    return _compose([*argv, *line.show], checked.words, command=command, own=own)


def _compose(
    argv: list[str], overrides: list[str], *, command: str | None, own: Sequence[str]
) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from llmx.compose.defaults import register_defaults
    from llmx.compose.explain import explain_hydra
    from llmx.config.groups import conf_dir
    from llmx.lifecycle.start import require_success, run_command, run_job
    from llmx.run.rundir import claim

    register_defaults()
    ended: list[int | LlmxError] = []
    inside = False

    def job(cfg: DictConfig) -> int:
        nonlocal inside
        inside = True
        hydra_config = HydraConfig.get()
        made = Path(hydra_config.runtime.output_dir)
        try:
            values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            assert isinstance(values, dict)
            values = {str(key): value for key, value in values.items()}
            if command or values.get("run_dir") != str(made):
                _remove_if_empty(made)
            elif hydra_config.mode == RunMode.RUN:
                # Named after the second, which another command may share.
                made = claim(made)
                values["run_dir"] = str(made)
            if command:
                code = run_command(command, values, own=own)
            else:
                code = run_job(values, overrides=list(hydra_config.overrides.task))
            if hydra_config.mode == RunMode.MULTIRUN:
                require_success(code)
        except (LlmxError, OmegaConfBaseException) as error:
            # Hydra made the directory; one that nothing was written to is not a run.
            _remove_if_empty(made)
            problem = error
            if not isinstance(error, LlmxError):
                problem = ConfigError(explain_hydra(error, overrides))
            if hydra_config.mode == RunMode.MULTIRUN:
                raise problem from error
            # Raised inside, Hydra would print its own words around ours.
            ended.append(problem)
            return problem.exit_code
        finally:
            inside = False
        ended.append(code)
        return code

    # Without it Hydra prints its own traceback and exits before our message can be made.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    decorated = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    saved, sys.argv = sys.argv, ["llmx", *argv]
    try:
        decorated(job)()
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(explain_hydra(error, overrides)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, LlmxError) or not _of_hydra(error):
            raise
        raise ConfigError(explain_hydra(error, overrides)) from error
    except OSError as error:
        if inside:
            raise
        raise ConfigError(
            f"{error.filename}: the run directory cannot be made ({error.strerror}). Set "
            "run_dir=DIR, or LLMX_OUTPUTS=DIR for all runs."
        ) from error
    finally:
        sys.argv = saved
    for end in ended:
        if isinstance(end, LlmxError):
            raise end
    return next((end for end in ended if isinstance(end, int) and end), 0)


def _of_hydra(error: BaseException) -> bool:
    """Whether Hydra, or what it reads configs with, has raised it: of a word, not a defect here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4")


def _remove_if_empty(directory: Path) -> None:
    """Remove a directory that was made for nothing, and ``outputs`` if it held only that."""
    from llmx.run.rundir import RunDir

    with contextlib.suppress(OSError):
        RunDir(directory).logs.rmdir()
    with contextlib.suppress(OSError):
        for path in (directory, directory.parent):
            path.rmdir()


if __name__ == "__main__":
    sys.exit(main())
