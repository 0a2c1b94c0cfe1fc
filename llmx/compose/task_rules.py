"""What a task of llmx cannot be trained with, said while the config is composed.

Only the task knows its options and what it needs, so its file is read. It imports torch where it
computes, not at its top, so that this stays quick. A task of the user's own is not imported here:
the ranks ask it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

from llmx.config.build import shown
from llmx.config.fields import MODEL_SOURCE
from llmx.config.schema import Experiment, TaskConfig
from llmx.config.tasks import TaskDefaults, shipped_tasks
from llmx.errors import ConfigError
from llmx.plan.types import SUMMED
from llmx.run.metrics.completions import declare
from llmx.run.metrics.declared import check_checkpoint_metric


def task_problems(exp: Experiment) -> list[str]:
    """One message for each value that the task does not take, and for each metric that it does not
    measure."""
    if exp.task.kind not in shipped_tasks():
        return []
    try:
        # By name: this process does not depend on what the ranks import.
        kind = importlib.import_module("llmx.tasks").task_class(exp.task.kind)
        typed_options = importlib.import_module("llmx.tasks.base").typed_options
    except ImportError:  # a launching machine without what the ranks have
        return []
    problems: list[str] = kind.config_problems(exp)
    try:
        typed_options(kind.Options, exp.task.options)
        task = kind(exp, None)
    except ConfigError as error:
        return problems + str(error).splitlines()
    return problems + list(_metric_problems(exp, task))


def _metric_problems(exp: Experiment, task: Any) -> Iterator[str]:
    """Of the metrics that are asked for, and of those that the best checkpoint and the end of
    training go by."""
    asked = exp.task.eval_metrics
    if asked and exp.task.eval_generate and not declare(asked).keys() <= task.metrics.keys():
        yield (
            f"task.eval_metrics={shown(asked)}: task {exp.task.kind} completes no prompts. Leave "
            "it out."
        )
    checkpoint, early = exp.checkpoint, exp.task.early_stopping
    wanted = {"checkpoint.metric": (checkpoint.metric, checkpoint.mode)}
    if early.patience is not None and early.metric not in (None, checkpoint.metric):
        wanted["task.early_stopping.metric"] = (str(early.metric), "auto")
    for key, (metric, mode) in wanted.items():
        try:
            check_checkpoint_metric(metric, mode, task.metrics, task=exp.task.kind, key=key)
        except ConfigError as error:
            yield str(error)


DEMO = "demo"
"""The experiment that is run where none is named."""


def task_warnings(exp: Experiment) -> tuple[str, ...]:
    """Of values that the task has no use for. The demo has completions for its own task; whoever
    trains another one on it has not asked for them."""
    asked = exp.task.eval_generate
    if not asked or exp.name == DEMO or exp.task.kind not in shipped_tasks():
        return ()
    try:
        kind = importlib.import_module("llmx.tasks").task_class(exp.task.kind)
        base = importlib.import_module("llmx.tasks.base").Task
    except ImportError:
        return ()
    if kind.eval_prompts is not base.eval_prompts:
        return ()
    return (
        f"task.eval_generate={asked} has no effect: task {exp.task.kind} completes no prompts. Set "
        "task.eval_generate=0.",
    )


def specs(exp: Experiment) -> dict[str, Any]:
    """The networks of a task of llmx by name (``llmx.models.spec``); of a task of the user's own
    none is known here."""
    if exp.task.kind not in shipped_tasks():
        return {}
    try:
        kind = importlib.import_module("llmx.tasks").task_class(exp.task.kind)
        found: dict[str, Any] = kind(exp, None).models()
    except ImportError:
        return {}
    return found


def defaults_of(kind: str) -> TaskDefaults:
    """The learning rates and the batch that a task declares; of a task of the user's own, those of
    any task."""
    if kind not in shipped_tasks():
        return TaskDefaults()
    try:
        declared: TaskDefaults = importlib.import_module("llmx.tasks").task_class(kind).defaults
    except ImportError:
        return TaskDefaults()
    return declared


def frozen_specs(exp: Experiment) -> dict[str, Any]:
    """Those that are not trained; without those that are the trained one with its adapter off,
    which take no memory."""
    if not (found := specs(exp)):
        return {}
    bases = importlib.import_module("llmx.models.spec").are_bases(found, exp.adapter, exp.model)
    return {name: spec for name, spec in found.items() if not spec.trained and name not in bases}


def loss_logits(exp: Experiment) -> str:
    """What the loss of the task asks of the output head (``Task.logits``); of a task of the user's
    own, cross entropy is assumed."""
    if exp.task.kind not in shipped_tasks():
        return SUMMED
    try:
        found: str = importlib.import_module("llmx.tasks").task_class(exp.task.kind).logits
    except ImportError:
        return SUMMED
    return found


def model_sources(task: TaskConfig) -> dict[str, str]:
    """Options that name a model (``llmx.config.fields.model_source``), and which: a directory or a
    Hub id. Of a task of the user's own none is known here."""
    if not task.options or task.kind not in shipped_tasks():
        return {}
    try:
        options = importlib.import_module("llmx.tasks").task_class(task.kind).Options
    except ImportError:
        return {}
    fields = () if options is None else dataclasses.fields(options)
    names = [field.name for field in fields if MODEL_SOURCE in field.metadata]
    given = {name: task.options.get(name) for name in names}
    return {name: value for name, value in given.items() if value and isinstance(value, str)}
