"""A store of samples that are given, not prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import WEIGHT, Column, Schema
from llmx.data.store.samples import STORE_FORMAT, Sample, SampleStore, publish, save_index


def write_store(
    path: Path,
    samples: Iterable[Sample],
    *,
    fingerprint: str,
    seq_len: int,
    meta: dict[str, Any],
    columns: tuple[Column, ...] = (),
) -> SampleStore:
    """Write a store of these samples, which are streamed: memory holds the indices only."""
    head = {"format_version": STORE_FORMAT, "fingerprint": fingerprint, "seq_len": seq_len}
    head["columns"] = [asdict(column) for column in columns]
    publish(path, lambda directory: {**head, **_write_arrays(directory, samples, columns), **meta})
    return SampleStore.open(path)


def _write_arrays(
    directory: Path, samples: Iterable[Sample], columns: tuple[Column, ...]
) -> dict[str, Any]:
    weighted = Schema(columns).weighted
    types: dict[str, Any] = {"tokens": np.uint32}
    types |= {column.name: column.numpy_dtype for column in columns}
    types |= {} if weighted else {"targets": np.uint8}
    sample_starts, example_starts, sequence_starts = [0], [0], [0]
    target_counts: list[int] = []
    weights: list[float] = []
    with contextlib.ExitStack() as stack:
        streams = {
            name: stack.enter_context((directory / f"{name}.bin").open("wb")) for name in types
        }
        for sample in samples:
            values = {**sample.columns, "tokens": sample.tokens, "targets": sample.targets}
            if weighted:
                values[WEIGHT] = sample.targets if sample.weights is None else sample.weights
                weights.append(float(np.sum(values[WEIGHT], dtype=np.float64)))
            for name, dtype in types.items():
                streams[name].write(np.ascontiguousarray(values[name], dtype=dtype).tobytes())
            for start, stop in sample.bounds():
                sequence_starts.append(sequence_starts[-1] + stop - start)
            for size in sample.example_sizes():
                example_starts.append(example_starts[-1] + size)
            sample_starts.append(len(example_starts) - 1)
            target_counts.append(int(np.count_nonzero(sample.targets)))
    return save_index(
        directory,
        samples=sample_starts,
        examples=example_starts,
        sequences=sequence_starts,
        offsets=sequence_starts[:-1],
        target_counts=target_counts,
        weights=weights if weighted else None,
    )
