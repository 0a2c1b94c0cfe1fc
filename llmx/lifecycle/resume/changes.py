"""Decides which keys may change when a run is resumed, and what a change does to the numbers.

Also edits of ``config.yaml`` by hand, which are changes that nobody has typed.
"""

# ruff: noqa: E501 - a rule is a row
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from llmx.compose.apply_overrides import apply, group_of
from llmx.compose.complete import (
    Composed,
    plan_experiment,
    with_implied_values,
    with_moved_paths,
)
from llmx.compose.effects import check_effects
from llmx.compose.task_rules import with_default_lr
from llmx.compose.words import Words
from llmx.config import DataConfig, Experiment, TaskConfig, to_dict
from llmx.config.rollout_rules import with_rollout_hosts
from llmx.errors import ConfigError
from llmx.hardware.resolve import resolve_hardware
from llmx.lifecycle.resume.run_state import RunState
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.provenance.differences import (
    BREAKS,
    HARMLESS,
    MAY,
    Difference,
    changed_values,
    short_value,
)
from llmx.run.rundir import RunDir, read_json, read_mapping
from llmx.train.schedule import lr_at, optim_of, run_length

SAME = "same numbers"
ROUNDING = "equal within rounding"
OTHER = "trains differently from here on"
REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """Keys, and how a change of them affects the numbers or why it is refused."""

    keys: tuple[str, ...]
    effect: str
    why: str


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the snapshot."""

    key: str
    old: Any
    new: Any
    rule: Rule

    @property
    def values(self) -> str:
        """The change as ``1 -> 2``."""
        return f"{short_value(self.old)} -> {short_value(self.new)}"


_OTHER_SAMPLES = "they determine the samples of a step"
_OTHER_MODEL = "the checkpoint contains the weights of that network"

PLACES = (
    "data.path", "data.sources.*.path", "data.eval_path", "model.path", "model.tokenizer",
)  # fmt: skip
"""May change where the content is the same, e.g. on another machine."""

# fmt: off
RULES = (
    Rule(("launch.*",), SAME, "how the ranks are started and monitored"),
    Rule(("tracking.*",), SAME, "where metrics are sent"),
    Rule(("checkpoint.*",), SAME, "when the state is saved and which checkpoints are kept"),
    Rule(("hardware.*",), ROUNDING, "any hosts and devices; the global batch stays the same"),
    Rule(("batch.micro_batch", "batch.accumulation", "batch.balance", "batch.weights", "batch.rebalance"), ROUNDING, "how the same global batch is split"),
    Rule(("zero.*",), ROUNDING, "a checkpoint loads at every ZeRO stage and offload"),
    Rule(("model.attention", "model.activation_checkpointing"), ROUNDING, "the same network, computed differently"),
    Rule(("model.fused_loss", "model.compile", "model.liger_kernel"), ROUNDING, "other kernels"),
    Rule(("task.log_every_steps", "task.evaluate", "task.eval_every_steps"), SAME, "what is reported"),
    Rule(("task.eval_generate", "task.eval_max_new_tokens", "task.eval_metrics"), SAME, "what is reported"),
    Rule(("rollout.hosts", "rollout.servers", "rollout.servers.*", "rollout.port", "rollout.wait_s"), ROUNDING, "who draws the samples"),
    Rule(("rollout.vllm_python", "rollout.max_staleness", "rollout.importance", "rollout.importance_cap"), OTHER, "what draws samples, and how they are weighted"),
    Rule(("task.save_model", "task.stop_at_step"), SAME, "what happens at the end"),
    Rule(("task.early_stopping.*",), SAME, "when training ends"),
    Rule(("task.on_divergence", "task.spike_factor"), SAME, "what happens when it diverges"),
    Rule(("task.max_lost",), SAME, "when the run ends"),
    Rule(("task.steps", "task.epochs"), OTHER, "a longer or shorter run; its schedule follows"),
    Rule(("precision",), OTHER, "the master weights stay; the arithmetic changes"),
    Rule(("deterministic",), ROUNDING, "other kernels"),
    Rule(("optim.kind",), REFUSED, "the checkpoint contains the states of that optimizer"),
    Rule(("optim.*",), OTHER, "read again at each step"),
    Rule(("data.cache_dir", "data.num_workers"), SAME, "where and how the same samples are prepared"),
    Rule(PLACES, SAME, "where the content is stored, which is compared"),
    Rule(("data.seq_len",), REFUSED, "a different length gives different samples"),
    Rule(("data.layout", "data.pad_to_multiple_of"), ROUNDING, "the same rows in other batches"),
    Rule(("data.*",), REFUSED, _OTHER_SAMPLES),
    Rule(("seed",), REFUSED, "it determines the order of the samples"),
    Rule(("batch.global_batch", "batch.tokens_per_step"), REFUSED, "a step would have different samples"),
    Rule(("adapter.lr",), OTHER, "read again at each step"),
    Rule(("adapter.*",), REFUSED, "the checkpoint contains that adapter"),
    Rule(("model.*",), REFUSED, _OTHER_MODEL),
    Rule(("task.kind",), REFUSED, "a different task is a different run"),
    Rule(("task.options", "task.options.*"), REFUSED, "they determine the task's samples and loss"),
    Rule(("task.code_path",), SAME, "where the task's code is stored; the code is compared"),
    Rule(("sweep.*",), SAME, "how a sweep runs its trials"),
    Rule(("tokenizer.*",), REFUSED, "used only by the tokenizer command"),
    Rule(("name",), SAME, "the name of the run"),
    Rule(("run_dir",), SAME, "a run is resumed where its directory is"),
    Rule(("dry_run",), SAME, "dry_run=true shows what would be done"),
    Rule(("schema_version",), REFUSED, "the version of the snapshot's format"),
)
# fmt: on


def rule_of(key: str) -> Rule:
    """The row that decides on a dotted key."""
    for rule in RULES:
        if any(fnmatchcase(key, pattern) for pattern in rule.keys):
            return rule
    return Rule((key,), REFUSED, "its effect on the numbers is unknown")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys whose values differ, in the order of the schema."""
    values = changed_values(old, new)
    before, after = values.get("data.sources", ((), ()))
    if before and len(before) == len(after or ()):  # by source: its path may change
        del values["data.sources"]
        for index, (source, new_source) in enumerate(zip(before, after, strict=True)):
            values |= {
                f"data.sources.{index}.{key}": (source.get(key), new_source.get(key))
                for key in {**source, **new_source}
                if source.get(key) != new_source.get(key)
            }
    return [Change(key, before, after, rule_of(key)) for key, (before, after) in values.items()]


def refuse(edits: list[Change]) -> None:
    """Raise ConfigError with every change that is not allowed, and why."""
    refused = [change for change in edits if change.rule.effect == REFUSED]
    if refused:
        lines = [
            f"{change.key}: cannot change {change.values}: {change.rule.why}." for change in refused
        ]
        raise ConfigError(
            "\n".join(lines) + "\nStart a new run with the new value. `python -m llmx resume "
            "--help` lists the keys that may change."
        )


def refuse_other_content(
    edits: list[Change], then: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise ConfigError where an input has a new path and different content.

    ``then``, ``now``: the provenances with their fingerprints.
    """
    prints = {
        "data.path": ("data",),
        "data.eval_path": ("eval_data",),
        "model.path": ("model", "tokenizer"),
        "model.tokenizer": ("tokenizer",),
    }
    for change in edits:
        is_source = change.key.startswith("data.sources.")
        for name in prints["data.path"] if is_source else prints.get(change.key, ()):
            old = (then.get("fingerprints") or {}).get(name)
            new = (now.get("fingerprints") or {}).get(name)
            if old is None and new is None and change.key == "model.path":
                continue
            if old is None or new is None or old["digest"] != new["digest"]:
                why = (
                    "its content was not recorded" if old is None
                    else "it is not on this machine" if new is None
                    else f"its content differs ({new['digest'][:12]}, was {old['digest'][:12]})"
                )  # fmt: skip
                raise ConfigError(
                    f"{change.key}: cannot change {change.values}: {why}. A resumed run needs the "
                    "inputs with which it was started."
                )


def table() -> str:
    """The rules as text: allowed ones by their effect, then the refused ones."""
    lines = []
    for effect in (SAME, ROUNDING, OTHER, REFUSED):
        lines.append(
            f"{effect}:" if effect != REFUSED else "refused, since it would be a different run:"
        )
        for rule in RULES:
            if rule.effect == effect and "run_dir" not in rule.keys:
                keys = ", ".join(rule.keys)
                gap = " " if len(keys) < 44 else f"\n{'':<46}"
                lines.append(f"  {keys:<43}{gap}{rule.why}")
        lines.append("")
    return "\n".join(lines)


@dataclass(frozen=True)
class Next:
    """The run that follows: its experiment and plan, and the changes."""

    former: Experiment
    composed: Composed
    changes: list[Change]
    words: tuple[str, ...]
    dry_run: bool
    total: int | None
    """Optimizer steps of the whole run; None where the number of samples is not known yet."""

    @property
    def last_step(self) -> int | None:
        """The step after which training ends."""
        stop = self.composed.experiment.task.stop_at_step
        return self.total if stop is None or self.total is None else min(stop, self.total)


def next_run(
    run: RunDir,
    exp: Experiment,
    words: Words,
    state: RunState,
    *,
    edited: Experiment | None = None,
) -> Next:
    """Apply, check, complete, plan; ConfigError for all that may not be.

    ``edited``: the experiment to go on with, where it is known whole; else the words are applied.
    """
    for word in words.overrides:
        if group_of(word) in ("experiment", "model", "data"):
            raise ConfigError(
                f"{word}: a whole {group_of(word)} makes it another run. Start a new one; "
                "`python -m llmx resume --help` lists what may change."
            )
    exp = dataclasses.replace(exp, dry_run=False)
    if edited is None:
        edited = apply(exp, words.overrides, config_dirs=words.config_dirs)
    edited = dataclasses.replace(edited, name=exp.name or run.root.name)
    old_plan = plan_of(run, exp)
    edits = changes(to_dict(exp), to_dict(edited))
    # batch.global_batch=N with the N that it has had all along is no change of the run.
    same_batch = ("batch.global_batch", old_plan.batch.global_batch)
    refuse([change for change in edits if (change.key, change.new) != same_batch])
    keys = {change.key for change in edits}
    new = _completed(run, exp, edited, keys, old_plan)
    check_effects(new, words.overrides, command="resume")
    composed = keep_choice(plan_experiment(new), old_plan, keys)
    new = composed.experiment
    batch, old_batch = composed.plan.batch.global_batch, old_plan.batch.global_batch
    if batch != old_batch:
        raise ConfigError(
            f"the global batch would be {batch}, but it was {old_batch}: step k would no longer "
            "have the same samples. Choose batch.micro_batch and hardware so that it can stay."
        )
    return Next(
        former=exp,
        composed=composed,
        changes=changes(to_dict(exp), to_dict(new)),
        words=tuple(words.overrides),
        dry_run=edited.dry_run or words.flag("dry_run"),
        total=_total(new.data, new.task, composed.plan, state),
    )


def keep_choice(composed: Composed, former: Plan, keys: Iterable[str]) -> Composed:
    """Keep the former plan's choice (``auto``) and its reason, unless one of the changed ``keys``
    was chosen by it or went into it."""
    among = ("zero.", "batch.", "hardware.", "rollout.hosts", "model.activation_checkpointing")
    plan = composed.plan
    if plan.chosen or any(key.startswith(among) for key in keys):
        return composed
    plan = dataclasses.replace(plan, chosen=former.chosen)
    return dataclasses.replace(composed, plan=plan)


def plan_of(run: RunDir, exp: Experiment) -> Plan:
    """Read ``plan.json``; plan again if it is missing, torn, or of a version with other fields."""
    try:
        return Plan.from_dict(read_json(run.plan))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return plan_experiment(exp).plan


def _completed(
    run: RunDir, exp: Experiment, edited: Experiment, keys: set[str], plan: Plan
) -> Experiment:
    """Complete the changed keys as ``llmx.compose.complete.complete`` would."""
    new = dataclasses.replace(edited, run_dir=str(run.root), dry_run=False)
    groups = {key.split(".", 1)[0] for key in keys}
    if "hardware" in groups or "rollout.hosts" in keys:
        hardware, rollout = with_rollout_hosts(resolve_hardware(new.hardware), new.rollout)
        new = dataclasses.replace(new, hardware=hardware, rollout=rollout)
    new = with_same_batch(with_moved_paths(new, exp), keys, plan)
    task, optim = new.task, new.optim
    if "task.epochs" in keys and "task.steps" not in keys:
        task = dataclasses.replace(task, steps=None)
    if "optim.warmup_fraction" in keys and "optim.warmup_steps" not in keys:
        optim = dataclasses.replace(optim, warmup_steps=None)
    # A run that was stopped on the way and is made longer is not to stop there again.
    longer = {"task.steps", "task.epochs"} & keys and "task.stop_at_step" not in keys
    if longer and exp.task.stop_at_step is not None:
        task = dataclasses.replace(task, stop_at_step=None)
    return with_default_lr(with_implied_values(dataclasses.replace(new, task=task, optim=optim)))


def with_same_batch(exp: Experiment, keys: set[str], plan: Plan) -> Experiment:
    """Keep the global batch of ``plan`` if hardware or batch are among the changed ``keys``; the
    accumulation follows from it unless it is one of them."""
    if not any(key.startswith(("hardware.", "batch.", "rollout.hosts")) for key in keys):
        return exp
    batch = dataclasses.replace(
        exp.batch,
        global_batch=plan.batch.global_batch,
        tokens_per_step=None,
        accumulation=exp.batch.accumulation if "batch.accumulation" in keys else None,
    )
    return dataclasses.replace(exp, batch=batch)


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
    """A line on the learning rate of the next step, if the length or the optimizer's values change
    it."""
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


SEVERITY = {SAME: HARMLESS, ROUNDING: MAY}
"""What an edit does to the numbers, by the rule of its key; all else breaks bitwise equality."""


def edited_config(run: RunDir, then: Mapping[str, Any]) -> list[Difference]:
    """A row for each key that was edited by hand; one for the file where they are not known.

    ``then``: the provenance of the run. Nothing where it has no hash of the config:
    ``not_recorded`` says so.
    """
    recorded = then.get("config")
    now = read_mapping(run.config)
    if not recorded or not now or snapshot.hash_of(now) == recorded:
        return []
    for path in sorted(run.checkpoints.glob("step-*/config.yaml"), reverse=True):
        former = read_mapping(path)
        if former and snapshot.hash_of(former) == recorded:
            return [
                Difference(
                    SEVERITY.get(change.rule.effect, BREAKS),
                    f"config.yaml was edited: {change.key}",
                    short_value(change.old),
                    short_value(change.new),
                    f"{path.relative_to(run.root)} has it as it was",
                )
                for change in changes(former, now)
            ]
    return [
        Difference(
            BREAKS, "config.yaml was edited by hand", str(recorded)[:12],
            snapshot.hash_of(now)[:12], "no copy of the recorded one is left to compare it with",
        )
    ]  # fmt: skip
