"""A store of samples that are given, not prepared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import WEIGHT, Column, Schema
from llmx.data.store.packing import borders
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
    """Write a store of these samples."""
    head = {"format_version": STORE_FORMAT, "fingerprint": fingerprint, "seq_len": seq_len}
    head["columns"] = [asdict(column) for column in columns]

    def fill(directory: Path) -> dict[str, Any]:
        return {**head, **_write_arrays(directory, list(samples), columns), **meta}

    publish(path, fill)
    return SampleStore.open(path)


def _write_arrays(
    directory: Path, samples: list[Sample], columns: tuple[Column, ...]
) -> dict[str, Any]:
    weighted = Schema(columns).weighted
    types: dict[str, Any] = {"tokens": np.uint32}
    types |= {column.name: column.numpy_dtype for column in columns}
    types |= {} if weighted else {"targets": np.uint8}
    weights = [each.targets if each.weights is None else each.weights for each in samples]
    arrays = [
        {**each.columns, "tokens": each.tokens, "targets": each.targets, WEIGHT: weight}
        for each, weight in zip(samples, weights, strict=True)
    ]
    for name, dtype in types.items():
        content = b"".join(np.asarray(each[name], dtype).tobytes() for each in arrays)
        (directory / f"{name}.bin").write_bytes(content)
    lengths = [stop - start for each in samples for start, stop in each.bounds()]
    index = {
        "samples": borders([len(each.example_sizes()) for each in samples]),
        "examples": borders([size for each in samples for size in each.example_sizes()]),
        "sequences": borders(lengths),
        "offsets": borders(lengths)[:-1],
        "target_counts": [np.count_nonzero(each.targets) for each in samples],
    }
    sums = np.array([np.sum(weight, dtype=np.float64) for weight in weights])
    return save_index(directory, index, sums if weighted else None)
