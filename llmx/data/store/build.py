"""Prepares data once: read, encode, tokenize, pack, store; found again when nothing changed.

    store = prepare(exp.data, exp.seed, tokenizer, task, split="train")
    print(summary(store))

A second process that wants the same waits for the first and uses its work. A preparation that was
killed resumes where its state was noted last; a disk that fills up loses nothing either.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmx import text as human
from llmx.config import DataConfig
from llmx.data.examples import Encoding, TypedRecord
from llmx.data.source.progress import PreparationProgress
from llmx.data.source.records import excerpt
from llmx.data.source.rejected import RejectedRecords, RejectedUnwritten, counted, write_rejected
from llmx.data.store.samples import SampleStore, cannot_write, locked, publish
from llmx.data.store.spec import DatasetSpec, dataset_spec
from llmx.data.store.staging import Staging
from llmx.data.store.truncation import CUT_OFF, OVERFLOW, SPLIT, TRUNCATED, Truncation
from llmx.data.tokenize.encoder import PIECES, UNANSWERED, ExampleEncoder
from llmx.data.tokenize.workers import parallel_tokenizers, worker_count
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
    store = found(spec)
    if store is not None:
        return store
    with locked(spec.path):
        return found(spec) or build(spec)


def found(spec: DatasetSpec) -> SampleStore | None:
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
    return store


def note_old_stores(spec: DatasetSpec) -> None:
    """Say that what an earlier version prepared is prepared again, and where it lies."""
    if old := spec.old_stores:
        listed = " and ".join(printable(str(path)) for path in old)
        print(
            f"{spec.path.name} is prepared again: this version of llmx stores prepared data in "
            f"another format. {listed} can be deleted once no earlier version uses it.",
            flush=True,
        )


# Build: from the sources to staged examples


def build(spec: DatasetSpec) -> SampleStore:
    """Prepare ``spec`` on this host; the caller holds its lock."""
    note_old_stores(spec)
    split = spec.split
    progress = PreparationProgress(
        f"Preparing {spec.path.name}",
        total_bytes=split.total_bytes,
        read=lambda: split.meter.bytes,
    )
    with staging_in(spec, spec.path.with_name(f"{spec.path.name}.partial"), progress) as staging:
        store = _built(spec, staging, progress)
    staging.remove()
    return store


@contextlib.contextmanager
def staging_in(
    spec: DatasetSpec, directory: Path, progress: PreparationProgress
) -> Iterator[Staging]:
    """A staging for the examples of ``spec``. An error leaves what the next preparation resumes
    from where the disk is full, and nothing where the data is wrong."""
    try:
        staging = Staging(directory, spec.encoding.columns)
    except OSError as error:
        raise cannot_write(directory.parent, error) from error
    try:
        yield staging
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


@dataclass
class Counts:
    """What became of the rows, beside the tokens that are staged."""

    rows: Counter[str] = field(default_factory=Counter)
    """``rows`` that were read, ``truncated`` and their tokens that are cut off, and the dropped
    ones by their reason."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Good rows that were not wanted, by reason."""
    rejects: Sequence[RejectedRecords] = ()
    """Rows that are wrong."""
    ignored_columns: Sequence[str] = ()
    """Columns that were read and not used."""


def _built(spec: DatasetSpec, staging: Staging, progress: PreparationProgress) -> SampleStore:
    started = time.monotonic()
    resumed_rows = staging.state.get("counts", {}).get("rows", 0)
    workers = worker_count(spec.data.num_workers)
    counts, encoder = stage(spec, staging, spec.split.records(), progress, workers=workers)
    how = {
        "encoder": encoder,
        "workers": workers,
        "hosts": 1,
        "text_bytes": progress.bytes,
        "tokenize_seconds": round(time.monotonic() - started, 3),
        "resumed_at_row": resumed_rows,
    }
    try:
        return finalize(spec, staging, counts, how=how)
    finally:
        counts.rejects[1].close()


def stage(
    spec: DatasetSpec,
    staging: Staging,
    rows: Iterator[TypedRecord | None],
    progress: PreparationProgress,
    *,
    workers: int,
) -> tuple[Counts, str]:
    """Stage the examples of these records, from where it was left; returns what became of the
    records, and what they were encoded with.

    A function of its own, so that its tables are gone when samples are put together.
    """
    split, state = spec.split, staging.state
    counts: Counter[str] = Counter(state.get("counts", {}))
    refused = RejectedRecords(staging.directory / "refused.jsonl", state=state.get("refused"))
    split.look_ahead()
    with parallel_tokenizers(workers), progress:
        encoder = ExampleEncoder(
            split, spec.renderer, spec.encoding, workers=workers, refused=refused
        )
        truncation = Truncation(
            spec.data,
            counts,
            bos=spec.renderer.bos,
            eos=spec.renderer.eos or (),
            splits=spec.identity["over_long"] == "split",
            wraps=spec.encoding.verbatim,
            state=state.get("truncation"),
        )
        if counts["rows"]:
            next(islice(rows, counts["rows"], counts["rows"]), None)
            progress.begin_here()
        for encoded in encoder.blocks(rows, begins=not truncation.state[0]):
            counts.update(encoded.counts)
            block, joins = truncation(encoded.examples, encoded.block)
            staging.append(block, joins=joins)
            progress.add(size=encoded.size, tokens=len(encoded.block.tokens))
            staging.record(
                {"counts": dict(counts), "truncation": truncation.state, "refused": refused.state}
            )
    rejects = (split.rejects, refused)
    return Counts(counts, split.left_out, rejects, split.ignored_columns), encoder.description


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


# Finalize: from staged examples to a store with its meta.json; the same on one host and on many


def finalize(
    spec: DatasetSpec, staging: Staging, counts: Counts, *, how: dict[str, Any]
) -> SampleStore:
    """Pack the examples and publish the store. ``how``: what else is worth to know, for meta.json.

    Raises DataError where no row is left, or where it cannot be written.
    """
    data, split, path = spec.data, spec.split, spec.path
    rows = Counter(counts.rows)
    rows_read, truncated = rows.pop("rows", 0) - rows.pop(PIECES, 0), rows.pop(TRUNCATED, 0)
    cut_off, unanswered = rows.pop(CUT_OFF, 0), rows.pop(UNANSWERED, 0)
    further = rows.pop(SPLIT, 0)
    keys = [key for key in rows if key.startswith(OVERFLOW)]
    overflow = {key.removeprefix(OVERFLOW): rows.pop(key) for key in sorted(keys)}
    # Before the encoder come those that the sources leave out or reject.
    rows_read += counts.left_out.total() + sum(g.counts.total() for g in counts.rejects[:1])
    rows.update(counts.left_out)
    dropped = {reason: count for reason, count in rows.items() if count}
    rejected: Counter[str] = Counter()
    for group in counts.rejects:
        rejected.update(group.counts)
    rejected_file = write_rejected(path.with_name(f"{path.name}.rejected.jsonl"), counts.rejects)
    if not staging.lengths:
        raise nothing_left(printable(split.path), rows_read, dropped, counts.rejects)
    lengths = staging.example_lengths
    return publish(
        path,
        lambda directory: staging.gather(directory, packing=data.packing, seq_len=data.seq_len),
        fingerprint=spec.fingerprint,
        seq_len=data.seq_len,
        meta={
            "split": split.name,
            "columns": [column.to_dict() for column in spec.encoding.columns],
            "sources": [str(file.absolute()) for file in split.files],
            "form": split.form,
            "template": spec.renderer.template_name if split.has_conversations else None,
            "tokenizer": str(spec.renderer.tokenizer.name_or_path),
            "identity": spec.identity,
            "rows_read": rows_read,
            "truncated": truncated,
            "truncated_tokens": cut_off,
            "split_sequences": further,
            "overflow": overflow,
            "unanswered_turns": unanswered,
            "dropped": dropped,
            "rejected": dict(rejected),
            "ignored_columns": list(counts.ignored_columns),
            "rejected_file": rejected_file and str(rejected_file),
            "row_tokens": int(lengths.sum()),
            "row_length_percentiles": _percentiles(lengths),
            "row_length_histogram": _histogram(lengths),
            **how,
        },
    )


def nothing_left(
    path: str, rows_read: int, dropped: dict[str, int], rejects: Sequence[RejectedRecords]
) -> DataError:
    """For sources of which no row is left to train on: what became of the rows, and why."""
    rejected: Counter[str] = Counter()
    for group in rejects:
        rejected.update(group.counts)
    parts = [f"{plural(rows_read, 'row')} read"]
    for what, reasons in (("left out", dropped), ("rejected", rejected)):
        if reasons:
            parts.append(f"{what}: {counted(reasons)}")
    first = next((group.first for group in rejects if group.first), "")
    fix = f"The first: {first}" if first else "Check data.seq_len, data.over_long and the columns."
    return DataError(f"{path}: no row is left to train on ({'; '.join(parts)}). {fix}")


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
