"""Tasks by ``kind``: one file each, saying what is learned and what is reported."""

from __future__ import annotations

import importlib

from llmx.errors import ConfigError
from llmx.tasks.base import Loss, Mean, Task, exact_match, next_token_loss
from llmx.tasks.pretrain import Pretrain
from llmx.tasks.sft import Sft

KINDS: dict[str, type[Task]] = {"sft": Sft, "pretrain": Pretrain}
"""The tasks of llmx, by ``task.kind``."""


def task_class(kind: str) -> type[Task]:
    """The class that ``task.kind`` names: one of ``KINDS``, or ``package.module:Class``.

    Raises:
        ConfigError: it cannot be imported here, or is no ``Task``.
    """
    if kind in KINDS:
        return KINDS[kind]
    module, _, name = kind.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"task.kind={kind} cannot be imported on this host: {error}. Its package must be "
            "installed there or on PYTHONPATH; launch.sync=rsync brings it along."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task.kind={kind} is no subclass of llmx.tasks.Task.")
    return found


__all__ = [
    "KINDS",
    "Loss",
    "Mean",
    "Pretrain",
    "Sft",
    "Task",
    "exact_match",
    "next_token_loss",
    "task_class",
]
