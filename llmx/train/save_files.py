"""The small files of a checkpoint: its state, and what an export needs besides the weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from llmx.checkpoint.manifest import MODEL
from llmx.rundir import RunDir
from llmx.train.engine import Engine
from llmx.train.export import write_description


def state_text(state: Any) -> str:
    """``state.json``."""
    return json.dumps(state, indent=1, ensure_ascii=False) + "\n"


def small_files(run_dir: RunDir, engine: Engine, tokenizer: Any) -> dict[str, bytes]:
    """Relative path -> content: the run's config and plan, and the model's description with its
    tokenizer. They stay the same through an attempt."""
    found = {path.name: path.read_bytes() for path in (run_dir.config, run_dir.plan)}
    with tempfile.TemporaryDirectory(prefix="llmx-") as name:
        directory = Path(name)
        write_description(
            directory,
            engine.module,
            engine.config,
            tokenizer=tokenizer,
            vocab_size=engine.vocab_size,
            dtype=engine.dtype,
        )
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                found[f"{MODEL}/{path.relative_to(directory).as_posix()}"] = path.read_bytes()
    return found
