"""Runs ``hydra/sweeper=tune``: plans the candidates, runs the trials that the search asks for, one
at a time, and reports the fastest."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import psutil
from hydra_plugins.llmx_deepspeed._core import (
    check_any_ended_well,
    fixed_and_swept,
    searching,
    trial_values,
)

from llmx.compose.complete import Composed, complete, plan_experiment
from llmx.config import Experiment, experiment_from_dict
from llmx.errors import ConfigError, LlmxError
from llmx.observe.report.sweep_data import load_sweep
from llmx.plan.choices import AUTO_KEYS
from llmx.run.rundir import write_text
from llmx.sweep.tune import NO_MEMORY, Axes, Compose, Search, axes_of, plan_candidates
from llmx.sweep.tuned import MARKDOWN, beginning, candidate_table, conclusion, to_markdown

if TYPE_CHECKING:
    from hydra_plugins.llmx_deepspeed.launcher import TuneSweeper

    from llmx.sweep.sweep import Runner

TRIAL_STEPS, SPEED = 10, "tokens_per_s"
SIZES = ("batch.global_batch", "batch.tokens_per_step", "batch.accumulation")


def sweep(sweeper: TuneSweeper, arguments: Sequence[str]) -> None:
    """Search. Where no trial has ended well, the error of the first is raised."""
    fixed, typed = _sorted(sweeper, arguments)
    compose = partial(_composed, sweeper, fixed)
    planned = _given(compose, typed)
    exp = planned.experiment
    if exp.sweep.objective != SPEED:
        raise ConfigError(
            f"sweep.objective={exp.sweep.objective}: hydra/sweeper=tune searches for speed "
            f"(tokens_per_s). For a loss: python -m llmx tune objective={exp.sweep.objective}."
        )
    size = exp.batch.global_batch
    if size is not None and not typed.keys() & {"batch", "experiment", *SIZES}:
        # The default of the task follows the micro batch, which differs between candidates.
        fixed = [*fixed, f"batch.global_batch={size}"]
        compose = partial(_composed, sweeper, fixed)
    axes = axes_of(planned, typed, [word.partition("=")[0] for word in fixed])
    ram_gib = float(psutil.virtual_memory().total) / 2**30
    candidates = plan_candidates(axes, compose, ram_gib=ram_gib)
    for line in beginning(axes, candidates, planned):
        print(line, flush=True)
    if exp.dry_run:
        print(candidate_table(axes, candidates))
        print("Nothing was started (dry_run=true).", flush=True)
        return
    search = Search(candidates)
    with searching(sweeper) as runner:
        _run(runner, search, fixed, exp)
    directory = runner.sweep.directory
    write_text(directory / MARKDOWN, to_markdown(axes, search))
    for line in conclusion(search, load_sweep(directory)):
        print(line)
    sys.stdout.flush()
    check_any_ended_well(runner)


def _run(runner: Runner, search: Search, fixed: Sequence[str], exp: Experiment) -> None:
    """The trials, one at a time, until the search or its allowance is over."""
    limit, minutes = exp.sweep.max_trials, exp.sweep.max_minutes
    runner.may_fail = NO_MEMORY
    started, index = time.monotonic(), 0
    while not runner.ending and (step := search.next()) is not None:
        if limit is not None and index >= limit:
            search.limit, search.ended = "sweep.max_trials", f"sweep.max_trials={limit} was reached"
            break
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            search.limit = "sweep.max_minutes"
            search.ended = f"sweep.max_minutes={minutes:g} was reached"
            break
        candidate, why = step
        print(f"[{index}] {candidate.text}: {why}", flush=True)
        (trial,) = runner.run({index: [*fixed, *candidate.words]})
        if trial.outcome:
            search.trials[candidate] = trial
        error = runner.ends.get(index)
        if exp.sweep.fail_fast and error is not None and trial.outcome not in NO_MEMORY:
            raise error
        index += 1


def _sorted(
    sweeper: TuneSweeper, arguments: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """The words that all trials have, and the axes that were typed."""
    fixed, swept = fixed_and_swept(sweeper, arguments)
    axes = {key.lstrip("+"): [*word.sweep_string_iterator()] for key, word in swept.items()}
    for key in AUTO_KEYS:  # tune measures what auto predicts: the key is an axis
        if fixed.get(key) == f"{key}=auto":
            del fixed[key]
    fixed.setdefault("sweep.objective", f"sweep.objective={SPEED}")
    fixed.setdefault("sweep.trial_steps", f"sweep.trial_steps={TRIAL_STEPS}")
    return list(fixed.values()), axes


def _composed(
    sweeper: TuneSweeper, fixed: Sequence[str], words: Sequence[str]
) -> tuple[Experiment, list[str]]:
    """A completed experiment, by Hydra, as the trial will be composed."""
    values = trial_values(sweeper.hydra_context, sweeper.config, 0, [*fixed, *words])
    return complete(experiment_from_dict(values))


def _given(compose: Compose, typed: Axes) -> Composed:
    """The config as it was given, with the first values of the axes that can be planned."""
    first: LlmxError | None = None
    for values in itertools.product(*typed.values()):
        words = [f"{key}={value}" for key, value in zip(typed, values, strict=True)]
        try:
            return plan_experiment(*compose(words))
        except LlmxError as error:
            first = first or error
    assert first is not None
    raise first
