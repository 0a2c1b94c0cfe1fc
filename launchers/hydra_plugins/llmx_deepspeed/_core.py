"""The work of the launcher: compose each cell, run it, keep its outcome, go on.

``run_job`` of Hydra changes global state and is not thread-safe, so cells are run in turn.
A cell that fails does not stop the others; the sweeper raises its error at the end, so the table of
all of them is printed before. One that the user ended (Ctrl-C) ends the sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from omegaconf import OmegaConf, open_dict

from llmx.compose.overrides import resolve_alias
from llmx.errors import LlmxError
from llmx.observe.report.sweep_table import Trial, print_sweep, read_trial, write_sweep

if TYPE_CHECKING:
    from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher


class Refused(JobReturn):
    """A job that ended with a message for the user, which has been printed. Hydra's own raises
    the error, too, but first prints a line on overrides."""

    @property
    def return_value(self) -> Any:
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def launch(
    launcher: DeepSpeedLauncher, *, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Run every cell; returns their JobReturns in order, failed ones included."""
    setup_globals()
    config, context = launcher.config, launcher.hydra_context
    assert config is not None
    assert context is not None
    assert launcher.task_function is not None
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
    sweep_dir.mkdir(parents=True, exist_ok=True)

    outcomes: list[JobReturn] = []
    for offset, raw in enumerate(job_overrides):
        index = initial_job_idx + offset
        overrides = [resolve_alias(override) for override in raw]
        print(f"[{index}] {' '.join(filter_overrides(overrides))}", flush=True)
        cell = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(cell):
            cell.hydra.job.id = f"job_id_for_{index}"
            cell.hydra.job.num = index
        # run_job sets the globals of the cell; the sweep's own come back afterwards.
        state = Singleton.get_state()
        outcome = run_job(
            hydra_context=context,
            task_function=launcher.task_function,
            config=cell,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        Singleton.set_state(state)
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        if outcome.status is JobStatus.FAILED:
            print(f"[{index}] failed: {outcome._return_value}", file=sys.stderr, flush=True)
            if isinstance(outcome._return_value, LlmxError):
                values = {each.name: getattr(outcome, each.name) for each in fields(outcome)}
                outcome = Refused(**values)
        outcomes.append(outcome)
        trial = _trial(index, filter_overrides(overrides), outcome)
        if trial is not None:
            launcher.trials.append(trial)
            write_sweep(launcher.trials, directory=sweep_dir)
            if trial.outcome == "interrupted":
                left = len(job_overrides) - offset - 1
                print(f"The sweep ends here; trials not started: {left}", file=sys.stderr)
                break
    if launcher.trials:
        sys.stderr.flush()
        print_sweep(launcher.trials, directory=sweep_dir, stream=sys.stdout)
        sys.stdout.flush()
    return outcomes


def _trial(index: int, overrides: Sequence[str], outcome: JobReturn) -> Trial | None:
    """What became of a cell; None where the function was not llmx's (Hydra runs any)."""
    error = outcome._return_value if outcome.status is JobStatus.FAILED else None
    assert outcome.hydra_cfg is not None
    run_dir = Path(str(outcome.hydra_cfg.hydra.runtime.output_dir))
    # By default an interpolation, which is of the cell's globals and those are gone.
    plain = OmegaConf.to_container(OmegaConf.create(outcome.cfg), resolve=False)
    named = plain.get("run_dir") if isinstance(plain, dict) else None
    if isinstance(named, str) and named and "${" not in named:
        run_dir = Path(named).absolute()
    if not (run_dir / "config.yaml").is_file() and not isinstance(error, LlmxError):
        return None
    return read_trial(index, overrides, run_dir, error=error)
