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
from typing import TYPE_CHECKING

from llmx.cli.commands import COMMANDS
from llmx.errors import ConfigError, LlmxError, did_you_mean, disk_is_full
from llmx.text import one_line, plural

if TYPE_CHECKING:
    from llmx.compose.words import Words
    from llmx.config import Experiment

_READERS = ("hydra", "omegaconf", "antlr4")


def train(words: Words) -> int:
    """Start a run, or a sweep by the launcher plugin, or print a config; returns the exit code."""
    if words.multirun or words.show:
        return _by_hydra(words)
    exp, typed, is_placed = composed(words)
    return _run(exp, typed, config_dir=words.config_dir, is_placed=is_placed)


def hand_over(command: str, words: Words) -> int:
    """Compose a config and hand it to the process of a command; returns its exit code."""
    from llmx.compose.complete import check, complete
    from llmx.run.scratch import scratch_directory
    from llmx.run.snapshot import dump_config

    if words.multirun:
        raise ConfigError(f"{command}: takes one config; a sweep (-m) is for training.")
    if words.show:
        return _by_hydra(words)
    entry = COMMANDS[command]
    exp, problems = complete(composed(words, command=command)[0])
    if entry.trains:
        check(exp, problems)
    elif problems:
        raise ConfigError("\n".join(problems))
    with scratch_directory() as directory:
        config = directory / "config.yaml"
        config.write_text(dump_config(exp), encoding="utf-8")
        own_words = [f"{key}={value}" for key, value in words.own.items()]
        return run_module(entry.module, [str(config), *own_words])


def composed(words: Words, *, command: str | None = None) -> tuple[Experiment, list[str], bool]:
    """The experiment of a command line, its words, and whether they place the run directory.

    ``command``: which reads the experiment; without it training does.
    """
    from llmx.cli.arguments import checked
    from llmx.compose.effects import check_effects
    from llmx.compose.hydra_config import composed_values, register_defaults
    from llmx.config import experiment_from_dict

    typed = checked(words).words
    register_defaults()
    values, directory = composed_values("config", typed, typed=typed, config_dirs=words.config_dirs)
    exp = experiment_from_dict(values)
    typed = [word for word in typed if not word.startswith("hydra")]
    check_effects(exp, typed, command=command)
    return exp, typed, exp.run_dir != directory


def _run(exp: Experiment, typed: list[str], *, config_dir: str | None, is_placed: bool) -> int:
    """Start a run, in a directory of its own where none is named."""
    from llmx.compose.complete import complete, plan_experiment
    from llmx.lifecycle.start import run_composed
    from llmx.run.rundir import RunDir, claim

    directory = Path(config_dir).expanduser().absolute() if config_dir else None
    unused: list[Path] = []
    if not is_placed:
        outputs = outputs_dir()
        new_parents = [path for path in (outputs, *outputs.parents) if not path.exists()]
        root = claim(Path(exp.run_dir))  # named after the second, which another command may share
        unused = [RunDir(root).logs, root, *new_parents]
        exp = dataclasses.replace(exp, run_dir=str(root))
    try:
        planned = plan_experiment(*complete(exp))
        return run_composed(
            planned, overrides=typed, config_dir=str(directory) if directory else None
        )
    except LlmxError:
        for path in unused:  # one that nothing was written to is not a run
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _by_hydra(words: Words) -> int:
    """Have Hydra run a sweep, by the launcher plugin, or print a config."""
    from llmx.cli.arguments import checked

    meant = checked(words)
    argv = list(meant.words)
    directory = str(Path(words.config_dir).expanduser().absolute()) if words.config_dir else None
    if words.multirun:
        detached = [word for word in argv if _detaches(word)]
        if detached:  # each trial would be refused, in a directory of the sweep
            raise ConfigError(
                f"{detached[0]}: is for a single run, and a sweep waits for its trials. Leave it "
                "out, and start the sweep in tmux or with nohup."
            )
        # A sweep's directories are named after what differs between its jobs.
        fixed = ",".join(meant.fixed)
        argv = [f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]", *argv, "--multirun"]
        if not words.show:
            argv = [*_continued(argv, directory), *argv]
    if directory:
        argv += ["--config-dir", directory]
    return _hydra_main([*argv, *words.show], meant.words)


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


def _hydra_main(argv: list[str], overrides: list[str]) -> int:
    """Hydra's own program. ``overrides``: for messages."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from llmx.compose.hydra_config import explain_hydra, register_defaults
    from llmx.config import known_keys
    from llmx.config.build import shown
    from llmx.config.groups import CONF

    register_defaults()

    def job(_: object) -> None:
        raise ConfigError("the trials of a sweep run by hydra/launcher=deepspeed alone.")

    # Without it Hydra prints its own traceback and exits before our message can be made.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    decorated = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    saved, sys.argv = sys.argv, ["llmx", *argv]
    part = argv[argv.index("--package") + 1] if "--package" in argv else None
    silence = contextlib.redirect_stderr(io.StringIO()) if part else contextlib.nullcontext()
    try:
        with silence:
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
        if not error.filename or disk_is_full(error):
            raise
        where = one_line(str(error.filename), limit=200)
        raise ConfigError(
            f"{where}: cannot create the directory of the sweep ({error.strerror}). Set "
            "hydra.sweep.dir=DIR, or LLMX_OUTPUTS=DIR for all runs."
        ) from error
    finally:
        sys.argv = saved
    return 0


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
