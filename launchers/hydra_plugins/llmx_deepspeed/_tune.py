"""The work of ``hydra/sweeper=tune``: plan the candidates, run the trials that the search asks for
through the launcher, one at a time, and say what was found."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra_plugins.llmx_deepspeed._core import composed_trial, finish

from llmx.compose.complete import Composed, complete, plan_experiment
from llmx.config import Experiment
from llmx.errors import ConfigError, LlmxError
from llmx.plan.choices import AUTO_KEYS
from llmx.run.rundir import write_text
from llmx.sweep.candidates import USUAL, default_axes, in_order, own_place, plan_candidates
from llmx.sweep.journal import GOOD
from llmx.sweep.search import Axis, Measured, Search
from llmx.sweep.tuned import MARKDOWN, beginning, candidate_table, conclusion, to_markdown

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher
    from hydra_plugins.llmx_deepspeed.tune_sweeper import TuneSweeper

    from llmx.observe.report.sweep_table import Trial

TRIAL_STEPS, SPEED = 10, "tokens_per_s"
SIZES = ("batch.global_batch", "batch.tokens_per_step", "batch.accumulation")
MAY_FAIL = ("oom", "pruned")
"""Outcomes that tell the search how much fits, and are no failure of it."""


def sweep(sweeper: TuneSweeper, arguments: Sequence[str]) -> list[Sequence[JobReturn]]:
    """Search; returns the JobReturns of the trials. Where none has ended well, the error of the
    first is raised."""
    # By its name: Hydra loads plugins anew at each start, and their classes are others then.
    if type(sweeper.launcher).__name__ != "DeepSpeedLauncher":
        raise ConfigError(
            "hydra/sweeper=tune: works with hydra/launcher=deepspeed alone, whose trials tell "
            "speed and memory."
        )
    launcher = cast("DeepSpeedLauncher", sweeper.launcher)
    fixed, typed = _sorted(sweeper, arguments)
    compose = _Compose(sweeper, fixed)
    planned = _given(compose, typed)
    given = planned.experiment
    _check(given)
    size, varied = given.batch.global_batch, [axis.key for axis in typed]
    if size is not None and not {*varied} & {"batch", "experiment", *SIZES}:
        # The default of the task follows the micro batch, which differs between candidates.
        fixed = [*fixed, f"batch.global_batch={size}"]
        compose = _Compose(sweeper, fixed)
    chosen = [word.partition("=")[0] for word in fixed] + varied
    axes = [*(in_order(axis, compose) for axis in typed), *default_axes(planned, chosen)]
    axes.sort(key=lambda axis: USUAL.index(axis.key) if axis.key in USUAL else len(USUAL))
    found = plan_candidates(axes, compose, ram_gib=_ram_gib())
    if not typed:
        found = replace(found, own=own_place(axes, planned))
    for line in beginning(found, planned):
        print(line, flush=True)
    if given.dry_run:
        print(candidate_table(found))
        print("Nothing was started (dry_run=true).", flush=True)
        return []
    search = Search(axes, found.all, own=found.own)
    launcher.searches, launcher.may_fail = True, MAY_FAIL
    try:
        returns = _run(launcher, search, fixed, given)
    finally:
        finish(launcher)
    directory = Path(str(launcher.config.hydra.sweep.dir)).absolute() if launcher.config else None
    assert directory is not None
    write_text(directory / MARKDOWN, to_markdown(found, search))
    journal = launcher.sweep.journal if launcher.sweep else None
    for line in conclusion(search, launcher.trials, journal):
        print(line)
    sys.stdout.flush()
    if search.best is None:
        for returned in returns:
            for each in returned:
                _ = each.return_value  # raises the error of the trial
    return returns


def _run(
    launcher: DeepSpeedLauncher, search: Search, fixed: Sequence[str], given: Experiment
) -> list[Sequence[JobReturn]]:
    """The trials, one at a time, until the search or its allowance is over."""
    limit, minutes = given.sweep.max_trials, given.sweep.max_minutes
    started, returns = time.monotonic(), []
    index = 0
    while (step := search.next()) is not None:
        if limit is not None and index >= limit:
            search.limit, search.ended = "sweep.max_trials", f"sweep.max_trials={limit} was reached"
            break
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            search.limit = "sweep.max_minutes"
            search.ended = f"sweep.max_minutes={minutes:g} was reached"
            break
        print(f"[{index}] {step.candidate.text}: {step.why}", flush=True)
        returned = launcher.launch([[*fixed, *step.candidate.words]], initial_job_idx=index)
        returns.append(returned)
        if not returned:  # the sweep ends before it could start
            break
        trial = launcher.trials[-1]
        search.tell(step.candidate, _measured(trial, index))
        assert launcher.sweep is not None
        failed = trial.outcome not in (*GOOD, *MAY_FAIL)
        if launcher.sweep.stopped_by or (given.sweep.fail_fast and failed):
            for each in returned:
                _ = each.return_value
            break
        index += 1
    return returns


def _measured(trial: Trial, index: int) -> Measured:
    outcome = "oom" if trial.outcome in MAY_FAIL else trial.outcome
    return Measured(index, outcome, trial.tokens_per_s, trial.memory_gib)


def _sorted(sweeper: TuneSweeper, arguments: Sequence[str]) -> tuple[list[str], list[Axis]]:
    """The words that all trials have, and the axes that were typed."""
    assert sweeper.hydra_context is not None
    parser = OverridesParser.create(config_loader=sweeper.hydra_context.config_loader)
    fixed: dict[str, str] = {}
    axes = []
    for override in parser.parse_overrides(list(arguments)):
        key = override.get_key_element()
        if override.is_sweep_override():
            axes.append(Axis(key.lstrip("+"), tuple(override.sweep_string_iterator())))
        else:
            fixed[key] = f"{key}={override.get_value_element_as_str()}"
    for key in AUTO_KEYS:  # tune measures what auto predicts: the key is an axis
        if fixed.get(key) == f"{key}=auto":
            del fixed[key]
    fixed.setdefault("sweep.objective", f"sweep.objective={SPEED}")
    fixed.setdefault("sweep.trial_steps", f"sweep.trial_steps={TRIAL_STEPS}")
    return list(fixed.values()), axes


class _Compose:
    """Overrides -> a completed experiment, by Hydra, as the trial will be composed."""

    def __init__(self, sweeper: TuneSweeper, fixed: Sequence[str]) -> None:
        self._sweeper, self._fixed = sweeper, list(fixed)

    def __call__(self, words: Sequence[str]) -> tuple[Experiment, list[str]]:
        context, config = self._sweeper.hydra_context, self._sweeper.config
        assert context is not None
        assert config is not None
        run_dir = str(Path(str(config.hydra.sweep.dir)).absolute() / "candidate")
        words = [*self._fixed, *words]
        return complete(composed_trial(context, config, words, run_dir=run_dir))


def _given(compose: _Compose, typed: Sequence[Axis]) -> Composed:
    """The config as it was given, with the first values of the axes that can be planned."""
    first: LlmxError | None = None
    for values in itertools.product(*(axis.values for axis in typed)):
        words = [f"{axis.key}={value}" for axis, value in zip(typed, values, strict=True)]
        try:
            return plan_experiment(*compose(words))
        except LlmxError as error:
            first = first or error
    assert first is not None
    raise first


def _check(given: Experiment) -> None:
    """What a search for speed cannot have."""
    if given.sweep.objective != SPEED:
        raise ConfigError(
            f"sweep.objective={given.sweep.objective}: hydra/sweeper=tune searches for speed "
            f"(tokens_per_s). For a loss: python -m llmx tune objective={given.sweep.objective}."
        )


def _ram_gib() -> float:
    import psutil

    return float(psutil.virtual_memory().total) / 2**30
