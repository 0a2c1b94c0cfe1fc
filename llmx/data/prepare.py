"""Prepares data once: read, tokenize, pack, store; found again when nothing changed.

    store = prepare(exp, load_tokenizer(exp), split="train")
    print(summary(store))

The store is named by a fingerprint of everything that decides its content: the bytes of the
sources, the tokenizer, the template and the options that matter. Another seq_len is another
store. A second process that wants the same waits for the first and uses its work.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from llmx.config import Experiment
from llmx.data.compressed import SUFFIXES
from llmx.data.encode import (
    Batch,
    DocumentEncoder,
    TokenBlock,
    core_count,
    parallel_tokenizers,
)
from llmx.data.fit import Fit, joined
from llmx.data.forms import Document
from llmx.data.pack import PACKERS
from llmx.data.progress import Progress
from llmx.data.render import Renderer
from llmx.data.rows import excerpt
from llmx.data.source import Row, Source, has_eval
from llmx.data.spool import Spool
from llmx.data.store import FORMAT_VERSION, SampleStore, cannot_write, locked, publish
from llmx.data.tokenizer import tokenizer_fingerprint
from llmx.errors import ConfigError, DataError, LlmxError

__all__ = ["has_eval", "prepare", "store_path", "summary"]

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
"""Rows, and bytes of text, that are tokenized at once."""
FAST_FROM_BYTES = 2 << 20
"""Bytes of text from which a faster encoder is worth its proof."""


def prepare(exp: Experiment, tokenizer: Any, *, split: str = "train") -> SampleStore:
    """The store of one split of ``exp.data``; made now, or found from before.

    ``split`` is ``train`` or ``eval``. Raises ConfigError for options that do not go together,
    DataError (with file and line) for a source that cannot be read or a row that is wrong.
    """
    source, renderer, identity = _plan(exp, tokenizer, split)
    path = _path(exp, identity, split)
    if (path / "meta.json").exists():
        return _opened(path, identity)
    with locked(path):
        if (path / "meta.json").exists():
            return _opened(path, identity)
        return _make(exp, source, renderer, identity, path)


def _opened(path: Path, identity: dict[str, Any]) -> SampleStore:
    """The store at ``path``; raises DataError that says what differs if it is another's."""
    store = SampleStore.open(path)
    if store.fingerprint != fingerprint_of(identity):
        found = store.meta.get("identity", {})
        different = [
            f"{key} {excerpt(found.get(key))} there, {excerpt(wanted)} wanted"
            for key, wanted in identity.items()
            if found.get(key) != wanted
        ]
        raise DataError(
            f"{path} holds data prepared otherwise: {'; '.join(different) or 'by another llmx'}. "
            "A store lies under the name of what it is; this one was put there by hand. Remove "
            "the directory; it is prepared again."
        )
    return store


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
    if meta["rejected"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in meta["rejected"].items())
        lost.append(f"rejected, see {meta['rejected_file']}: {reasons}")
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
        "sources": source.digests(cache=cache_directory(exp).absolute()),
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
    partial = path.with_name(f"{path.name}.partial")
    try:
        spool = Spool(partial)
    except OSError as error:
        raise cannot_write(path.parent, error) from error
    try:
        store = _fill(exp, source, renderer, identity, path, spool, started)
    except (LlmxError, OSError) as error:
        # A row that is wrong, a disk that is full: nothing to go on from. After a kill there is.
        spool.remove()
        if isinstance(error, OSError):
            raise cannot_write(path.parent, error) from error
        raise
    spool.remove()
    return store


def _fill(
    exp: Experiment,
    source: Source,
    renderer: Renderer,
    identity: dict[str, Any],
    path: Path,
    spool: Spool,
    started: float,
) -> SampleStore:
    counts: Counter[str] = Counter(spool.note.get("counts", {}))
    resumed_rows = counts["rows"]
    workers = exp.data.num_workers or core_count()
    sizes = [file.stat().st_size for file in source.files]
    plain = not any(file.suffix.lower() in SUFFIXES for file in source.files)
    total = sum(sizes) if plain and exp.data.max_rows is None and not resumed_rows else 0
    progress = Progress(f"Preparing {path.name}", total_bytes=total)
    fit = Fit(exp.data, counts, state=spool.note.get("fit"))
    encoder = "tokenizers"
    with parallel_tokenizers(workers), progress:
        batches = _batches(islice(source.rows(), resumed_rows, None))
        blocks: Iterator[tuple[Batch, TokenBlock]]
        if source.form == "text":
            documents = DocumentEncoder(renderer.tokenizer, begin=renderer.begin, workers=workers)
            batches = _chosen(documents, batches)
            blocks = documents.blocks(batches, begins=not fit.state[0])
            encoder = documents.description
        else:
            blocks = _rendered(source, renderer, batches, counts)
        for batch, block in blocks:
            counts["rows"] += batch.read
            counts["without an answer"] += batch.read - len(batch.rows)
            fitted, joins = fit(batch.rows, block)
            spool.append(fitted, joins=joins)
            progress.add(size=batch.size, tokens=len(block.tokens))
            if source.form == "text":  # what a template refused is not noted
                spool.keep({"counts": dict(counts), "fit": fit.state})
    rows_read = counts.pop("rows", 0)
    truncated = counts.pop("truncated", 0)
    counts.update(source.left_out)
    dropped = {reason: count for reason, count in counts.items() if count}
    rejected_file = source.rejects.write(path.with_name(f"{path.name}.rejected.jsonl"))
    if not spool.lengths:
        lost = {**dropped, **source.rejects.counts}
        reasons = ", ".join(f"{count} {reason}" for reason, count in lost.items())
        raise DataError(
            f"{source.path}: none of {rows_read} rows is left ({reasons or 'all are empty'}). "
            "Check data.seq_len, data.over_long and the columns."
        )
    lengths = np.array(spool.lengths, np.int64)
    packing = PACKERS[exp.data.packing](lengths, capacity=exp.data.seq_len)
    seconds = time.monotonic() - started
    return publish(
        path,
        lambda directory: spool.gather(packing, directory),
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
            "truncated": truncated,
            "dropped": dropped,
            "rejected": dict(source.rejects.counts),
            "rejected_file": rejected_file and str(rejected_file),
            "row_tokens": int(lengths.sum()),
            "row_length_percentiles": _percentiles(lengths),
            "row_length_histogram": _histogram(lengths),
            "encoder": encoder,
            "workers": workers,
            "text_bytes": progress.bytes,
            "tokenize_seconds": round(seconds, 3),
            "resumed_at_row": resumed_rows,
        },
    )


def _batches(rows: Iterator[Row | None]) -> Iterator[Batch]:
    """Rows in batches of a bounded number and size."""
    found: list[Row] = []
    read = size = 0
    for row in rows:
        read += 1
        if row is not None:
            found.append(row)
            size += _text_bytes(row)
        if read >= BATCH_ROWS or size >= BATCH_BYTES:
            yield Batch(found, read, size)
            found, read, size = [], 0, 0
    if read:
        yield Batch(found, read, size)


def _rendered(
    source: Source, renderer: Renderer, batches: Iterator[Batch], counts: Counter[str]
) -> Iterator[tuple[Batch, TokenBlock]]:
    """Conversations as tokens; one that the template refuses is rejected (or raises)."""
    for batch in batches:
        found = source.accepted(batch.rows, renderer.conversations)
        rows = [row for row, tokens in zip(batch.rows, found, strict=True) if tokens is not None]
        # Counted among the rejected, not among those without an answer.
        counts["without an answer"] -= len(batch.rows) - len(rows)
        kept = [tokens for tokens in found if tokens is not None]
        yield replace(batch, rows=rows), joined(kept)


def _text_bytes(row: Row) -> int:
    texts = (row.text,) if isinstance(row, Document) else (m.content for m in row.messages)
    # Half a surrogate pair is somebody else's error, said with its place.
    return sum(
        len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        for text in texts
    )


def _chosen(encoder: DocumentEncoder, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, after the encoder was chosen on the first of them. A little text is
    sooner tokenized than a faster way is proven."""
    head: list[Batch] = []
    while sum(batch.size for batch in head) < FAST_FROM_BYTES:
        batch = next(batches, None)
        if batch is None:
            return iter(head)
        head.append(batch)
    encoder.choose(document.text for batch in head for document in batch.rows)
    return chain(head, batches)


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Rows by length, in at most 50 steps of equal width."""
    longest = int(lengths.max())
    width = max(1, -(-longest // 50))
    edges = np.arange(0, longest + width, width)
    return {"edges": edges.tolist(), "rows": np.histogram(lengths, edges)[0].tolist()}


def _percentiles(lengths: np.ndarray) -> dict[str, int]:
    ranks = (0, 10, 50, 90, 99, 100)
    values = np.percentile(lengths, ranks, method="higher")
    return {str(rank): int(value) for rank, value in zip(ranks, values, strict=True)}
