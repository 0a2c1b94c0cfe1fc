"""What a task of llmx cannot be trained with, said while the config is composed.

Only the task knows its options and what it needs, so its file is read. It imports torch where it
computes, not at its top, so that this stays quick. A task of the user's own is not imported here:
the ranks ask it.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from llmx.config.fields import MODEL_SOURCE
from llmx.config.schema import Experiment, TaskConfig
from llmx.config.tasks import shipped_tasks
from llmx.errors import ConfigError
from llmx.plan.types import SUMMED


def task_problems(exp: Experiment) -> list[str]:
    """One message for each value that the task does not take."""
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
    except ConfigError as error:
        problems += str(error).splitlines()
    return problems


def frozen_specs(exp: Experiment) -> dict[str, Any]:
    """The networks of a task of llmx that are not trained, by name (``llmx.models.spec``); without
    those that are the trained one with its adapter off, which take no memory."""
    if exp.task.kind not in shipped_tasks():
        return {}
    try:
        kind = importlib.import_module("llmx.tasks").task_class(exp.task.kind)
        specs = kind(exp, None).models()
        bases = importlib.import_module("llmx.models.spec").are_bases(specs, exp.adapter, exp.model)
    except ImportError:
        return {}
    return {name: spec for name, spec in specs.items() if not spec.trained and name not in bases}


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
