"""Prepares data once: read, tokenize, pack, store; found again when nothing changed.

    store = prepare(exp, load_tokenizer(exp), split="train")
    print(summary(store))

A second process that wants the same waits for the first and uses its work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmx.config import Experiment
from llmx.data.make import make_store
from llmx.data.rows import excerpt
from llmx.data.source import has_eval
from llmx.data.store import SampleStore, locked
from llmx.data.summary import summary
from llmx.data.wanted import Wanted, cache_directory, wanted_of
from llmx.errors import DataError

__all__ = ["cache_directory", "found", "has_eval", "prepare", "store_path", "summary"]


def prepare(exp: Experiment, tokenizer: Any, *, split: str = "train") -> SampleStore:
    """The store of one split of ``exp.data``; made now, or found from before.

    ``split`` is ``train`` or ``eval``. Raises ConfigError for options that do not go together,
    DataError (with file and line) for a source that cannot be read or a row that is wrong.
    """
    wanted = wanted_of(exp, tokenizer, split)
    store = found(wanted)
    if store is not None:
        return store
    with locked(wanted.path):
        return found(wanted) or make_store(wanted)


def found(wanted: Wanted) -> SampleStore | None:
    """The store, if it is there; raises DataError that says what differs if it is another's."""
    if not (wanted.path / "meta.json").exists():
        return None
    store = SampleStore.open(wanted.path)
    if store.fingerprint != wanted.fingerprint:
        there = store.meta.get("identity", {})
        different = [
            f"{key} {excerpt(there.get(key))} there, {excerpt(value)} wanted"
            for key, value in wanted.identity.items()
            if there.get(key) != value
        ]
        raise DataError(
            f"{wanted.path} holds data prepared otherwise: "
            f"{'; '.join(different) or 'by another llmx'}. A store lies under the name of what it "
            "is; this one was put there by hand. Remove the directory; it is prepared again."
        )
    return store


def store_path(exp: Experiment, tokenizer: Any, *, split: str = "train") -> Path:
    """Where the store of a split lies, or will lie."""
    return wanted_of(exp, tokenizer, split).path
