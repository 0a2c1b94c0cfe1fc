"""Processes of a test, forked from one that has imported everything and has no threads.

A fork of pytest's own process copies whatever lock another of its threads holds at that moment
(an import, a tracker's sender), and the child waits for it for ever.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

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


def group(target: Callable[..., None], place: Path, *args: Any, world: int) -> None:
    """Ranks of one gloo group, each of which calls ``target(rank, place, *args)``."""
    ranks = [process(_rank, target, rank, world, place, *args) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(timeout=120)
        assert each.exitcode == 0


def _rank(target: Callable[..., None], rank: int, world: int, place: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    meet = f"file://{place / 'meet'}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    target(rank, place, *args)
    torch.distributed.destroy_process_group()


def _call(
    environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
