"""``inputs.json`` and ``data.json``: what a run reads, as only the ranks know it.

The data's fingerprint covers every byte of the sources and all that decides the samples; a
reproduction compares it. The report shows what became of the records. ``cat RUN_DIR/inputs.json``.
"""

from __future__ import annotations

from typing import Any

from llmx.run.rundir import RunDir, write_json


def write_inputs(
    run_dir: RunDir, *, tokenizer: Any, train_store: Any, eval_store: Any, model_config: Any
) -> None:
    """Write ``inputs.json``; called by rank 0 alone."""
    from llmx.data.tokenize.tokenizer import tokenizer_fingerprint

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


PREPARATION = ("encoder", "time")
"""Lines about how the data was prepared, which another run may have done."""


def write_data(run_dir: RunDir, *, train_store: Any, eval_store: Any) -> None:
    """Write ``data.json``: (name, value) lines of each split. Called by rank 0 alone."""
    from llmx.data.store.summary import report

    stores = {"train": train_store, "eval": eval_store}
    write_json(
        run_dir.data,
        {
            split: [
                [name, value]
                for name, value in report(store.meta, found=True)
                if name not in PREPARATION
            ]
            for split, store in stores.items()
            if store is not None
        },
    )
