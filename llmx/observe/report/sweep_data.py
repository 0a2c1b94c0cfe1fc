"""What a sweep's trials measured, and along which keys they differ: for the table, the page and the
live view. Light: ``status`` and ``watch`` read sweeps with it, too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmx.errors import LlmxError
from llmx.observe.run import load_run, modified
from llmx.run.metrics.lines import step_of
from llmx.run.rundir import RunDir
from llmx.run.sweepdir import NOT_RUN, WAITING, Sweep, Trial, load

CSV = "sweep.csv"


def measure(trial: Trial, *, has_ended: bool = False) -> None:
    """Fill in what the run directory of a trial has measured; nothing where there is none.

    A trial whose end is not recorded has ended with the result of its run, if that is of this start
    and not of an earlier one. ``has_ended``: it is.
    """
    try:
        run = load_run(trial.run_dir)
    except LlmxError:
        return
    values, result = run.summary, run.result
    ended = result.get("ended") or 0.0
    if not trial.outcome and result and (has_ended or ended >= (trial.started or 0.0)):
        trial.outcome = str(result.get("outcome") or "")
        trial.cause, trial.fix = str(result.get("cause") or ""), str(result.get("fix") or "")
        trial.ended = trial.ended or ended
    trial.steps, trial.total_steps = values.get("steps"), values.get("total_steps")
    loss = run.last.get("loss_mean")
    trial.loss = loss if loss is not None else values.get("final_loss")
    trial.eval_loss = values.get("final_eval_loss")
    points = run.eval_points()
    trained = {name: [point for point in pairs if point[0] > 0] for name, pairs in points.items()}
    trial.metrics = {name: pairs[-1][1] if pairs else None for name, pairs in trained.items()}
    trial.trained = run.last
    trial.declared = run.declared
    trial.tokens_per_s = values.get("tokens_per_s")
    trial.memory_gib = values.get("memory_gib_max")
    if trial.memory_gib is None and run.config.get("dry_run"):
        trial.memory_gib = run.predicted_gib
    if trial.outcome:
        took = ended - (result.get("started") or 0.0)
        took = took if took > 0 else (trial.ended or 0.0) - (trial.started or 0.0)
        trial.seconds = took if took > 0 else None
    trial.curve = [(step_of(record), _loss(record)) for record in run.train]


def _loss(record: Mapping[str, Any]) -> float:
    mean, loss = record.get("loss_mean"), record.get("loss")
    value = mean if mean is not None else loss
    return math.nan if value is None else float(value)


class SweepReader:
    """Reads a sweep again and again; a trial that has ended is measured once."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.abspath(directory.expanduser()))
        self._measured: dict[int, tuple[Any, Trial]] = {}

    def read(self) -> Sweep:
        """The sweep as it is now; ConfigError where the directory is none."""
        sweep = load(self.directory)
        trials = {trial.index: self._with_numbers(trial) for trial in sweep.trials}
        numbers = ("steps", "loss", "eval_loss", "metrics", "trained", "declared", "tokens_per_s",
                   "memory_gib", "run_dir", "total_steps")  # fmt: skip
        for trial in trials.values():
            if trial.outcome == "same" and trial.same_as in trials:
                for name in numbers:
                    setattr(trial, name, getattr(trials[trial.same_as], name))
        sweep.trials = list(trials.values())
        return sweep

    def _with_numbers(self, trial: Trial) -> Trial:
        run = RunDir(trial.run_dir)
        if trial.state == WAITING or trial.outcome in NOT_RUN or not run.config.is_file():
            return trial
        stamp = (trial, modified(run.result), modified(run.metrics))
        if trial.index not in self._measured or self._measured[trial.index][0] != stamp:
            measured = replace(trial)
            measure(measured)
            self._measured[trial.index] = (stamp, measured)
        return self._measured[trial.index][1]


def load_sweep(directory: Path) -> Sweep:
    """A sweep with the numbers of its trials; ConfigError where the directory is none."""
    return SweepReader(directory).read()


def axes(trials: Sequence[Trial]) -> list[str]:
    """The keys that differ between trials, in the order of the command line."""
    values: dict[str, set[str]] = {}
    for trial in trials:
        for word in trial.overrides:
            key, _, value = word.partition("=")
            values.setdefault(key.lstrip("+"), set()).add(value)
    return [key for key, distinct in values.items() if len(distinct) > 1] or list(values)


def value_of(trial: Trial, axis: str) -> str | None:
    """The value of a trial on an axis as typed; None where it is not typed."""
    for word in reversed(trial.overrides):
        key, equal, typed = word.partition("=")
        if equal and key.lstrip("+") == axis:
            return typed
    return None
