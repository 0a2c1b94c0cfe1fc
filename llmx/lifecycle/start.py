"""One job: from composed values to a finished run. What a single run and a sweep's cell share.

``python -m llmx`` calls it once; the Hydra launcher plugin calls it for every cell.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from llmx.compose.complete import Composed, check_paths, complete, compose
from llmx.config import experiment_from_dict
from llmx.config.validate import validate
from llmx.errors import ConfigError, RunFailed
from llmx.lifecycle.packing import resolve_layout
from llmx.plan.geometry import position_limit
from llmx.run import snapshot


@dataclass(frozen=True)
class ConfigCommand:
    """A command that takes a composed config and starts no run."""

    module: str
    """Run as ``python -m MODULE CONFIG.yaml [OWN WORDS]``: it may load heavy libraries."""
    own_keys: tuple[str, ...] = ()
    """Words ``KEY=VALUE`` that are the command's, not the config's."""
    trains: bool = True
    """The config is one to train with, and checked as such."""


CONFIG_COMMANDS = {
    "data": ConfigCommand("llmx.cli.data", ("preview", "split")),
    "tokenizer": ConfigCommand(
        "llmx.data.train_tokenizer", ("vocab_size", "kind", "output"), trains=False
    ),
}


def run_job(values: dict[str, Any], *, overrides: list[str], stream: TextIO | None = None) -> int:
    """Compose, snapshot and launch one job; returns the exit code (0: it ended well)."""
    return run_composed(compose(values), overrides=overrides, stream=stream)


def run_composed(composed: Composed, *, overrides: list[str], stream: TextIO | None = None) -> int:
    """Write the run directory, then plan only (``dry_run``) or launch and supervise."""
    from llmx.launch import check_launch, supervise, write_launch_files

    out = stream or sys.stdout
    # Before anything is written: a secret in launch.env must not reach config.yaml.
    check_launch(composed.experiment, composed.plan)
    check_paths(composed.experiment, composed.plan)
    composed = resolve_layout(composed, stream=out)
    exp, plan = composed.experiment, composed.plan
    run = snapshot.write(exp, plan, composed.ds_config, overrides=overrides)
    launch = write_launch_files(exp, plan, run)
    if exp.dry_run:
        from llmx.launch.render.files import render_command
        from llmx.observe.report.plan_table import print_plan

        print_plan(plan, exp, command=render_command(launch), run_dir=run.root, stream=out)
        return 0
    result = supervise(exp, plan, run, launch=launch)
    return result.exit_code


def run_command(command: str, values: dict[str, Any], *, own: Sequence[str] = ()) -> int:
    """Hand the completed config to a command's process; returns its exit code."""
    chosen = CONFIG_COMMANDS[command]
    exp, problems = complete(experiment_from_dict(values))
    if chosen.trains:
        validate(exp, problems, position_limit=position_limit(exp.model.config))
    elif problems:
        raise ConfigError("\n".join(problems))
    with tempfile.TemporaryDirectory(prefix=f"llmx-{command}-") as directory:
        config = Path(directory) / "config.yaml"
        config.write_text(snapshot.dump_config(exp), encoding="utf-8")
        words = [sys.executable, "-m", chosen.module, str(config), *own]
        return exit_code_of_process(subprocess.run(words, check=False).returncode)


def exit_code_of_process(returncode: int) -> int:
    """Of a process: as a shell says it, 128 and the signal for one that a signal has ended."""
    return returncode if returncode >= 0 else 128 - returncode


def require_success(exit_code: int) -> None:
    """Raise RunFailed for an exit code other than 0 (what a sweep's cell needs)."""
    if exit_code != 0:
        raise RunFailed(f"the run ended with exit code {exit_code}; its result.json has the cause.")
