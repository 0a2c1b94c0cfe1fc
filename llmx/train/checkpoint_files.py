"""The small files of a checkpoint: its state, and what an export needs besides the weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from llmx.checkpoint.export.model import (
    vocabulary_names,
    write_adapter_config,
    write_description,
)
from llmx.checkpoint.manifest import FORMAT, MODEL
from llmx.checkpoint.state.engine_state import state_values
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir
from llmx.run.scratch import scratch_directory
from llmx.train.divergence import NonFiniteWatch
from llmx.train.engine.build import Engine
from llmx.train.schedule import RunLength


class TrainingProgress(Protocol):
    """What the loop knows and a checkpoint records (``llmx.train.step_log``)."""

    tokens_seen: int
    target_tokens_seen: int
    total: int
    length: RunLength
    watch: NonFiniteWatch


def state_of(
    progress: TrainingProgress,
    *,
    step: int,
    reason: str,
    engine: Engine,
    plan: Plan,
    identity: dict[str, Any],
    metric: dict[str, Any] | None,
) -> dict[str, Any]:
    """``state.json`` (docs/contracts.md) but for the hash of the weights."""
    return {
        "format": FORMAT,
        "step": step,
        "samples": progress.length.samples_at(step),
        "tokens_seen": progress.tokens_seen,
        "target_tokens_seen": progress.target_tokens_seen,
        **identity,
        "world_size": plan.world_size,
        "total_steps": progress.total,
        "vocab_size": engine.vocab_size,
        "padded_vocab_size": engine.config.get_text_config().vocab_size,
        "vocabulary": [engine.main_prefix + name for name in vocabulary_names(engine.main.module)],
        # Of several models, the one that is exported.
        **({"main_prefix": engine.main_prefix} if engine.main_prefix else {}),
        **state_values(engine),
        "metric": metric,
        "time": time.time(),
        "reason": reason,
    }


def small_files(
    run_dir: RunDir, engine: Engine, tokenizer: Any, *, files: Mapping[str, str]
) -> dict[str, bytes]:
    """Relative path -> content: the run's config and plan, and the model's description with its
    tokenizer and ``files`` (``Task.export_files``). They stay the same through an attempt."""
    found = {path.name: path.read_bytes() for path in (run_dir.config, run_dir.plan)}
    with scratch_directory() as directory:
        write_description(
            directory,
            engine.main.module,
            engine.config,
            tokenizer=tokenizer,
            vocab_size=engine.vocab_size,
            dtype=engine.dtype,
            files=files,
        )
        if engine.main.adapter is not None:
            write_adapter_config(directory, engine.main.adapter)
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                found[f"{MODEL}/{path.relative_to(directory).as_posix()}"] = path.read_bytes()
    return found
