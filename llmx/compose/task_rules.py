"""Asks a task of llmx for its rules and its defaults while the config is composed.

Only the task knows its options and what it needs, so its file is read. It imports torch where it
computes, not at its top, so that this stays quick. A task of the user's own is not imported here:
the ranks ask it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmx.compose.overrides import SET
from llmx.config.build import shown
from llmx.config.fields import AUTO, MODEL_SOURCE
from llmx.config.model_rules import LANGUAGE_SECTION
from llmx.config.optimizers import optimizer_of
from llmx.config.schema import BatchConfig, Experiment, TaskConfig
from llmx.config.tasks import TaskDefaults, shipped_tasks
from llmx.errors import ConfigError
from llmx.plan.types import DrawnSamples
from llmx.run.metrics.completions import declare
from llmx.run.metrics.declared import check_checkpoint_metric


def task_class(task: TaskConfig) -> Any:
    """The class of a task of llmx; None for a task of the user's own, and on a launching machine
    without what the ranks have."""
    if task.kind not in shipped_tasks():
        return None
    try:
        # By name: this process does not depend on what the ranks import.
        return importlib.import_module("llmx.tasks").task_class(task.kind, task.options)
    except ImportError:
        return None


def generates(task: TaskConfig) -> bool | None:
    """Whether a task makes its samples (``llmx.tasks.OnlineTask``); None for a task of the user's
    own, of which it is not known here."""
    kind = task_class(task)
    return None if kind is None else hasattr(kind, "rollout")


def task_problems(exp: Experiment) -> list[str]:
    """One message for each value that the task does not take, and for each metric that it does not
    measure."""
    kind = task_class(exp.task)
    if kind is None:
        return []
    rollout_problems = _rollout_problems(exp, kind)
    try:
        task = kind(exp, None)
    except ConfigError as error:
        return [*rollout_problems, *str(error).splitlines()]
    return [*task.problems(), *rollout_problems, *_metric_problems(exp, task)]


def _rollout_problems(exp: Experiment, kind: Any) -> Iterator[str]:
    """Yield a message for rollout settings that the task has no use for."""
    rollout = exp.rollout
    if rollout.hosts and not generates(exp.task):
        yield (
            f"rollout.hosts={shown(rollout.hosts)}: task={exp.task.kind} generates no samples, so "
            "these hosts would have nothing to do. Leave rollout.hosts out: then they train."
        )
    elif rollout.vllm_python and not getattr(kind, "corrects_staleness", False):
        yield (
            f"rollout.vllm_python={shown(rollout.vllm_python)}: the loss of task={exp.task.kind} "
            "takes its samples for those of the trained weights, and vLLM's probabilities differ "
            "in their last digits. Leave rollout.vllm_python out."
        )
    elif rollout.max_staleness and not getattr(kind, "corrects_staleness", False):
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: the loss of task={exp.task.kind} "
            "takes its samples for those of the trained weights. Set rollout.max_staleness=0."
        )


def _metric_problems(exp: Experiment, task: Any) -> Iterator[str]:
    """Yield a message for each metric of ``task.eval_metrics``, evaluations, the best checkpoint,
    early stopping and a sweep that the task does not measure."""
    names = exp.task.eval_metrics
    if names and exp.task.eval_generate and not declare(names).keys() <= task.metrics.keys():
        yield (
            f"task.eval_metrics={shown(names)}: task {exp.task.kind} completes no prompts. Leave "
            "it out."
        )
    evaluates_loss, every = task.evaluates_loss, exp.task.eval_every_steps
    if every and not evaluates_loss and not any("eval" in m.kinds for m in task.metrics.values()):
        yield (
            f"task.eval_every_steps={every}: evaluations of task={exp.task.kind} measure the "
            "completions of held-out prompts alone. Set task.eval_generate=32, or leave it out."
        )
    checkpoint, early, objective = exp.checkpoint, exp.task.early_stopping, exp.sweep.objective
    best_by = task.judged_by if checkpoint.metric == "auto" else checkpoint.metric
    chosen = {"checkpoint.metric": (best_by, checkpoint.mode)}
    if early.patience is not None and early.metric not in (None, checkpoint.metric):
        chosen["task.early_stopping.metric"] = (str(early.metric), "auto")
    if objective not in (None, "tokens_per_s", checkpoint.metric):
        chosen["sweep.objective"] = (str(objective), "min")
    for key, (metric, mode) in chosen.items():
        try:
            check_checkpoint_metric(
                metric, mode, task.metrics, task=exp.task.kind, key=key,
                evaluates_loss=evaluates_loss,
            )  # fmt: skip
        except ConfigError as error:
            yield str(error)


DEMO = "demo"
"""The experiment that is run where none is named."""


def drawn_samples(exp: Experiment) -> DrawnSamples | None:
    """What the task generates in a step; None where it reads its samples, and for a task of the
    user's own."""
    if not generates(exp.task):
        return None
    options = task_class(exp.task)(exp, None).options
    turns = options.max_turns if getattr(options, "environment", None) else 1
    return DrawnSamples(
        group_size=getattr(options, "group_size", 1),
        new_tokens=min(options.max_new_tokens * turns, max(1, exp.data.seq_len - 1)),
        updates=getattr(options, "updates", 1),
    )


def task_warnings(exp: Experiment) -> tuple[str, ...]:
    """Warnings for values that the task does not use, and for what the plan does not predict. The
    demo sets completions for its own task, so another task on it gets no warning."""
    num_prompts = exp.task.eval_generate
    kind = task_class(exp.task)
    if kind is None:
        return ()
    base = importlib.import_module("llmx.tasks.base").Task
    warnings = []
    if generates(exp.task):
        warnings.append(
            f"task={exp.task.kind} generates its samples. The plan counts completions of full "
            "length. Measure with task.stop_at_step=5."
        )
    completes = kind.completes or kind.eval_prompts is not base.eval_prompts
    if num_prompts and exp.name != DEMO and not completes:
        warnings.append(
            f"task.eval_generate={num_prompts} has no effect: task {exp.task.kind} completes no "
            "prompts. Set task.eval_generate=0."
        )
    return tuple(warnings)


def training_notes(exp: Experiment) -> list[str]:
    """What is trained otherwise than the model's config says, or in part: shown by a plan and at
    the start."""
    notes, network = [], exp.model.network
    if LANGUAGE_SECTION in network:
        name = next(iter(network.get("architectures") or ()), exp.model.architecture)
        notes.append(
            f"{name} is a multi-modal model: its language model is trained. Its other parts (for "
            "images, audio) are frozen, and exported unchanged."
        )
    rates = ", ".join(
        f"{key}={shown(rate)}"
        for key, rate in network.items()
        if "drop" in key and isinstance(rate, float) and rate > 0 and "summary" not in key
    )
    if rates and any(spec.trained and not spec.dropout for spec in specs(exp).values()):
        notes.append(
            f"task={exp.task.kind} trains without dropout: {rates} of the model's config is set "
            "to 0."
        )
    return notes


def specs(exp: Experiment) -> dict[str, Any]:
    """The networks of a task of llmx by name (``llmx.models.spec``); of a task of the user's own
    none is known here."""
    kind = task_class(exp.task)
    return {} if kind is None else dict(kind(exp, None).models())


def defaults_of(kind: str) -> TaskDefaults:
    """The learning rates and the batch that a task declares; of a task of the user's own, those of
    any task."""
    declared: TaskDefaults = getattr(task_class(TaskConfig(kind=kind)), "defaults", TaskDefaults())
    return declared


def specs_beside(exp: Experiment) -> dict[str, Any]:
    """The networks beside the one that is exported, without those that are that one with its
    adapter off: these take no memory."""
    if not (networks := specs(exp)):
        return {}
    bases = importlib.import_module("llmx.models.spec").are_bases(networks, exp.adapter, exp.model)
    main = next(name for name, spec in networks.items() if spec.trained)
    return {name: spec for name, spec in networks.items() if name != main and name not in bases}


def model_sources(task: TaskConfig) -> dict[str, str]:
    """Options that name a model (``llmx.config.fields.model_source``), and which: a directory or a
    Hub id. Of a task of the user's own none is known here."""
    options = getattr(task_class(task), "Options", None) if task.options else None
    fields = () if options is None else dataclasses.fields(options)
    sources = {
        field.name: task.options.get(field.name)
        for field in fields
        if MODEL_SOURCE in field.metadata
    }
    return {name: value for name, value in sources.items() if value and isinstance(value, str)}


def default_lr(exp: Experiment, *, adapter: bool) -> float:
    """The peak learning rate of the weights, or of an ``adapter`` beside them."""
    row, optimizer = defaults_of(exp.task.kind), optimizer_of(exp.optim.kind)
    rate = row.scratch if exp.model.init == "scratch" else row.full
    return optimizer.lr or (row.adapter if adapter else rate) * optimizer.lr_factor


def default_batch(exp: Experiment) -> int | None:
    """The task's usual samples of a step, rounded to a multiple of those that the ranks take at
    once. None from scratch, where the task has no usual number: then a step is one micro step of
    all ranks."""
    row = defaults_of(exp.task.kind)
    samples = row.scratch_batch if exp.model.init == "scratch" else row.batch
    if samples is None:
        return None
    at_once = sum(host.slots for host in exp.hardware.hosts) or 1
    if exp.batch.micro_batch != AUTO:
        at_once *= exp.batch.micro_batch
    return at_once * max(1, round(samples / at_once))


def with_task_defaults(exp: Experiment) -> Experiment:
    """Fill in ``optim.lr``, ``data.packing``, ``checkpoint.metric`` and options of the task where
    they are auto, and the size of a step where nothing sets it."""
    exp = with_chosen_packing(exp)
    kind = task_class(exp.task)
    if kind is not None and (chosen := kind.auto_options(exp)):
        options = {**exp.task.options, **chosen}
        exp = replace(exp, task=replace(exp.task, options=options))
    if kind is not None and exp.checkpoint.metric == "auto":
        with contextlib.suppress(ConfigError):  # of options, which task_problems reports
            metric = kind(exp, None).judged_by
            exp = replace(exp, checkpoint=replace(exp.checkpoint, metric=metric))
    batch = exp.batch
    is_open = batch.global_batch is None and batch.tokens_per_step is None
    if is_open and batch.accumulation is None:
        exp = replace(exp, batch=replace(batch, global_batch=default_batch(exp)))
    return with_default_lr(exp)


def with_chosen_packing(exp: Experiment) -> Experiment:
    """Choose ``data.packing`` by the task where it is auto."""
    if exp.data.packing != "auto":
        return exp
    packing = "none" if generates(exp.task) else "best_fit"
    return replace(exp, data=replace(exp.data, packing=packing))


def with_default_lr(exp: Experiment) -> Experiment:
    """Fill in ``optim.lr`` where it is auto. Only then an adapter gets a rate of its own: a number
    that was set holds for all trained parameters."""
    if exp.optim.lr != AUTO:
        return exp
    adapter = exp.adapter
    if adapter.kind != "none" and adapter.lr is None:
        adapter = replace(adapter, lr=default_lr(exp, adapter=True))
    optim = replace(exp.optim, lr=default_lr(exp, adapter=False))
    return replace(exp, optim=optim, adapter=adapter)


def rollout_line(exp: Experiment) -> str:
    """How the samples of a task that generates them are made; empty for any other task."""
    if not generates(exp.task):
        return ""
    tokens = exp.task.options.get("max_new_tokens")
    at_most = f"; at most {tokens} new tokens (task.options.max_new_tokens)" if tokens else ""
    return f"one prompt per sample (data.packing={exp.data.packing}){at_most}"


def origin_of_lr(exp: Experiment, overrides: Sequence[str]) -> str:
    """The setting that determined the peak learning rate of a completed experiment: the word that
    was typed, the default of its task, or the option that was chosen."""
    has_own = exp.adapter.kind != "none" and exp.adapter.lr is not None
    typed = _typed(("adapter.lr", "optim.lr") if has_own else ("optim.lr",), overrides)
    if typed and not typed.endswith("=auto"):
        return typed
    rate = exp.adapter.lr if has_own else exp.optim.lr
    if rate == default_lr(exp, adapter=has_own):
        return f"default of task={exp.task.kind}, {'adapter' if has_own else _weights(exp)}"
    return _option("optim", overrides)


def origin_of_batch(exp: Experiment, overrides: Sequence[str]) -> str:
    """The settings that determined the samples of a step and the micro batch of a completed
    experiment."""
    batch, option = exp.batch, _option("batch", overrides)
    micro_batch = _typed(("batch.micro_batch",), overrides)
    if micro_batch.endswith("=auto"):
        micro_batch = "chosen by the plan"
        exp = replace(exp, batch=replace(batch, micro_batch=AUTO))
    elif not micro_batch:
        micro_batch = "default" if batch.micro_batch == BatchConfig.micro_batch else option
    sizes = (batch.global_batch, batch.tokens_per_step, batch.accumulation)
    step = _typed(("batch.global_batch", "batch.tokens_per_step", "batch.accumulation"), overrides)
    if not step and sizes == (None, None, None):
        step = "one micro step of all ranks, since batch.global_batch is not set"
    elif not step and sizes == (default_batch(exp), None, None):
        step = f"default of task={exp.task.kind}, {_weights(exp)}"
    return f"{step or option}; micro batch: {micro_batch}"


def _typed(keys: Sequence[str], overrides: Sequence[str]) -> str:
    """The last override of the first of these keys that has one."""
    for key in keys:
        words = [word for word in overrides if word.lstrip("+").startswith(f"{key}=")]
        if words:
            origin = "saved" if words[-1].startswith(SET) else "typed"
            return f"{origin}: {words[-1].removeprefix(SET)}"
    return ""


def _option(group: str, overrides: Sequence[str]) -> str:
    """The option of ``group``, or the experiment, that was chosen last."""
    chosen = [word for word in overrides if word.startswith((f"{group}=", "experiment="))]
    return f"set by {chosen[-1]}" if chosen else "set by the config"


def _weights(exp: Experiment) -> str:
    return "from scratch" if exp.model.init == "scratch" else "pretrained"
