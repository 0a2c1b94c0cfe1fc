"""Successive halving (``sweep.halving``): all trials train a little, the better half continues.

All trials train to the first rung, ``sweep.halving`` steps. The better half continues from its
checkpoints to twice as many (``sweep.halving_factor``), and so on, until one is left or the next
rung would be the whole run. The last rung is the whole run. A trial keeps its directory, and its
learning rates are those of the whole run from the beginning, so the last one has trained as a
single run would have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmx.compose.words import Words
from llmx.config import Experiment, KeepConfig
from llmx.errors import ConfigError
from llmx.launch.spec import LaunchSpec
from llmx.lifecycle.resume.command import prepare_resume
from llmx.run import snapshot
from llmx.run.rundir import RunDir
from llmx.run.sweepdir import STOPPED, Sweep, Trial


class Halving:
    """The rungs of one sweep: where its trials are compared, and which of them continue."""

    def __init__(self, sweep: Sweep, first: int, factor: int) -> None:
        self.sweep, self.first, self.factor = sweep, first, factor
        self.rung = 0
        """The first is 0."""
        self.is_last = False
        """Whether the trials of this rung train to the end of their runs."""

    def step(self, rung: int) -> int:
        """The step at which a rung ends."""
        return self.first * int(self.factor**rung)

    def survivors(self, count: int) -> int:
        """The number of ``count`` trials that continue."""
        return max(1, math.ceil(count / self.factor))

    def count(self, trials: int, total: int | None) -> int:
        """The number of rungs for so many trials, the whole run included; ``total``: its steps."""
        rung = 0
        while trials > 1 and (total is None or self.step(rung) < total):
            trials = self.survivors(trials)
            rung += 1
        return rung + 1

    @property
    def total_rungs(self) -> int:
        """The number of rungs of this sweep, as far as it is known."""
        lengths = [trial.total_steps for trial in self.sweep.trials if trial.total_steps]
        rivals = sum(bool(trial.rungs) or not trial.outcome for trial in self.sweep.trials)
        return self.count(rivals, max(lengths, default=None))

    def has_passed(self, trial: Trial) -> bool:
        """Whether a trial has reached this rung in an earlier attempt at the sweep.

        Raises:
            ConfigError: the trials were compared at other steps.
        """
        if trial.outcome == STOPPED:
            return bool(trial.rungs)
        if len(trial.rungs) <= self.rung:
            return False
        steps = trial.rungs[self.rung][0]
        if len(trial.rungs) > self.rung + 1 and steps != self.step(self.rung):
            raise ConfigError(
                f"sweep.halving={self.first}, sweep.halving_factor={self.factor}: this sweep has "
                f"compared its trials at step {steps:g}. Leave them as they were, or start a new "
                "sweep (sweep.resume=false)."
            )
        return True

    def shortened(self, exp: Experiment) -> Experiment:
        """The experiment up to the end of this rung."""
        stop, total = self.step(self.rung), exp.task.steps
        if self.is_last or (total is not None and stop >= total):
            return exp
        return up_to(exp, stop, evaluates=self.sweep.objective.startswith("eval/"))

    def record(self, trial: Trial) -> list[Trial]:
        """Record what a trial measured at this rung.

        Returns the trials that stop now, because enough others are better: their checkpoints are
        not kept until the last trial has reached the rung.
        """
        value = trial.value(self.sweep.objective)
        trial.rungs = [*trial.rungs[: self.rung], [trial.steps, value]]
        if self.is_last or self._is_whole(self.step(self.rung)):
            return []
        num_rivals = sum(map(self._has_begun, self.sweep.trials))
        ranked = ranking(self._reached(), self.sweep.mode)
        losers = self.sweep.trials_of(ranked[self.survivors(num_rivals) :])
        return [loser for loser in losers if self._stop(loser)]

    def advance(self) -> tuple[list[Trial], list[Trial]]:
        """Begin the next rung: the trials that continue, and those that stop.

        Both are empty where everything is trained.
        """
        reached = self._reached()
        if self.is_last or not reached or self._is_whole(self.step(self.rung)):
            return [], []
        best = ranking(reached, self.sweep.mode)[: self.survivors(len(reached))]
        losers = self.sweep.trials_of(sorted(reached.keys() - set(best)))
        stopped = [loser for loser in losers if self._stop(loser)]
        self.rung += 1
        self.is_last = len(best) <= 1 or self._is_whole(self.step(self.rung))
        return self.sweep.trials_of(sorted(best)), stopped

    def _has_begun(self, trial: Trial) -> bool:
        """Whether a trial trains, or has trained, to this rung."""
        return len(trial.rungs) >= (self.rung + 1 if trial.outcome == STOPPED else self.rung)

    def _reached(self) -> dict[int, float | None]:
        """The value of each trial that has reached this rung."""
        trials = self.sweep.trials
        return {t.index: t.rungs[self.rung][1] for t in trials if len(t.rungs) > self.rung}

    def _is_whole(self, stop: int) -> bool:
        """Whether no trial that is left is longer than ``stop`` steps."""
        lengths = [
            trial.total_steps
            for trial in self.sweep.trials
            if trial.total_steps and len(trial.rungs) >= self.rung and trial.outcome != STOPPED
        ]
        return bool(lengths) and max(lengths) <= stop

    def _stop(self, trial: Trial) -> bool:
        """Stop a trial at this rung and remove its checkpoints; False where it has no part."""
        if trial.outcome == STOPPED or len(trial.rungs) != self.rung + 1:
            return False
        steps, value = trial.rungs[self.rung]
        trial.outcome = STOPPED
        trial.cause = f"at rung {self.rung + 1} of {self.total_rungs}, after {steps or 0:g} steps"
        if value is None or not math.isfinite(value):
            trial.cause += f", without a value of {self.sweep.objective}"
        shutil.rmtree(RunDir(trial.run_dir).checkpoints, ignore_errors=True)
        return True


def ranking(values: Mapping[int, float | None], mode: str) -> list[int]:
    """Trials that have a finite value, the best first; of equal ones the first."""
    sign = -1.0 if mode == "max" else 1.0
    finite = [(sign * v, i) for i, v in values.items() if v is not None and math.isfinite(v)]
    return [index for _, index in sorted(finite)]


def up_to(exp: Experiment, stop: int, *, evaluates: bool) -> Experiment:
    """The experiment up to a rung at step ``stop``; ``evaluates``: on held-out data there."""
    eval_every_steps = exp.task.eval_every_steps
    if evaluates and (not eval_every_steps or stop % eval_every_steps):
        eval_every_steps = stop
    limit = exp.task.stop_at_step
    task = dataclasses.replace(
        exp.task,
        stop_at_step=stop if limit is None else min(stop, limit),
        eval_every_steps=eval_every_steps,
        evaluate=exp.task.evaluate or evaluates,
        save_model=False,
    )
    checkpoint = dataclasses.replace(exp.checkpoint, at_end=True, keep=KeepConfig(last=1))
    return dataclasses.replace(exp, task=task, checkpoint=checkpoint)


def continued(former: Experiment, now: Experiment) -> Experiment:
    """A run that continues to its next rung. What was settled when it began stays
    (``data.layout``, say); what the rung and its slots change is taken over."""
    names = ("stop_at_step", "eval_every_steps", "evaluate", "save_model")
    task = dataclasses.replace(former.task, **{name: getattr(now.task, name) for name in names})
    groups = ("checkpoint", "hardware", "zero", "launch", "sweep")
    values: dict[str, Any] = {group: getattr(now, group) for group in groups}
    return dataclasses.replace(former, task=task, **values)


def prepare_rung(now: Experiment) -> LaunchSpec | None:
    """Prepare a run to continue from its newest checkpoint, to where ``now`` stops; None where
    nothing is left to train. What ``resume`` says goes to ``logs/console.log``."""
    run = RunDir(Path(now.run_dir))
    experiment = continued(snapshot.load(run), now)
    run.logs.mkdir(parents=True, exist_ok=True)
    with (
        run.console_log.open("a", encoding="utf-8") as stream,
        contextlib.redirect_stdout(stream),
    ):
        return prepare_resume(Words(bare=[str(run.root)]), edited=experiment)
