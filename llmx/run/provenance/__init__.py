"""Where a run comes from: code, packages, machine, content of its inputs, what was typed.

``record`` makes what ``provenance.json`` holds; ``differences`` judges two of them by what
they do to the numbers. Light: no torch, no network, at most ``FULL_BYTES`` read.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llmx
from llmx.config import Experiment
from llmx.config.user_code import code_hashes, user_code
from llmx.plan.types import Plan
from llmx.run.provenance.content import fingerprints
from llmx.run.provenance.machine import (
    code_files,
    git_state,
    machine_facts,
    numeric_environment,
    packages,
)
from llmx.run.rundir import RunDir

__all__ = ["code_files", "git_state", "record"]


def record(
    exp: Experiment,
    plan: Plan,
    overrides: Sequence[str],
    *,
    environment: Mapping[str, str],
    parent: RunDir | None = None,
) -> dict[str, Any]:
    """The provenance of a run that starts here and now. ``environment``: of its ranks."""
    return {
        "created": time.time(),
        "overrides": list(overrides),
        "parent": None if parent is None else str(parent.root),
        "llmx": llmx.__version__,
        "git": git_state(Path(llmx.__file__).parent),
        "code": code_files(),
        "task_code": code_hashes(*code) if (code := user_code(exp.task)) else None,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": packages(),
        "platform": {"node": platform.node(), "system": platform.platform()},
        **machine_facts(),
        "environment": numeric_environment(environment),
        "fingerprints": fingerprints(exp.model, exp.data, plan.beside),
    }
