"""Successive halving (``sweep.halving``): all trials train a little, the better half goes on. Pure.

All trials train to the first rung, ``sweep.halving`` steps; the better half goes on from its
checkpoints to twice as many (``sweep.halving_factor``), and so on, until one is left, or the next
rung would be the whole run. The last rung is the whole run. A trial keeps its directory, and its
learning rates are those of the whole run all along: what is left has trained as if nothing had
been compared on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmx.config import Experiment, KeepConfig


@dataclass(frozen=True)
class Rungs:
    """Where trials are compared."""

    first: int
    factor: int

    def stop(self, rung: int) -> int:
        """The step at which a rung ends; the first rung is 0."""
        return self.first * int(self.factor**rung)

    def keep(self, trials: int) -> int:
        """How many of so many go on."""
        return max(1, -(-trials // self.factor))

    def count(self, trials: int, total: int | None) -> int:
        """Of so many trials, the whole run included; ``total``: its steps."""
        rung = 0
        while trials > 1 and (total is None or self.stop(rung) < total):
            trials = self.keep(trials)
            rung += 1
        return rung + 1


def better(values: Mapping[int, float | None], mode: str) -> list[int]:
    """Trials that have a finite value, the best first; of equal ones the first."""
    sign = -1.0 if mode == "max" else 1.0
    known = [(sign * v, i) for i, v in values.items() if v is not None and math.isfinite(v)]
    return [index for _, index in sorted(known)]


def at_rung(exp: Experiment, stop: int | None, *, measures: bool) -> Experiment:
    """The experiment up to a rung; None: the whole run, which is the experiment itself.

    ``measures``: held-out data is measured at the rung.
    """
    if stop is None:
        return exp
    every = exp.task.eval_every_steps
    if measures and (not every or stop % every):
        every = stop
    limit = exp.task.stop_at_step
    task = dataclasses.replace(
        exp.task,
        stop_at_step=stop if limit is None else min(stop, limit),
        eval_every_steps=every,
        evaluate=exp.task.evaluate or measures,
        save_model=False,
    )
    checkpoint = dataclasses.replace(exp.checkpoint, at_end=True, keep=KeepConfig(last=1))
    return dataclasses.replace(exp, task=task, checkpoint=checkpoint)


def continued(former: Experiment, now: Experiment) -> Experiment:
    """A run that goes on to its next rung: what was found out when it began stays (``data.layout``,
    say), what the rung and its slots change is taken over."""
    task = dataclasses.replace(
        former.task,
        stop_at_step=now.task.stop_at_step,
        eval_every_steps=now.task.eval_every_steps,
        evaluate=now.task.evaluate,
        save_model=now.task.save_model,
    )
    return dataclasses.replace(
        former,
        task=task,
        checkpoint=now.checkpoint,
        hardware=now.hardware,
        zero=now.zero,
        launch=now.launch,
        sweep=now.sweep,
    )
