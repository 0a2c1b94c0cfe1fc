"""The config a run goes on with: overrides applied, checked, completed, planned. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from llmx.compose.apply_overrides import RunCommand, apply, group_of
from llmx.compose.complete import Composed, plan_experiment
from llmx.compose.effects import check_effects
from llmx.compose.task_defaults import with_default_lr
from llmx.config import DataConfig, Experiment, TaskConfig, to_dict
from llmx.errors import ConfigError
from llmx.hardware.resolve import resolve_hardware
from llmx.lifecycle.resume.rules import Change, changes, refuse
from llmx.lifecycle.resume.run_state import RunState
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json
from llmx.train.schedule import lr_at, optim_of, run_length


@dataclass(frozen=True)
class Next:
    """How a run goes on."""

    former: Experiment
    composed: Composed
    changes: list[Change]
    words: tuple[str, ...]
    dry_run: bool
    total: int | None
    """Optimizer steps of the whole run; None where the number of samples is not known yet."""

    @property
    def last_step(self) -> int | None:
        """After which training ends."""
        stop = self.composed.experiment.task.stop_at_step
        return self.total if stop is None or self.total is None else min(stop, self.total)


def next_run(
    run: RunDir,
    exp: Experiment,
    words: RunCommand,
    state: RunState,
    *,
    asked: Experiment | None = None,
) -> Next:
    """Apply, check, complete, plan; ConfigError for all that may not be.

    ``asked``: the experiment to go on with, where it is known whole; else the words are applied.
    """
    for word in words.overrides:
        if group_of(word) in ("experiment", "model", "data"):
            raise ConfigError(
                f"{word}: a whole {group_of(word)} makes it another run. Start a new one; "
                "`python -m llmx resume --help` lists what may change."
            )
    exp = dataclasses.replace(exp, dry_run=False)
    if asked is None:
        asked = apply(exp, words.overrides, config_dirs=words.config_dirs)
    asked = dataclasses.replace(asked, name=exp.name or run.root.name)
    old_plan = plan_of(run, exp)
    found = changes(to_dict(exp), to_dict(asked))
    refuse([change for change in found if not _is_the_same_batch(change, old_plan)])
    keys = {change.key for change in found}
    new = _completed(run, exp, asked, keys, old_plan)
    check_effects(new, words.overrides, command="resume")
    composed = keep_choice(plan_experiment(new), old_plan, keys)
    new = composed.experiment
    _refuse_other_batch(old_plan, composed.plan)
    return Next(
        former=exp,
        composed=composed,
        changes=changes(to_dict(exp), to_dict(new)),
        words=words.overrides,
        dry_run=asked.dry_run,
        total=_total(new.data, new.task, composed.plan, state),
    )


def keep_choice(composed: Composed, former: Plan, keys: Iterable[str]) -> Composed:
    """With what the former plan chose (``auto``) and why, unless one of the changed ``keys`` is
    among what it chose or what it chose by."""
    among = ("zero.", "batch.", "hardware.", "model.activation_checkpointing")
    if composed.plan.chosen is not None or any(key.startswith(among) for key in keys):
        return composed
    plan = dataclasses.replace(composed.plan, chosen=former.chosen)
    return dataclasses.replace(composed, plan=plan)


def plan_of(run: RunDir, exp: Experiment) -> Plan:
    """``plan.json``; planned anew where it is missing, torn, or of a version with other fields."""
    try:
        return Plan.from_dict(read_json(run.plan))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return plan_experiment(exp).plan


def _is_the_same_batch(change: Change, plan: Plan) -> bool:
    """``batch.global_batch=N`` with the N it has had all along is no change of the run."""
    return change.key == "batch.global_batch" and change.new == plan.batch.global_batch


def _completed(
    run: RunDir, exp: Experiment, asked: Experiment, keys: set[str], plan: Plan
) -> Experiment:
    """As ``llmx.compose.complete.complete`` would, but only for what the user changed."""
    new = dataclasses.replace(asked, run_dir=str(run.root), dry_run=False)
    groups = {key.split(".", 1)[0] for key in keys}
    if "hardware" in groups:
        new = dataclasses.replace(new, hardware=resolve_hardware(new.hardware))
    new = with_same_batch(new, keys, plan)
    if new.zero.hpz_partition_size == 0:
        slots = new.hardware.hosts[0].slots
        zero = dataclasses.replace(new.zero, hpz_partition_size=slots)
        new = dataclasses.replace(new, zero=zero)
    task = new.task
    if "task.epochs" in keys and "task.steps" not in keys:
        task = dataclasses.replace(task, steps=None)
    elif task.steps is not None:
        task = dataclasses.replace(task, epochs=None)
    optim = new.optim
    if "optim.warmup_fraction" in keys and "optim.warmup_steps" not in keys:
        optim = dataclasses.replace(optim, warmup_steps=None)
    elif optim.warmup_steps is not None:
        optim = dataclasses.replace(optim, warmup_fraction=None)
    # A run that was stopped on the way and is made longer is not to stop there again.
    longer = {"task.steps", "task.epochs"} & keys and "task.stop_at_step" not in keys
    if longer and exp.task.stop_at_step is not None:
        task = dataclasses.replace(task, stop_at_step=None)
    return with_default_lr(dataclasses.replace(new, task=task, optim=optim))


def with_same_batch(exp: Experiment, keys: set[str], plan: Plan) -> Experiment:
    """With the global batch of ``plan``, where hardware or batch are among the changed ``keys``;
    the accumulation follows from it unless it is one of them."""
    if not any(key.startswith(("hardware.", "batch.")) for key in keys):
        return exp
    batch = dataclasses.replace(
        exp.batch,
        global_batch=plan.batch.global_batch,
        tokens_per_step=None,
        accumulation=exp.batch.accumulation if "batch.accumulation" in keys else None,
    )
    return dataclasses.replace(exp, batch=batch)


def _refuse_other_batch(old: Plan, new: Plan) -> None:
    if new.batch.global_batch != old.batch.global_batch:
        raise ConfigError(
            f"the global batch would be {new.batch.global_batch}, but it was "
            f"{old.batch.global_batch}: step k would no longer have the same samples. Choose "
            "batch.micro_batch and hardware so that it can stay."
        )


def _total(data: DataConfig, task: TaskConfig, plan: Plan, state: RunState) -> int | None:
    if task.steps is not None:
        return task.steps
    if state.num_samples is None:
        return None
    return run_length(
        task,
        num_samples=state.num_samples,
        global_batch=plan.batch.global_batch,
        last_batch=data.last_batch,
    ).steps


def schedule_note(upcoming: Next, state: RunState, origin: int) -> str:
    """How the learning rate of the next step changes with the length or the optimizer's values."""
    old, new = (
        optim_of(upcoming.former.optim, upcoming.former.adapter),
        optim_of(upcoming.composed.experiment.optim, upcoming.composed.experiment.adapter),
    )
    before, after = state.total_steps, upcoming.total
    if before is None or after is None or origin >= after:
        return ""
    was = lr_at(min(origin, before - 1), optim=old, total=before)
    will = lr_at(origin, optim=new, total=after)
    if was == will and before == after:
        return ""
    ends = "" if before == after else f"; it ends at step {after} instead of {before}"
    if was == will:
        return f"the learning rate of step {origin + 1} stays {will:.3g}{ends}"
    if origin >= before:
        return f"the learning rate goes from {was:.3g} (step {before}) to {will:.3g}{ends}"
    return f"the learning rate of step {origin + 1} is {will:.3g} instead of {was:.3g}{ends}"
