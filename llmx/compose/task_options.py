"""``task.options`` of a task of llmx, checked while the config is composed.

Only the task knows its options, and its file is read where there are any. It imports torch where it
computes, not at its top, so that this stays quick. A task of the user's own is not imported here:
the ranks check its options.
"""

from __future__ import annotations

import importlib

from llmx.config.schema import TaskConfig
from llmx.config.tasks import shipped_tasks
from llmx.errors import ConfigError


def option_problems(task: TaskConfig) -> list[str]:
    """One message for each name or value that the task does not take."""
    if not task.options or task.kind not in shipped_tasks():
        return []
    try:
        # By name: this process does not depend on what the ranks import.
        tasks = importlib.import_module("llmx.tasks")
        found = tasks.task_class(task.kind).Options
        importlib.import_module("llmx.tasks.base").typed_options(found, task.options)
    except ImportError:  # a launching machine without what the ranks have
        return []
    except ConfigError as error:
        return str(error).splitlines()
    return []
