"""The Hydra application: composes the overrides to a config, and starts what it describes.

Light until Hydra is needed: the imports are inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.cli.commands import COMMANDS
from llmx.errors import ConfigError, LlmxError, did_you_mean, disk_is_full
from llmx.text import one_line, plural

if TYPE_CHECKING:
    from llmx.config import Experiment

_READERS = ("hydra", "omegaconf", "antlr4")


def run_hydra(words: list[str], *, command: str | None = None, own_keys: Sequence[str] = ()) -> int:
    """Compose the config and start what it describes; a sweep goes through the launcher plugin.

    ``command``: hand the composed config to this command, with its ``own_keys``, instead of
    starting a run.
    """
    from llmx.cli.arguments import read_line

    line = read_line(words)
    if command and line.multirun:
        raise ConfigError(f"{command}: takes one config; a sweep (-m) is for training.")
    checked = line.checked()
    argv = list(checked.words)
    directory = str(Path(line.config_dir).expanduser().absolute()) if line.config_dir else None
    if line.multirun:
        detached = [word for word in checked.words if _detaches(word)]
        if detached:  # each trial would be refused, in a directory of the sweep
            raise ConfigError(
                f"{detached[0]}: is for a single run, and a sweep waits for its trials. Leave it "
                "out, and start the sweep in tmux or with nohup."
            )
        # A sweep's directories are named after what differs between its jobs.
        fixed = ",".join(checked.fixed)
        argv = [f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]", *argv, "--multirun"]
        if not line.show:
            argv = [*_continued(argv, directory), *argv]
    if directory:
        argv += ["--config-dir", directory]
    return _compose(
        [*argv, *line.show],
        checked.words,
        command=command,
        own_keys=own_keys,
        config_dir=directory,
    )


def _detaches(word: str) -> bool:
    key, _, value = word.lstrip("+~").partition("=")
    return key == "launch.detach" and value.strip("'\"").lower() in ("true", "yes", "on", "1")


def _continued(argv: Sequence[str], config_dir: str | None) -> list[str]:
    """The override that continues the same sweep where it ended early; else nothing."""
    from llmx.run.sweepdir import OWN_WORDS, unfinished

    words = [word for word in argv if not word.startswith((*OWN_WORDS, "--"))]
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in argv}
    if "hydra.sweep.dir" in typed or typed.get("sweep.resume", "").lower() == "false":
        return []
    root = Path(os.environ.get("LLMX_OUTPUTS") or "outputs", "sweeps").absolute()
    sweep = unfinished(root, words, cwd=Path.cwd(), config_dir=config_dir)
    if sweep is None:
        return []
    done = sum(trial.is_done for trial in sweep.trials)
    print(
        f"Continuing the sweep of {sweep.directory}: {done} of "
        f"{plural(len(sweep.trials), 'trial')} done (sweep.resume=false starts a new one)",
        flush=True,
    )
    return [f"hydra.sweep.dir='{sweep.directory}'"]


def _compose(
    argv: list[str],
    overrides: list[str],
    *,
    command: str | None,
    own_keys: Sequence[str],
    config_dir: str | None,
) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from llmx.compose.hydra_config import explain_hydra, register_defaults
    from llmx.config import known_keys
    from llmx.config.build import shown
    from llmx.config.groups import CONF

    register_defaults()
    outputs = outputs_dir()
    new_parents = [path for path in (outputs, *outputs.parents) if not path.exists()]
    ended: list[int | LlmxError] = []
    inside = False

    def job(cfg: DictConfig) -> int:
        from llmx.compose.complete import complete, plan_experiment
        from llmx.compose.effects import check_effects
        from llmx.config import experiment_from_dict
        from llmx.lifecycle.start import require_success, run_composed
        from llmx.run.rundir import RunDir, claim

        nonlocal inside
        inside = True
        hydra_config = HydraConfig.get()
        directory = Path(hydra_config.runtime.output_dir)
        is_single = hydra_config.mode == RunMode.RUN
        unused = [directory, *new_parents] if is_single else []
        try:
            values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            exp = experiment_from_dict(values)
            words = list(hydra_config.overrides.task)
            if is_single:
                check_effects(exp, words, command=command)
            if command or exp.run_dir != str(directory):
                _remove_empty(unused)
            elif is_single:
                # Named after the second, which another command may share.
                directory = claim(directory)
                unused = [RunDir(directory).logs, directory, *new_parents]
                exp = dataclasses.replace(exp, run_dir=str(directory))
            if command:
                code = _run_command(command, exp, own_keys=own_keys)
            else:
                composed = plan_experiment(*complete(exp))
                code = run_composed(composed, overrides=words, config_dir=config_dir)
            if not is_single:
                require_success(code)
        except (LlmxError, OmegaConfBaseException) as error:
            # Hydra made the directory; one that nothing was written to is not a run.
            _remove_empty(unused)
            if isinstance(error, LlmxError):
                problem = error
            else:
                problem = ConfigError(explain_hydra(error, overrides))
            if not is_single:
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
    decorated = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    saved, sys.argv = sys.argv, ["llmx", *argv]
    part = argv[argv.index("--package") + 1] if "--package" in argv else None
    unheard = contextlib.redirect_stderr(io.StringIO()) if part else contextlib.nullcontext()
    try:
        with unheard, _mode_as_typed():
            decorated(job)()
    except SystemExit:  # how Hydra ends where the config has no such part
        if not part:
            raise
        raise ConfigError(
            f"--package {shown(part)}: the config has no such part."
            f"{did_you_mean(part[:100], sorted(known_keys()))} See all of it with --cfg job."
        ) from None
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(explain_hydra(error, overrides)) from error
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        if isinstance(error, LlmxError) or not _of_hydra(error):
            raise
        raise ConfigError(explain_hydra(error, overrides)) from error
    except OSError as error:
        if inside or not error.filename or disk_is_full(error):
            raise
        _remove_empty(new_parents)
        where = one_line(str(error.filename), limit=200)
        raise ConfigError(
            f"{where}: cannot create the run directory ({error.strerror}). Set run_dir=DIR, or "
            "LLMX_OUTPUTS=DIR for all runs."
        ) from error
    finally:
        sys.argv = saved
    for end in ended:
        if isinstance(end, LlmxError):
            raise end
    return next((end for end in ended if isinstance(end, int) and end), 0)


@contextlib.contextmanager
def _mode_as_typed() -> Iterator[None]:
    """Hydra composes the whole config once more only to read ``hydra.mode`` in it: a quarter of
    what a command takes before it does anything. Here ``--multirun`` alone decides."""
    from hydra._internal.hydra import Hydra

    get_mode: Any = getattr(Hydra, "get_mode", None)
    if get_mode is None:
        yield
        return
    Hydra.get_mode = lambda self, config_name, overrides: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = get_mode  # type: ignore[method-assign]


def _run_command(command: str, exp: Experiment, *, own_keys: Sequence[str]) -> int:
    """Complete the config and hand it to a command's process; returns its exit code."""
    from llmx.compose.complete import check, complete
    from llmx.run.scratch import scratch_directory
    from llmx.run.snapshot import dump_config

    entry = COMMANDS[command]
    exp, problems = complete(exp)
    if entry.trains:
        check(exp, problems)
    elif problems:
        raise ConfigError("\n".join(problems))
    with scratch_directory() as directory:
        config = directory / "config.yaml"
        config.write_text(dump_config(exp), encoding="utf-8")
        return run_module(entry.module, [str(config), *own_keys])


def run_module(module: str, words: Sequence[str], *, takes_ctrl_c: bool = False) -> int:
    """``python -m module words`` in a process of its own; its exit code as a shell has it: 128 and
    the signal for one that a signal ended.

    ``takes_ctrl_c``: Ctrl-C, which a terminal sends to both, is for it alone; this process waits.
    """
    with _without_ctrl_c() if takes_ctrl_c else contextlib.nullcontext():
        code = subprocess.run([sys.executable, "-m", module, *words], check=False).returncode
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A function, not SIG_IGN, which the other process would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _of_hydra(error: BaseException) -> bool:
    """Whether Hydra, or a library that it reads configs with, raised the error: then a word is
    wrong, and there is no defect here."""
    last, trace = "", error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        if package in (*_READERS, "llmx", "hydra_plugins"):
            last = package
        trace = trace.tb_next
    return last in _READERS


def outputs_dir() -> Path:
    """The directory of runs, unless ``run_dir`` names another."""
    return Path(os.path.abspath(os.environ.get("LLMX_OUTPUTS") or "outputs"))


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove, one after the other, those of the directories with nothing in them."""
    for path in directories:
        with contextlib.suppress(OSError):
            path.rmdir()
