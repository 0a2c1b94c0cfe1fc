"""Data: from files in the form they have to packed, exact, resumable samples.

    store = prepare(data, seed, tokenizer, task, split="train")  # once; found again when unchanged
    samples = samples_of_step(step, global_batch=8, num_samples=len(store), seed=seed)
    batch = collate([store[i] for i in samples[:2]], seq_len=512, pad_id=0, layout="packed")

In the order in which data flows:

- ``source``: files and Hub datasets to records
- ``format``: records to rows (a conversation, a document, a preference pair); chat templates
- ``split``: the rows of a split, over all of its sources
- ``examples``: what a task makes of it: sequences that belong together, with columns
- ``tokenize``: examples to token ids and targets, on all cores, and truncated; loading and training
  tokenizers
- ``store``: writing, packing; the store on disk, its name and its summary
- ``distributed``: one host prepares the store for all
- ``order``, ``collation``: which samples a step has, and their tensors; ``eval_prompts``

Importing this package imports neither torch nor transformers, and numpy only with the names that
work on arrays: the control process reads the first rows, and starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmx.data.examples import IGNORE, Column, Encoding, Example, Tokens
from llmx.data.format.rows import Conversation, Labelled, Preference, TextPair, UnpairedPreference
from llmx.data.source.records import Document, Record, Rejected

if TYPE_CHECKING:
    from llmx.data.collation import collate
    from llmx.data.eval_prompts import EvalPrompt, held_out_prompts
    from llmx.data.store.build import prepare
    from llmx.data.store.samples import Sample, SampleStore
    from llmx.data.tokenize.tokenizer import load_tokenizer

__all__ = [
    "IGNORE",
    "Column",
    "Conversation",
    "Document",
    "Encoding",
    "EvalPrompt",
    "Example",
    "Labelled",
    "Preference",
    "Record",
    "Rejected",
    "Sample",
    "SampleStore",
    "TextPair",
    "Tokens",
    "UnpairedPreference",
    "collate",
    "held_out_prompts",
    "load_tokenizer",
    "prepare",
]

_ON_ARRAYS = {
    "collate": "collation",
    "EvalPrompt": "eval_prompts",
    "held_out_prompts": "eval_prompts",
    "load_tokenizer": "tokenize.tokenizer",
    "prepare": "store.build",
    "Sample": "store.samples",
    "SampleStore": "store.samples",
}
"""Name -> the module that is imported when the name is asked for."""


def __getattr__(name: str) -> Any:
    if name not in _ON_ARRAYS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ON_ARRAYS[name]}"), name)
