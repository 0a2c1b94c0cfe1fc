"""The work of the launcher: compose each cell, run it, keep its outcome, go on.

``run_job`` of Hydra changes global state and is not thread-safe, so cells are run in turn.
A cell that fails does not stop the others; the sweeper raises its error at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.singleton import Singleton
from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from omegaconf import open_dict

from llmx.arguments import resolve_alias

if TYPE_CHECKING:
    from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher


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
    sweep_dir = Path(str(config.hydra.sweep.dir))
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
        outcomes.append(outcome)
    return outcomes
