"""Prepares data once: read, encode, tokenize, pack, store; found again when nothing changed.

    store = prepare(exp.data, exp.seed, tokenizer, task, split="train")
    print(summary(store))

A second process that wants the same waits for the first and uses its work. A preparation that was
killed, or whose disk is full, leaves nothing; the next one starts again.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmx import text as human
from llmx.config import DataConfig
from llmx.data.examples import Encoding, Schema
from llmx.data.progress import PreparationProgress
from llmx.data.source.records import (
    RejectedRecords,
    RejectedUnwritten,
    Row,
    counted,
    excerpt,
    names,
)
from llmx.data.split import DatasetSplit
from llmx.data.store.samples import STORE_FORMAT, SampleStore, locked, publish
from llmx.data.store.spec import DatasetSpec, dataset_spec, renderer_of
from llmx.data.store.writer import Writer
from llmx.data.tokenize.documents import parallel_tokenizers, worker_count
from llmx.data.tokenize.encoder import ExampleEncoder
from llmx.data.tokenize.truncation import Fates
from llmx.errors import DataError, LlmxError, disk_is_full
from llmx.text import plural, printable

FAST_FROM_BYTES = 2 << 20
"""Smallest sources for which a faster encoder is worth its proof."""


def prepare(
    data: DataConfig, seed: int, tokenizer: Any, encoding: Encoding, *, split: str = "train"
) -> SampleStore:
    """The store of one split of ``data``; made now, or found from before.

    ``encoding`` is the task: what it makes of a row (``llmx.tasks.prepare`` finds it).
    ``split`` is ``train`` or ``eval``. Raises ConfigError for options that do not go together,
    DataError (with file and line) for a source that cannot be read or a row that is wrong.
    """
    return prepare_spec(dataset_spec(data, seed, tokenizer, encoding, split))


def prepare_spec(spec: DatasetSpec) -> SampleStore:
    """The store of ``spec``; built now, or found from before."""
    store = find_store(spec)
    if store is not None:
        return store
    with locked(spec.path):
        return find_store(spec) or build(spec)


def find_store(spec: DatasetSpec) -> SampleStore | None:
    """The store, if it is there; raises DataError that says what differs if it is another's."""
    if not (spec.path / "meta.json").exists():
        return None
    store = SampleStore.open(spec.path)
    if store.fingerprint != spec.fingerprint:
        there = store.meta.get("identity", {})
        different = [
            f"{key} {excerpt(there.get(key))} there, {excerpt(value)} wanted"
            for key, value in spec.identity.items()
            if there.get(key) != value
        ]
        raise DataError(
            f"{spec.path} contains data that was prepared differently: "
            f"{'; '.join(different) or 'by another llmx'}. A store lies under the name of what it "
            "is; this one was put there by hand. Remove the directory; it is prepared again."
        )
    store.meta["sources"] = _sources(spec)  # not those that had these bytes before
    return store


def _sources(spec: DatasetSpec) -> list[str]:
    return [str(file.absolute()) for file in spec.split.files]


def build(spec: DatasetSpec) -> SampleStore:
    """Prepare ``spec``; the caller holds its lock. An error, or a kill, leaves nothing.

    Raises DataError where no row is left, or where the store cannot be written.
    """
    split, path = spec.split, spec.path
    progress = PreparationProgress(
        f"Preparing {path.name}", total_bytes=split.total_bytes, meter=split.meter
    )

    def fill(directory: Path) -> dict[str, Any]:
        writer = Writer(directory, spec.encoding.columns, task=spec.encoding.name)
        try:
            return _filled(spec, writer, progress)
        except (LlmxError, OSError) as error:
            if disk_is_full(error) and not isinstance(error, RejectedUnwritten):
                raise _disk_full(path, writer.bytes, progress) from error
            raise
        finally:
            writer.discard()

    publish(path, fill)
    return SampleStore.open(path)


def _filled(spec: DatasetSpec, writer: Writer, progress: PreparationProgress) -> dict[str, Any]:
    """Write the examples of all records and their index; returns what meta.json holds."""
    data, split = spec.data, spec.split
    started, workers = time.monotonic(), worker_count(data.num_workers)
    fates, encoder = _append_all(spec, writer, progress, workers=workers)
    seconds = time.monotonic() - started
    rejects = split.rejects
    unread = names(file.name for source in split.sources for file in source.files_by_use[1])
    other_splits = {"files of other splits, which were not read": unread} if unread else {}
    path = spec.path
    rejected_file = rejects.write(path.with_name(f"{path.name}.rejected.jsonl"))
    if not writer.lengths:
        raise nothing_left(printable(split.path), fates.rows_read, fates.dropped, rejects)
    lengths = writer.example_lengths
    percentiles = (0, 10, 50, 90, 99, 100)
    return {
        "format_version": STORE_FORMAT,
        "fingerprint": spec.fingerprint,
        "seq_len": data.seq_len,
        **writer.pack(data.packing, seq_len=data.seq_len),
        "split": split.name,
        "columns": [asdict(column) for column in spec.encoding.columns],
        "sources": _sources(spec),
        "form": split.form,
        "template": spec.renderer.template_name if split.has_conversations else None,
        "tokenizer": str(spec.renderer.tokenizer.name_or_path),
        "identity": spec.identity,
        **vars(fates),
        "notes": {**fates.notes, **other_splits},
        "rejected": rejects.counts,
        "ignored_columns": split.ignored_columns,
        "rejected_file": rejected_file and str(rejected_file),
        "row_tokens": int(lengths.sum()),
        "row_length_percentiles": {
            str(rank): int(np.percentile(lengths, rank, method="higher")) for rank in percentiles
        },
        "row_length_histogram": _histogram(lengths),
        "encoder": encoder,
        "workers": workers,
        "text_bytes": progress.bytes,
        "tokenize_seconds": round(seconds, 3),
    }


def _append_all(
    spec: DatasetSpec, writer: Writer, progress: PreparationProgress, *, workers: int
) -> tuple[Fates, str]:
    """Write the examples of all records; returns what became of the records, and what they were
    encoded with.

    A function of its own, so that the encoder's tables are gone when samples are packed.
    """
    split, fates = spec.split, Fates()
    _ = split.repeated  # a reading with a progress of its own, if it needs one
    with parallel_tokenizers(workers), progress:
        # Of a Hub dataset the size is not known.
        proves = not split.source_bytes or split.source_bytes >= FAST_FROM_BYTES
        encoder = ExampleEncoder(
            split, spec.renderer, spec.encoding, workers=workers, proves=proves
        )
        num_refused = 0
        for batch, examples in encoder.encoded(split.rows()):
            num_refused += len(batch.rejected)
            for error in batch.rejected:
                split.rejects.add(error)
            fates.add(batch.fates)
            num_tokens = writer.append(examples)
            progress.add(size=batch.size, tokens=num_tokens)
    # Those that the sources leave out or reject come to no encoder.
    fates.rows_read += split.left_out.total() + split.rejects.counts.total() - num_refused
    fates.dropped += split.left_out
    return fates, encoder.description


def _disk_full(path: Path, written: int, progress: PreparationProgress) -> DataError:
    """The error for a full disk, with the path and how much is needed."""
    done = progress.fraction()
    need = f"about {human.size(written / done)}" if done else f"more than {human.size(written)}"
    free = human.size(shutil.disk_usage(path.parent).free)
    return DataError(
        f"The disk of {path.parent} is full: {path.name} needs {need} in all, {free} are free "
        "now. No part of it is kept. What was prepared earlier is untouched. Free some space, or "
        "set data.cache_dir to another disk."
    )


def fates_of(
    rows: Sequence[Row | None], split: DatasetSplit, tokenizer: Any, encoding: Encoding
) -> dict[str, Any]:
    """What becomes of these rows of a split, by the names of meta.json; nothing is stored."""
    renderer, fates = renderer_of(split, tokenizer, encoding), Fates()
    rejected, num_tokens = list[str](), 0
    encoder = ExampleEncoder(split, renderer, encoding, workers=1, proves=False)
    schema = Schema(encoding.columns, encoding.name)
    for batch, examples in encoder.encoded(rows):
        schema.values(examples)  # as a store would
        fates.add(batch.fates)
        rejected += [error.reason for error in batch.rejected]
        num_tokens += sum(len(part.tokens) for _, parts in examples for part in parts)
    return {
        **vars(fates),
        "num_tokens": num_tokens,
        "rejected": Counter(rejected),
        "rejected_file": "",
        "seq_len": split.data.seq_len,
        "split": f"first {plural(len(rows), 'row')} of the {split.name}",
    }


def nothing_left(
    path: str, rows_read: int, dropped: Mapping[str, int], rejects: RejectedRecords
) -> DataError:
    """The error for sources without a row to train on; says why rows were dropped."""
    parts = [f"{plural(rows_read, 'row')} read"]
    for fate, reasons in (("left out", dropped), ("rejected", rejects.counts)):
        if reasons:
            parts.append(f"{fate}: {counted(reasons)}")
    fix = "Check data.seq_len, data.over_long and the columns."
    if rejects.first:
        fix = f"The first: {rejects.first}"
    return DataError(f"{path}: no row is left to train on ({'; '.join(parts)}). {fix}")


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Rows by length, in at most ten steps of equal width."""
    longest = int(lengths.max())
    width = max(1, -(-longest // 10))
    edges = np.arange(1, longest + width + 1, width)
    return {"edges": edges.tolist(), "rows": np.histogram(lengths, edges)[0].tolist()}
