"""From all rows in a spool to a store with its meta.json; the same on one host and on many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmx.data.blocks import UNANSWERED
from llmx.data.fit import CUT_OFF
from llmx.data.pack import PACKERS
from llmx.data.rejects import Rejects, counted, write_rejects
from llmx.data.spool import Spool
from llmx.data.store import SampleStore, publish
from llmx.data.wanted import Wanted
from llmx.errors import DataError
from llmx.text import plural, printable


@dataclass
class Tally:
    """What became of the rows, beside the tokens in the spool."""

    counts: Counter[str] = field(default_factory=Counter)
    """``rows`` that were read, ``truncated`` and their tokens that are cut off, and the dropped
    ones by their reason."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Good rows that were not wanted, by reason."""
    rejects: Sequence[Rejects] = ()
    """Rows that are wrong."""
    ignored_columns: Sequence[str] = ()
    """Columns that were read and not used."""


def finish(
    wanted: Wanted, spool: Spool, tally: Tally, *, how: dict[str, Any], split: str
) -> SampleStore:
    """Pack the rows and publish the store. ``how``: what else is worth to know, for meta.json.

    Raises DataError where no row is left, or where it cannot be written.
    """
    data, source, path = wanted.data, wanted.source, wanted.path
    counts = Counter(tally.counts)
    rows_read, truncated = counts.pop("rows", 0), counts.pop("truncated", 0)
    cut_off, unanswered = counts.pop(CUT_OFF, 0), counts.pop(UNANSWERED, 0)
    counts.update(tally.left_out)
    dropped = {reason: count for reason, count in counts.items() if count}
    rejected: Counter[str] = Counter()
    for group in tally.rejects:
        rejected.update(group.counts)
    rejected_file = write_rejects(path.with_name(f"{path.name}.rejected.jsonl"), tally.rejects)
    if not spool.lengths:
        rows_read += tally.left_out.total() + sum(g.counts.total() for g in tally.rejects[:1])
        raise nothing_left(printable(source.path), rows_read, dropped, tally.rejects)
    lengths = np.frombuffer(spool.lengths, np.int64)
    packing = PACKERS[data.packing](lengths, capacity=data.seq_len)
    return publish(
        path,
        lambda directory: spool.gather(packing, directory),
        fingerprint=wanted.fingerprint,
        seq_len=data.seq_len,
        meta={
            "split": split,
            "sources": [str(file.absolute()) for file in source.files],
            "form": source.form,
            "template": wanted.renderer.template_name if source.has_conversations else None,
            "tokenizer": str(wanted.renderer.tokenizer.name_or_path),
            "identity": wanted.identity,
            "rows_read": rows_read,
            "truncated": truncated,
            "truncated_tokens": cut_off,
            "unanswered_turns": unanswered,
            "dropped": dropped,
            "rejected": dict(rejected),
            "ignored_columns": list(tally.ignored_columns),
            "rejected_file": rejected_file and str(rejected_file),
            "row_tokens": int(lengths.sum()),
            "row_length_percentiles": _percentiles(lengths),
            "row_length_histogram": _histogram(lengths),
            **how,
        },
    )


def nothing_left(
    path: str, rows_read: int, dropped: dict[str, int], rejects: Sequence[Rejects]
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
