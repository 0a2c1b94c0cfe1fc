"""Tasks by ``kind``: one file per task, with its loss and its metrics.

Nothing lists them: ``task=NAME`` is the file ``NAME.py`` here (``llmx.config.tasks``), which is
imported when a run asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from llmx import data
from llmx.config import Experiment
from llmx.config.tasks import shipped_tasks
from llmx.errors import ConfigError, did_you_mean
from llmx.run.metrics import Metric
from llmx.tasks.base import (
    Accumulator,
    Loss,
    Mean,
    SampleKey,
    Table,
    Task,
    held_out,
    next_token_loss,
)
from llmx.tasks.joint import JointLoss, JointTask
from llmx.tasks.online import GeneratedSample, OnlineTask, Prompt, RolloutKey

MEMBERS: dict[type[Task], tuple[str, ...]] = {
    OnlineTask: ("rollout", "rollout_columns", "corrects_staleness", "generates"),
    JointTask: ("outputs", "joint_loss", "joint"),
}
"""Members that only this kind of task is asked for."""


def task_class(kind: str, options: Mapping[str, Any] | None = None) -> type[Task]:
    """The class that ``task.kind`` names, with these options: a task of llmx, whose class has the
    name of its file, or ``package.module:Class``.

    Raises:
        ConfigError: it cannot be imported here, is no ``Task``, or is not the kind of task that
            its members are for.
    """
    if kind in shipped_tasks():
        module = importlib.import_module(f"{__name__}.{kind}")
        shipped: type[Task] = getattr(module, kind.capitalize())
        return shipped.variant(options or {})
    path, _, name = kind.partition(":")
    try:
        names = vars(importlib.import_module(path))
    except ImportError as error:
        raise ConfigError(
            f"cannot import task.kind={kind} on this host: {error}. Install its package here or "
            "add it to PYTHONPATH; launch.sync=rsync copies it to the hosts."
        ) from error
    task = names.get(name)
    if isinstance(task, type) and issubclass(task, Task):
        for base, members in MEMBERS.items():
            own = [member for member in members if hasattr(task, member)]
            if own and not issubclass(task, base):
                raise ConfigError(
                    f"task.kind={kind}: {name} has {', '.join(own)}, which only a "
                    f"llmx.tasks.{base.__name__} is asked for. Derive {name} from it in place of "
                    "llmx.tasks.Task."
                )
        if hasattr(task, "config_problems"):
            raise ConfigError(
                f"task.kind={kind}: {name} has config_problems, which nothing calls. Rename it to "
                "problems(self); the experiment is self.exp."
            )
        return task.variant(options or {})
    near = did_you_mean(name, [key for key, value in names.items() if isinstance(value, type)])
    raise ConfigError(
        f"task.kind={kind}: {path} has no class {name} that is a subclass of llmx.tasks.Task.{near}"
    )


def tokenizer_of(exp: Experiment) -> Any:
    """The tokenizer of an experiment, with the chat template that its task's conversations are
    rendered with. Raises ConfigError when it cannot be loaded."""
    chats = task_class(exp.task.kind, exp.task.options).learns_chats()
    return data.load_tokenizer(exp.model, template=exp.data.template, chats=chats)


def task_of(exp: Experiment, tokenizer: Any) -> Task:
    """The task of an experiment. Raises ConfigError for values that it cannot be trained with."""
    task = task_class(exp.task.kind, exp.task.options)(exp, tokenizer)
    if problems := list(task.problems()):
        raise ConfigError("\n".join(problems))
    return task


def prepare(exp: Experiment, tokenizer: Any, *, split: str = "train") -> data.SampleStore:
    """The prepared samples of one split, as the experiment's task encodes them."""
    return data.prepare(exp.data, exp.seed, tokenizer, task_of(exp, tokenizer), split=split)


__all__ = [
    "Accumulator",
    "GeneratedSample",
    "JointLoss",
    "JointTask",
    "Loss",
    "Mean",
    "Metric",
    "OnlineTask",
    "Prompt",
    "RolloutKey",
    "SampleKey",
    "Table",
    "Task",
    "held_out",
    "next_token_loss",
    "prepare",
    "task_class",
    "task_of",
    "tokenizer_of",
]
