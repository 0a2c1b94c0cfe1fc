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


def train(words: Words) -> int:
    """Start a run, or a sweep by the launcher plugin, or print a config; returns the exit code."""
    if words.show:
        return show_config(words)
    if words.multirun:
        return _sweep(words)
    exp, typed, is_placed = composed(words)
    return _run(exp, typed, config_dir=words.config_dir, is_placed=is_placed)


def composed_for(command: str, words: Words) -> Experiment:
    """The complete experiment of a command that reads one without starting ranks."""
    from llmx.compose.complete import check, complete

    exp, problems = complete(composed(words, command=command)[0])
    if COMMANDS[command].trains:
        check(exp, problems)
    elif problems:
        raise ConfigError("\n".join(problems))
    return exp


def composed(words: Words, *, command: str | None = None) -> tuple[Experiment, list[str], bool]:
    """The experiment of a command line, its words, and whether they place the run directory.

    ``command``: which reads the experiment; without it training does.
    """
    from llmx.cli.arguments import checked
    from llmx.compose.effects import check_effects
    from llmx.compose.hydra_config import composed_values
    from llmx.config import experiment_from_dict

    typed = checked(words)
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


def show_config(words: Words) -> int:
    """Print a config, or how it was composed, in the words of Hydra."""
    from llmx.cli.arguments import checked
    from llmx.compose.hydra_config import hydra_for
    from llmx.config import known_keys
    from llmx.config.build import shown

    typed, show = checked(words), words.show
    part = show.get("--package")
    with hydra_for(typed, words.config_dirs) as (hydra, places):
        if "--info" in show:
            hydra.show_info(show["--info"], "config", [*places, *typed])
        else:
            resolve = "--resolve" in show
            silence = contextlib.redirect_stderr(io.StringIO())
            try:
                with silence if part else contextlib.nullcontext():
                    hydra.show_cfg(
                        "config", [*places, *typed], show["--cfg"], part, resolve=resolve
                    )
            except SystemExit:  # how Hydra ends where the config has no such part
                raise ConfigError(
                    f"--package {shown(part)}: the config has no such part."
                    f"{did_you_mean(str(part)[:100], sorted(known_keys()))} See all of it with "
                    "--cfg job."
                ) from None
    return 0


def _sweep(words: Words) -> int:
    """Have Hydra run a sweep, by the launcher plugin."""
    from llmx.cli.arguments import checked
    from llmx.compose.hydra_config import hydra_for
    from llmx.compose.overrides import fixed_keys

    typed = checked(words)
    directory = str(Path(words.config_dir).expanduser().absolute()) if words.config_dir else None
    for word in typed:
        key, _, value = word.lstrip("+~").partition("=")
        is_true = value.strip("'\"").lower() in ("true", "yes", "on", "1")
        if key == "launch.detach" and is_true:  # each trial would be refused, in its directory
            raise ConfigError(
                f"{word}: is for a single run, and a sweep waits for its trials. Leave it out, and "
                "start the sweep in tmux or with nohup."
            )

    def job(_: object) -> None:
        raise ConfigError("the trials of a sweep run by hydra/launcher=deepspeed alone.")

    # A sweep's directories are named after what differs between its jobs.
    fixed = ",".join(fixed_keys(typed))
    hydra_words = [
        f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]",
        "hydra.mode=MULTIRUN",
    ]
    hydra_words += _continued(typed, directory)
    try:
        with hydra_for(typed, words.config_dirs) as (hydra, places):
            hydra.multirun("config", job, [*places, *hydra_words, *typed])
    except OSError as error:
        if not error.filename or disk_is_full(error):
            raise
        where = one_line(str(error.filename), limit=200)
        raise ConfigError(
            f"{where}: cannot create the directory of the sweep ({error.strerror}). Set "
            "hydra.sweep.dir=DIR, or LLMX_OUTPUTS=DIR for all runs."
        ) from error
    return 0


def _continued(words: Sequence[str], config_dir: str | None) -> list[str]:
    """The override that continues the same sweep where it ended early; else nothing."""
    from llmx.run.sweepdir import unfinished

    typed = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    if "hydra.sweep.dir" in typed or typed.get("sweep.resume", "").lower() == "false":
        return []
    sweep = unfinished(outputs_dir() / "sweeps", words, cwd=Path.cwd(), config_dir=config_dir)
    if sweep is None:
        return []
    done = sum(trial.is_done for trial in sweep.trials)
    print(
        f"Continuing the sweep of {sweep.directory}: {done} of "
        f"{plural(len(sweep.trials), 'trial')} done (sweep.resume=false starts a new one)",
        flush=True,
    )
    return [f"hydra.sweep.dir='{sweep.directory}'"]


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


def outputs_dir() -> Path:
    """The directory of runs, unless ``run_dir`` names another."""
    return Path(os.path.abspath(os.environ.get("LLMX_OUTPUTS") or "outputs"))
