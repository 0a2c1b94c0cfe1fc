"""Precomputed columns: what a frozen model says of each example, computed once, beside the store.

    DIRECTORY_OF_THE_STORE.precomputed-<16 digits>/
        NAME.bin     the values by sequence or by example, in the order of the store
        meta.json    the identity, columns, counts, sizes, checksums

The digits name what the values are a function of: the store's own fingerprint, the model, the
precision and the task's code (``llmx.train.precompute``). While they are computed, what is done
lies in ``....partial/``, with a ``journal.json`` that says how many samples it holds; nothing reads
it but the continuation. Tried by ``python -m pytest tests/unit/test_data_precomputed.py``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import Column
from llmx.data.store.samples import (
    SampleStore,
    cannot_write,
    check_sizes,
    locked,
    publish_files,
)
from llmx.data.store.spec import fingerprint_of
from llmx.errors import ConfigError, DataError
from llmx.run.rundir import write_json

PRECOMPUTED_FORMAT = 1
"""Of the files; another one is computed again."""
PLACES = ("sequence", "example")

Values = dict[str, np.ndarray]
"""Column name -> [sequences, ...] or [examples, ...]."""


@dataclass(frozen=True)
class Precomputed:
    """The precomputed columns of a store, whether they are there or not."""

    store: SampleStore
    columns: tuple[Column, ...]
    identity: dict[str, Any]
    """What decides the values, besides the store."""

    def __post_init__(self) -> None:
        for column in self.columns:
            if column.per not in PLACES:
                raise ConfigError(
                    f"The precomputed column {column.name}: per={column.per!r}; values are "
                    "precomputed by sequence or by example."
                )

    @property
    def path(self) -> Path:
        """Where they lie, or will lie."""
        decides = {
            "format_version": PRECOMPUTED_FORMAT,
            "store": self.store.fingerprint,
            "columns": [column.to_dict() for column in self.columns],
            **self.identity,
        }
        name = f"{self.store.path.name}.precomputed-{fingerprint_of(decides)[:16]}"
        return self.store.path.with_name(name)

    def empty(self) -> Values:
        """Zeros for every value."""
        return {
            column.name: np.zeros((self.store.count(column.per), *column.shape), column.numpy_dtype)
            for column in self.columns
        }

    def parts(self, values: Values, first: int, last: int) -> Iterator[np.ndarray]:
        """The values of the samples ``first`` to ``last - 1``: views, in the order of columns."""
        for column in self.columns:
            yield values[column.name][self.store.span(column.per, first, last)]

    def open(self) -> SampleStore | None:
        """The store with these columns, memory-mapped; None where they are not there.

        Raises DataError where a file has not the size that was written.
        """
        try:
            meta = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, json.JSONDecodeError) as error:
            raise DataError(
                f"{self.path} cannot be read ({error}). Remove the directory; its columns are "
                "computed again."
            ) from error
        check_sizes(self.path, meta)
        return self.store.with_columns({column: self._mapped(column) for column in self.columns})

    def _mapped(self, column: Column) -> np.ndarray:
        shape = (self.store.count(column.per), *column.shape)
        if not np.prod(shape):  # mmap refuses an empty file
            return np.zeros(shape, column.numpy_dtype)
        return np.memmap(self.path / f"{column.name}.bin", column.numpy_dtype, "r", shape=shape)

    def publish(self, values: Values, *, how: Mapping[str, Any]) -> None:
        """Write the directory, whole or not at all; nothing where it is there already. ``how``:
        what else is worth to know, for meta.json."""

        def fill(directory: Path) -> dict[str, Any]:
            for column in self.columns:
                values[column.name].tofile(directory / f"{column.name}.bin")
            return {
                "format_version": PRECOMPUTED_FORMAT,
                "store": self.store.fingerprint,
                "identity": self.identity,
                "columns": [column.to_dict() for column in self.columns],
                "num_samples": len(self.store),
                **how,
            }

        with locked(self.path):
            if not (self.path / "meta.json").exists():
                publish_files(self.path, fill)

    # What is done of a computation that was interrupted

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial")

    def record(self, values: Values, first: int, last: int) -> None:
        """Keep the values of the samples ``first`` to ``last - 1``: those before them are kept
        already. Raises DataError where the disk does not take them."""
        directory = self._partial
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for column, part in zip(self.columns, self.parts(values, first, last), strict=True):
                path = directory / f"{column.name}.bin"
                with path.open("r+b" if path.exists() else "w+b") as stream:
                    stream.seek(self.store.span(column.per, first, last).start * column.value_bytes)
                    stream.write(part.tobytes())
                    stream.flush()
                    os.fsync(stream.fileno())
            write_json(directory / "journal.json", {"samples": last})
        except OSError as error:
            raise cannot_write(directory.parent, error) from error

    def recorded(self, values: Values) -> int:
        """Read what is kept into ``values``; returns of how many samples that is, from the first
        one."""
        directory = self._partial
        try:
            done = int(json.loads((directory / "journal.json").read_text("utf-8"))["samples"])
            if not 0 <= done <= len(self.store):
                return 0
            for column, part in zip(self.columns, self.parts(values, 0, done), strict=True):
                found = np.fromfile(
                    directory / f"{column.name}.bin", column.numpy_dtype, count=part.size
                )
                part[...] = found.reshape(part.shape)
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return done

    def forget(self) -> None:
        """Remove what was kept of an interrupted computation."""
        shutil.rmtree(self._partial, ignore_errors=True)


def check_values(
    found: Mapping[str, Any], columns: Sequence[Column], counts: Mapping[str, int], *, task: str
) -> Values:
    """What ``Task.precompute`` gave, as arrays. ``counts``: sequences and examples of the batch.

    Raises:
        ConfigError: other columns, or other shapes, than are declared.
        DataError: a value that is not finite.
    """
    wanted = {column.name for column in columns}
    if set(found) != wanted:
        raise ConfigError(
            f"task={task}: precompute() gave {', '.join(sorted(found)) or 'nothing'}; "
            f"`precomputed` declares {', '.join(sorted(wanted))}."
        )
    values: Values = {}
    for column in columns:
        array = np.asarray(found[column.name].detach().cpu().numpy())
        shape = (counts[column.per], *column.shape)
        if array.shape != shape:
            raise ConfigError(
                f"task={task}: precompute() gave {column.name} in the shape {array.shape}; by "
                f"{column.per} it is {shape} here."
            )
        values[column.name] = array.astype(column.numpy_dtype)
        if column.numpy_dtype.kind == "f" and not np.isfinite(values[column.name]).all():
            raise DataError(
                f"The precomputed column {column.name} has a value that is not finite: the frozen "
                "model overflows, or its weights are damaged. Check the model; with precision=fp16 "
                "try precision=bf16 or fp32."
            )
    return values
