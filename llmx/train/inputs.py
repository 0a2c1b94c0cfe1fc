"""``inputs.json``: the exact identity of what a run reads, as only the ranks know it.

The data's fingerprint covers every byte of the sources and all that decides the samples; a
reproduction compares it. ``cat RUN_DIR/inputs.json`` shows it.
"""

from __future__ import annotations

from typing import Any

from llmx.rundir import RunDir, write_json


def write_inputs(
    run_dir: RunDir, *, tokenizer: Any, train_store: Any, eval_store: Any, model_config: Any
) -> None:
    """Write ``inputs.json``; called by rank 0 alone."""
    from llmx.data.tokenizer import tokenizer_fingerprint

    write_json(
        run_dir.inputs,
        {
            "data": train_store.fingerprint,
            "eval_data": None if eval_store is None else eval_store.fingerprint,
            "tokenizer": tokenizer_fingerprint(tokenizer),
            # Of a model from the Hub: the commit that was loaded.
            "model": getattr(model_config, "_commit_hash", None),
        },
    )
