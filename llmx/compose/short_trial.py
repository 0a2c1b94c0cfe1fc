"""Short trials: ``sweep.trial_steps=20`` measures speed, memory and loss, and little else."""

from __future__ import annotations

from dataclasses import replace

from llmx.config import EarlyStoppingConfig, Experiment, KeepConfig, SweepConfig

LINES = 4
"""Lines of ``metrics.jsonl`` after the first: the median of their speeds is the trial's."""


def objective_of(sweep: SweepConfig, metric: str) -> str:
    """What the best trial is best at. ``metric``: ``checkpoint.metric``."""
    if sweep.objective is not None:
        return sweep.objective
    return "tokens_per_s" if sweep.trial_steps is not None else metric


def shortened(exp: Experiment) -> Experiment:
    """The experiment as a short trial trains it; unchanged without ``sweep.trial_steps``.

    The same steps as the whole run has at its beginning: ``task.steps``, and with it the learning
    rates, stay. Shortening twice changes nothing more.
    """
    steps = exp.sweep.trial_steps
    if steps is None:
        return exp
    evaluates = objective_of(exp.sweep, exp.checkpoint.metric).startswith("eval/")
    task = replace(
        exp.task,
        stop_at_step=min(steps, exp.task.stop_at_step or steps),
        log_every_steps=max(1, min(exp.task.log_every_steps, steps // LINES)),
        evaluate=evaluates,
        eval_every_steps=steps if evaluates else 0,
        eval_generate=exp.task.eval_generate if evaluates else 0,
        save_model=False,
        early_stopping=EarlyStoppingConfig(),
    )
    checkpoint = replace(
        exp.checkpoint,
        every_steps=None,
        every_minutes=None,
        at_end=False,
        on_signal=False,
        keep=KeepConfig(),
    )
    # Without a checkpoint a restart begins anew, and what failed once mostly fails again.
    return replace(
        exp, task=task, checkpoint=checkpoint, launch=replace(exp.launch, max_restarts=0)
    )
