"""Specifies a store before it is built: its records, their encoding, and its name.

The store is named by a fingerprint of everything that decides its samples: the bytes of the
sources, the tokenizer, the template, the task's encoding and the options that matter. Another
seq_len is another store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmx.config import DataConfig
from llmx.data.examples import Encoding, check_task, over_long_of
from llmx.data.format.rendering import day_written
from llmx.data.format.rows import Conversation, Preference, Prompted
from llmx.data.split import ROWS_VERSION, DatasetSplit
from llmx.data.store.samples import STORE_FORMAT
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.tokenizer import tokenizer_fingerprint

SAMPLES_VERSION = 2
"""Raised when other samples are made of the same rows. (The files of a store have a format of
their own, ``store.STORE_FORMAT``, which leaves the samples and so the fingerprint as they are.)"""
PREPARATION = f"{SAMPLES_VERSION}.{ROWS_VERSION}"
"""Another one makes other samples of the same files and options."""


@dataclass(frozen=True)
class DatasetSpec:
    """One split of an experiment's data, before anything is prepared."""

    data: DataConfig
    split: DatasetSplit
    renderer: Renderer
    encoding: Encoding
    """The task, which makes examples of rows."""
    identity: dict[str, Any]
    """Everything that decides the store's samples."""
    fingerprint: str
    """The hex digest of ``identity``, which names the store."""
    path: Path
    """The directory of the store, whether it exists or not."""


def dataset_spec(
    data: DataConfig, seed: int, tokenizer: Any, encoding: Encoding, split: str
) -> DatasetSpec:
    """Raises ConfigError for options that do not go together, DataError for a source that
    cannot be read."""
    if data.packing == "auto":  # not composed for a task, which would have chosen
        data = replace(data, packing="best_fit")
    dataset_split = DatasetSplit(
        data, seed, split, takes=encoding.takes, turn_weights=encoding.turn_weights
    )
    check_task(encoding, dataset_split)
    renderer = renderer_of(dataset_split, tokenizer, encoding)
    template = renderer.template if dataset_split.has_conversations else None
    task_identity = encoding.encoding_identity()
    identity = {
        "format_version": SAMPLES_VERSION,
        "sources": dataset_split.digests(cache=cache_directory(data).absolute()),
        "rows": dataset_split.identity(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template,
        "date": day_written(template) if template else None,
        "loss_on": encoding.loss_on,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "over_long": over_long_of(dataset_split, encoding),
        "num_embeddings": encoding.num_embeddings,  # rows with ids beyond it are refused
        "wrapping": [renderer.bos, renderer.eos] if encoding.verbatim else None,
        "columns": [asdict(column) for column in encoding.columns],
        "task": task_identity or None,
    }
    fingerprint = fingerprint_of(identity)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", data.name or Path(data.path).stem)[:40] or "data"
    directory_name = f"{name}-{split}-{fingerprint[:16]}-v{STORE_FORMAT}"
    path = cache_directory(data).absolute() / "data" / directory_name
    return DatasetSpec(data, dataset_split, renderer, encoding, identity, fingerprint, path)


def renderer_of(split: DatasetSplit, tokenizer: Any, encoding: Encoding) -> Renderer:
    """What makes tokens of the rows of a split."""
    return Renderer(
        tokenizer,
        template=split.data.template,
        loss_on=encoding.loss_on,
        chats=any(
            source.row_type in (Conversation, Prompted, Preference) for source in split.sources
        ),
        verbatim=encoding.verbatim,
    )


def cache_directory(data: DataConfig) -> Path:
    """``data.cache_dir``, else ``$LLMX_CACHE``, else ``~/.cache/llmx``."""
    return Path(data.cache_dir or os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()


def fingerprint_of(identity: dict[str, Any]) -> str:
    """Hex digest of what decides a store's content."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
