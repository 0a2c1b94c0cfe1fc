"""What is to be prepared: from an experiment to rows, their rendering and the store's name.

The store is named by a fingerprint of everything that decides its content: the bytes of the
sources, the tokenizer, the template and the options that matter. Another seq_len is another
store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.config import DataConfig, Experiment
from llmx.data.origin import FORMS_VERSION
from llmx.data.part import COLUMNS_VERSION
from llmx.data.render import Renderer
from llmx.data.source import Source
from llmx.data.store import FORMAT_VERSION
from llmx.data.tokenizer import tokenizer_fingerprint
from llmx.errors import ConfigError

PREPARATION = f"{FORMAT_VERSION}.{FORMS_VERSION}.{COLUMNS_VERSION}"
"""Another one makes other samples of the same files and options."""


@dataclass(frozen=True)
class Wanted:
    """One split of an experiment's data, before anything is prepared."""

    data: DataConfig
    source: Source
    renderer: Renderer
    identity: dict[str, Any]
    """Everything that decides the store's content."""
    path: Path
    """Where the store lies, or will lie."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of ``identity``."""
        return fingerprint_of(self.identity)


def wanted_of(exp: Experiment, tokenizer: Any, split: str) -> Wanted:
    """Raises ConfigError for options that do not go together, DataError for a source that
    cannot be read."""
    source = Source.of(exp, split)
    data, kind = exp.data, exp.task.kind
    if kind == "sft" and source.has_text:
        texts = ", ".join(part.path for part in source.parts if part.form == "text")
        beside = " beside conversations" if source.has_conversations else ""
        raise ConfigError(
            f"task=sft needs questions and answers, {texts} holds text{beside}. Use "
            "task=pretrain, which learns text and conversations alike, or map the columns with "
            "data.form and data.columns."
        )
    if kind == "sft" and data.packing == "concat":
        raise ConfigError(
            "data.packing=concat cuts rows at seq_len, task=sft needs them whole. Use "
            "data.packing=best_fit."
        )
    # Pretraining on conversations learns every token of them.
    loss_on = data.loss_on if kind == "sft" else "all"
    renderer = Renderer(tokenizer, template=data.template, loss_on=loss_on)
    identity = {
        "format_version": FORMAT_VERSION,
        "sources": source.digests(cache=cache_directory(exp).absolute()),
        "rows": source.identity(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": renderer.template if source.has_conversations else None,
        "loss_on": loss_on,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "over_long": data.over_long,
    }
    return Wanted(data, source, renderer, identity, _path(exp, identity, split))


def cache_directory(exp: Experiment) -> Path:
    """``data.cache_dir``, else ``$LLMX_CACHE``, else ``~/.cache/llmx``."""
    return Path(exp.data.cache_dir or os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()


def fingerprint_of(identity: dict[str, Any]) -> str:
    """Hex digest of what decides a store's content."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _path(exp: Experiment, identity: dict[str, Any], split: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", exp.data.name or Path(exp.data.path).stem)[:40]
    directory = cache_directory(exp).absolute() / "data"
    return directory / f"{name or 'data'}-{split}-{fingerprint_of(identity)[:16]}"
