"""Prepares data once: read, tokenize, pack, store; found again when nothing changed.

    store = prepare(exp, load_tokenizer(exp), split="train")
    print(summary(store))

The store is named by a fingerprint of everything that decides its content: the bytes of the
sources, the tokenizer, the template and the options that matter. Another seq_len is another
store. A second process that wants the same waits for the first and uses its work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmx.config import Experiment
from llmx.data.forms import Conversation, Document
from llmx.data.pack import PACKERS
from llmx.data.render import Renderer, TokenRow
from llmx.data.source import Row, Source, has_eval
from llmx.data.spool import Spool
from llmx.data.store import FORMAT_VERSION, SampleStore, locked, write_store
from llmx.data.tokenizer import tokenizer_fingerprint
from llmx.errors import ConfigError, DataError

__all__ = ["has_eval", "prepare", "store_path", "summary"]

BATCH_ROWS = 512
"""Rows handed to the tokenizer at once; its own threads share them out."""


def prepare(exp: Experiment, tokenizer: Any, *, split: str = "train") -> SampleStore:
    """The store of one split of ``exp.data``; made now, or found from before.

    ``split`` is ``train`` or ``eval``. Raises ConfigError for options that do not go together,
    DataError (with file and line) for a source that cannot be read or a row that is wrong.
    """
    source, renderer, identity = _plan(exp, tokenizer, split)
    path = _path(exp, identity, split)
    if (path / "meta.json").exists():
        return SampleStore.open(path)
    with locked(path):
        if (path / "meta.json").exists():
            return SampleStore.open(path)
        return _make(exp, source, renderer, identity, path)


def store_path(exp: Experiment, tokenizer: Any, *, split: str = "train") -> Path:
    """Where the store of a split lies, or will lie."""
    return _path(exp, _plan(exp, tokenizer, split)[2], split)


def cache_directory(exp: Experiment) -> Path:
    """``data.cache_dir``, else ``$LLMX_CACHE``, else ``~/.cache/llmx``."""
    return Path(exp.data.cache_dir or os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()


def summary(store: SampleStore) -> str:
    """One paragraph about a store: rows, tokens, what was dropped and how full samples are."""
    meta = store.meta
    lengths = meta["row_length_percentiles"]
    lost = [f"{count:,} {reason}" for reason, count in meta["dropped"].items()]
    if meta["truncated"]:
        lost.append(f"{meta['truncated']:,} truncated to {meta['seq_len']} tokens")
    fill = meta["num_tokens"] / (meta["num_samples"] * meta["seq_len"])
    fate = ", ".join(lost) or "no row dropped or truncated"
    return (
        f"{meta['num_rows']:,} rows in {meta['num_samples']:,} samples of up to "
        f"{meta['seq_len']} tokens ({fill:.1%} full); {meta['num_tokens']:,} tokens, "
        f"{meta['num_target_tokens']:,} of them learned; row length median {lengths['50']}, "
        f"90 % {lengths['90']}, longest {lengths['100']}; form {meta['form']}, template "
        f"{meta['template'] or 'none'}; {fate}."
    )


def _plan(exp: Experiment, tokenizer: Any, split: str) -> tuple[Source, Renderer, dict[str, Any]]:
    source = Source.of(exp, split)
    data, kind = exp.data, exp.task.kind
    if kind == "sft" and source.form == "text":
        raise ConfigError(
            f"task=sft needs questions and answers, {source.path} holds text. Use task=pretrain, "
            "or map the columns with data.form and data.columns."
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
        "sources": source.digests(),
        "rows": source.identity(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": None if source.form == "text" else renderer.template,
        "loss_on": loss_on,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "over_long": data.over_long,
    }
    return source, renderer, identity


def fingerprint_of(identity: dict[str, Any]) -> str:
    """Hex digest of what decides a store's content."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _path(exp: Experiment, identity: dict[str, Any], split: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", exp.data.name or Path(exp.data.path).stem)[:40]
    directory = cache_directory(exp).absolute() / "data"
    return directory / f"{name or 'data'}-{split}-{fingerprint_of(identity)[:16]}"


def _make(
    exp: Experiment, source: Source, renderer: Renderer, identity: dict[str, Any], path: Path
) -> SampleStore:
    started = time.monotonic()
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix=f"{path.name}.tmp-", dir=path.parent) as directory,
        contextlib.closing(Spool(Path(directory))) as spool,
    ):
        for row, more in _token_rows(exp, source, renderer, counts):
            spool.append(row, more=more)
        rows_read = counts.pop("rows", 0)
        if not spool.lengths:
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
            raise DataError(
                f"{source.path}: none of {rows_read} rows is left ({reasons or 'all are empty'}). "
                "Check data.seq_len, data.over_long and the columns."
            )
        pack = PACKERS[exp.data.packing]
        return write_store(
            path,
            spool.samples(pack(spool.lengths, capacity=exp.data.seq_len)),
            fingerprint=fingerprint_of(identity),
            seq_len=exp.data.seq_len,
            meta={
                "split": source.split,
                "sources": [str(file.absolute()) for file in source.files],
                "form": source.form,
                "template": None if source.form == "text" else renderer.template_name,
                "tokenizer": str(renderer.tokenizer.name_or_path),
                "identity": identity,
                "rows_read": rows_read,
                "truncated": counts.pop("truncated", 0),
                "dropped": dict(counts),
                "row_length_percentiles": _percentiles(spool.lengths),
                "tokenize_seconds": round(time.monotonic() - started, 3),
            },
        )


def _token_rows(
    exp: Experiment, source: Source, renderer: Renderer, counts: Counter[str]
) -> Iterator[tuple[TokenRow, bool]]:
    """(tokens, whether more of the same row follows) of every row that is kept."""
    begins = True  # the next piece is the first of its document
    rows = source.rows()
    while batch := list(islice(rows, BATCH_ROWS)):
        found = [row for row in batch if row is not None]
        counts["rows"] += len(batch)
        counts["without an answer"] += len(batch) - len(found)
        if source.form == "text":
            documents = [row for row in found if isinstance(row, Document)]
            firsts = [begins, *(document.last for document in documents)]
            begins = firsts.pop()
            tokenized = renderer.documents(documents, first=firsts)
            unfinished = [not document.last for document in documents]
        else:
            chats = [row for row in found if isinstance(row, Conversation)]
            tokenized = renderer.conversations(chats)
            unfinished = [False] * len(chats)
        for row, tokens, more in zip(found, tokenized, unfinished, strict=True):
            kept = _fitted(row, tokens, exp, counts)
            if kept is not None:
                yield kept, more
    for reason in [reason for reason, count in counts.items() if count == 0]:
        del counts[reason]


def _fitted(row: Row, tokens: TokenRow, exp: Experiment, counts: Counter[str]) -> TokenRow | None:
    """The row, cut where it is too long, or None where it is dropped, with the reason counted."""
    limit = exp.data.seq_len
    if len(tokens.tokens) > limit and exp.data.packing != "concat":
        if exp.data.over_long == "error":
            raise DataError(
                f"{row.where}: {len(tokens.tokens)} tokens, data.seq_len is {limit}. Raise "
                "data.seq_len, or set data.over_long to truncate or drop."
            )
        if exp.data.over_long == "drop":
            counts["too long"] += 1
            return None
        counts["truncated"] += 1
        tokens = TokenRow(tokens.tokens[:limit], tokens.targets[:limit])
    if isinstance(row, Conversation) and not tokens.targets[1:].any():
        counts["without an answer in the first seq_len tokens"] += 1
        counts["truncated"] -= 1
        return None
    return tokens


def _percentiles(lengths: Sequence[int]) -> dict[str, int]:
    ranks = (0, 10, 50, 90, 99, 100)
    values = np.percentile(np.asarray(lengths), ranks, method="higher")
    return {str(rank): int(value) for rank, value in zip(ranks, values, strict=True)}
