"""Prepares data once: read, encode, tokenize, pack, store; found again when nothing changed.

    store = prepare(exp.data, exp.seed, tokenizer, task, split="train")
    print(summary(store))

A second process that wants the same waits for the first and uses its work. A preparation that was
killed resumes where its state was noted last; a disk that fills up loses nothing either.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmx import text as human
from llmx.config import DataConfig
from llmx.data.examples import Encoding, over_long_of
from llmx.data.format.rendering import NOTES
from llmx.data.progress import PreparationProgress
from llmx.data.source.records import (
    RejectedRecords,
    RejectedUnwritten,
    Row,
    counted,
    excerpt,
    names,
    write_rejected,
)
from llmx.data.split import DatasetSplit
from llmx.data.store.samples import STORE_FORMAT, SampleStore, cannot_write, locked, publish
from llmx.data.store.spec import DatasetSpec, dataset_spec, renderer_of
from llmx.data.store.staging import Staging
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.documents import parallel_tokenizers, worker_count
from llmx.data.tokenize.encoder import UNANSWERED, ExampleEncoder
from llmx.data.tokenize.truncation import CUT_OFF, OVERFLOW, SPLIT, TRUNCATED, Truncation
from llmx.errors import DataError, LlmxError, disk_is_full
from llmx.text import plural, printable


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


# Build: from the sources to staged examples


def build(spec: DatasetSpec) -> SampleStore:
    """Prepare ``spec``; the caller holds its lock. An error leaves what the next preparation
    resumes from where the disk is full, and nothing where the data is wrong."""
    split = spec.split
    directory = spec.path.with_name(f"{spec.path.name}.partial")
    try:
        staging = Staging(directory, spec.encoding.columns)
        refused = RejectedRecords(directory / "refused.jsonl", state=staging.state.get("refused"))
    except OSError as error:
        raise cannot_write(directory.parent, error) from error
    progress = PreparationProgress(
        f"Preparing {spec.path.name}",
        total_bytes=split.total_bytes,
        read=lambda: split.meter.bytes,
    )
    started = time.monotonic()
    workers = worker_count(spec.data.num_workers)
    resumed_rows = staging.state.get("counts", {}).get("rows", 0)
    try:
        counts, encoder = _stage(spec, staging, refused, progress, workers=workers)
        how = {
            "encoder": encoder,
            "workers": workers,
            "text_bytes": progress.bytes,
            "tokenize_seconds": round(time.monotonic() - started, 3),
            "resumed_at_row": resumed_rows,
        }
        store = _finalize(spec, staging, counts, refused, how=how)
    except (LlmxError, OSError) as error:
        if isinstance(error, RejectedUnwritten):
            raise DataError(f"{error} {_kept(spec, staging)}") from error
        if disk_is_full(error):
            raise _disk_full(spec, staging, progress) from error
        # A record that is wrong: nothing to resume from. After a kill there is.
        staging.remove()
        if isinstance(error, OSError):
            raise cannot_write(directory.parent, error) from error
        raise
    finally:
        refused.close()
    staging.remove()
    return store


def _stage(
    spec: DatasetSpec,
    staging: Staging,
    refused: RejectedRecords,
    progress: PreparationProgress,
    *,
    workers: int,
) -> tuple[Counter[str], str]:
    """Stage the examples of the records, from where it was left; returns what became of the
    records (``rows`` that were read, ``truncated`` and their tokens that are cut off, the dropped
    ones by their reason), and what they were encoded with.

    A function of its own, so that its tables are gone when samples are put together.
    """
    split, rows = spec.split, spec.split.rows()
    counts: Counter[str] = Counter(staging.state.get("counts", {}))
    split.look_ahead()
    with parallel_tokenizers(workers), progress:
        encoder = ExampleEncoder(split, spec.renderer, spec.encoding, workers=workers)
        truncation = _truncation(split, spec.renderer, spec.encoding, counts)
        if counts["rows"]:
            next(islice(rows, counts["rows"], counts["rows"]), None)
            progress.begin_here()
        for batch, block in encoder.blocks(rows):
            for error in batch.rejected:
                refused.add(error)
            counts.update(batch.counts)
            staging.append(truncation(batch.examples, block))
            progress.add(size=batch.size, tokens=len(block.tokens))
            staging.record({"counts": dict(counts), "refused": refused.state})
    return counts, encoder.description


def _disk_full(spec: DatasetSpec, staging: Staging, progress: PreparationProgress) -> DataError:
    """Names the path, what is kept and how much is needed. What was noted stays."""
    partial = staging.directory
    # Samples that are put together from anywhere are written beside the staged rows.
    times = 1 if spec.data.packing == "concat" else 2
    written = times * sum(file.stat().st_size for file in partial.iterdir())
    done = progress.fraction()
    need = f"about {human.size(written / done)}" if done else f"more than {human.size(written)}"
    need = f"needs {need} in all, " if written else "has no room: "
    directory = partial.parent
    stays = _kept(spec, staging)
    free = human.size(shutil.disk_usage(directory).free)
    return DataError(
        f"The disk of {directory} is full: {spec.path.name} {need}"
        f"{free} are free now. {stays} What was prepared earlier is untouched. Free some space, or "
        "set data.cache_dir to another disk."
    )


def _kept(spec: DatasetSpec, staging: Staging) -> str:
    """Closes what is staged at what was noted last, and says what that is."""
    partial = staging.directory
    staging.abandon()
    staging = Staging(partial, spec.encoding.columns)  # cuts off what was not noted
    rows = staging.state.get("counts", {}).get("rows", 0)
    if rows:
        staging.close()
        return (
            f"The first {rows:,} rows are kept in {partial}; the next preparation resumes "
            "there. Remove the directory to start again."
        )
    staging.remove()
    return "No part of it is kept."


# Finalize: from staged examples to a store with its meta.json


def _finalize(
    spec: DatasetSpec,
    staging: Staging,
    rows: Counter[str],
    refused: RejectedRecords,
    *,
    how: dict[str, Any],
) -> SampleStore:
    """Pack the examples and publish the store. ``rows``: what became of them; ``how``: what else is
    worth to know, for meta.json.

    Raises DataError where no row is left, or where it cannot be written.
    """
    data, split, path = spec.data, spec.split, spec.path
    rejects = (split.rejects, refused)
    unread = names(file.name for source in split.sources for file in source.files_by_use[1])
    # Before the encoder come those that the sources leave out or reject.
    rows["rows"] += split.left_out.total() + split.rejects.counts.total()
    rows.update(split.left_out)
    fates = _fates(rows)
    if unread:
        fates["notes"]["files of other splits, which were not read"] = unread
    rejected = split.rejects.counts + refused.counts
    rejected_file = write_rejected(path.with_name(f"{path.name}.rejected.jsonl"), rejects)
    if not staging.lengths:
        raise nothing_left(printable(split.path), fates["rows_read"], fates["dropped"], rejects)
    lengths = staging.example_lengths
    percentiles = (0, 10, 50, 90, 99, 100)

    def fill(directory: Path) -> dict[str, Any]:
        counts = staging.gather(directory, packing=data.packing, seq_len=data.seq_len)
        return {
            "format_version": STORE_FORMAT,
            "fingerprint": spec.fingerprint,
            "seq_len": data.seq_len,
            **counts,
            "split": split.name,
            "columns": [column.to_dict() for column in spec.encoding.columns],
            "sources": _sources(spec),
            "form": split.form,
            "template": spec.renderer.template_name if split.has_conversations else None,
            "tokenizer": str(spec.renderer.tokenizer.name_or_path),
            "identity": spec.identity,
            **fates,
            "rejected": dict(rejected),
            "ignored_columns": split.ignored_columns,
            "rejected_file": rejected_file and str(rejected_file),
            "row_tokens": int(lengths.sum()),
            "row_length_percentiles": {
                str(rank): int(np.percentile(lengths, rank, method="higher"))
                for rank in percentiles
            },
            "row_length_histogram": _histogram(lengths),
            **how,
        }

    publish(path, fill)
    return SampleStore.open(path)


def _fates(counts: Counter[str]) -> dict[str, Any]:
    """What became of the rows, for meta.json."""
    keys = [key for key in counts if key.startswith(OVERFLOW)]
    return {
        "overflow": {key.removeprefix(OVERFLOW): counts.pop(key) for key in sorted(keys)},
        "rows_read": counts.pop("rows", 0),
        "truncated": counts.pop(TRUNCATED, 0),
        "truncated_tokens": counts.pop(CUT_OFF, 0),
        "split_sequences": counts.pop(SPLIT, 0),
        "unanswered_turns": counts.pop(UNANSWERED, 0),
        "notes": {note: count for note in NOTES if (count := counts.pop(note, 0))},
        "dropped": {reason: count for reason, count in counts.items() if count},
    }


def fates_of(
    rows: Sequence[Row | None], split: DatasetSplit, tokenizer: Any, encoding: Encoding
) -> dict[str, Any]:
    """What becomes of these rows of a split, by the names of meta.json; nothing is stored."""
    renderer, counts = renderer_of(split, tokenizer, encoding), Counter[str]()
    rejected, num_tokens = list[str](), 0
    encoder = ExampleEncoder(split, renderer, encoding, workers=1)
    truncation = _truncation(split, renderer, encoding, counts)
    for batch, block in encoder.blocks(rows):
        counts.update(batch.counts)
        rejected += [error.reason for error in batch.rejected]
        num_tokens += len(truncation(batch.examples, block).tokens)
    return {
        **_fates(counts),
        "num_tokens": num_tokens,
        "rejected": Counter(rejected),
        "rejected_file": "",
        "seq_len": split.data.seq_len,
        "split": f"first {plural(len(rows), 'row')} of the {split.name}",
    }


def _truncation(
    split: DatasetSplit, renderer: Renderer, encoding: Encoding, counts: Counter[str]
) -> Truncation:
    return Truncation(
        split.data,
        counts,
        bos=renderer.bos,
        eos=renderer.eos or (),
        splits=over_long_of(split, encoding) == "split",
        wraps=encoding.verbatim,
    )


def nothing_left(
    path: str, rows_read: int, dropped: dict[str, int], rejects: Sequence[RejectedRecords]
) -> DataError:
    """The error for sources without a row to train on; says why rows were dropped."""
    rejected: Counter[str] = Counter()
    for group in rejects:
        rejected.update(group.counts)
    parts = [f"{plural(rows_read, 'row')} read"]
    for fate, reasons in (("left out", dropped), ("rejected", rejected)):
        if reasons:
            parts.append(f"{fate}: {counted(reasons)}")
    first = next((group.first for group in rejects if group.first), "")
    fix = f"The first: {first}" if first else "Check data.seq_len, data.over_long and the columns."
    return DataError(f"{path}: no row is left to train on ({'; '.join(parts)}). {fix}")


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Rows by length, in at most 50 steps of equal width."""
    longest = int(lengths.max())
    width = max(1, -(-longest // 50))
    edges = np.arange(0, longest + width, width)
    return {"edges": edges.tolist(), "rows": np.histogram(lengths, edges)[0].tolist()}
