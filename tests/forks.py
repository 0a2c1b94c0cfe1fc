"""Processes of a test, forked from one that has imported everything and has no threads.

A fork of pytest's own process copies whatever lock another of its threads holds at that moment
(an import, a tracker's sender), and the child waits for it for ever.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "llmx.train.precompute",
        "llmx.train.step",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
    ]
)


def process(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process, not started yet, that calls ``target(*args)`` in this environment."""
    return context.Process(target=_call, args=(dict(os.environ), target, args), daemon=True)


def _call(
    environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
