"""Precomputed columns: what a frozen model says of each example, computed once, beside the store.

    DIRECTORY_OF_THE_STORE.precomputed-<16 digits>/
        NAME.bin     the values by sequence or by example, in the order of the store; of a column by
                     token those of the target tokens
        meta.json    the identity, columns, counts, sizes, checksums

The digits name what the values are a function of: the store's own fingerprint, the model, the
precision and the task's code (``llmx.train.precompute``). While they are computed, what is done
lies in ``....partial/``, with a ``journal.json`` that says how many samples it holds; nothing reads
it but the continuation. Tried by ``python -m pytest tests/unit/test_data_store.py``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmx.data.examples import Column, listed
from llmx.data.store.samples import (
    SampleStore,
    cannot_write,
    locked,
    mapped,
    publish,
    read_meta,
)
from llmx.data.store.spec import fingerprint_of
from llmx.errors import ConfigError, DataError
from llmx.run.rundir import write_json

PRECOMPUTED_FORMAT = 1
"""The version of the files; other versions are computed again."""
WINDOW_BYTES = 256 << 20
"""Values that are in memory at a time, where one sample has fewer."""

Values = dict[str, np.ndarray]
"""Column name -> [sequences, ...], [examples, ...] or [target tokens, ...] of some samples."""


def place(column: Column) -> str:
    """The unit that has a precomputed value: ``sequence``, ``example``, or ``target`` for a column
    by token, since only values of target tokens are used."""
    return "target" if column.per == "token" else column.per


@dataclass(frozen=True)
class Precomputed:
    """The precomputed columns of a store, whether they are there or not."""

    store: SampleStore
    columns: tuple[Column, ...]
    identity: dict[str, Any]
    """Everything besides the store that decides the values."""

    @property
    def path(self) -> Path:
        """Their directory, whether it exists or not."""
        decides = {
            "format_version": PRECOMPUTED_FORMAT,
            "store": self.store.fingerprint,
            "columns": [asdict(column) for column in self.columns],
            **self.identity,
        }
        name = f"{self.store.path.name}.precomputed-{fingerprint_of(decides)[:16]}"
        return self.store.path.with_name(name)

    def rows(self, column: Column, first: int, last: int) -> slice:
        """The values of the samples ``first`` to ``last - 1`` among all of a column."""
        return self.store.span(place(column), first, last)

    @property
    def window(self) -> int:
        """Samples whose values take ``WINDOW_BYTES`` together, about; at least one."""
        total_bytes = sum(self._bytes(column, len(self.store)) for column in self.columns)
        return max(1, WINDOW_BYTES * len(self.store) // max(1, total_bytes))

    def _bytes(self, column: Column, samples: int) -> int:
        """The size of a column's values for the first ``samples``."""
        return int(self.rows(column, 0, samples).stop) * column.value_bytes

    def open(self) -> SampleStore | None:
        """The store with these columns, memory-mapped; None where they are not there.

        Raises DataError where a file has not the size that was written.
        """
        if not (self.path / "meta.json").exists():
            return None
        read_meta(self.path, version=PRECOMPUTED_FORMAT)
        return self.store.with_columns(
            {
                column: mapped(self.path / f"{column.name}.bin", column.numpy_dtype, column.shape)
                for column in self.columns
            }
        )

    def publish(self, *, facts: Mapping[str, Any]) -> None:
        """Move the recorded values to the directory, all or nothing, unless it exists already.
        ``facts``: further entries of meta.json."""

        def fill(directory: Path) -> dict[str, Any]:
            for column in self.columns:
                recorded, file = self._recorded(column), directory / f"{column.name}.bin"
                recorded.rename(file) if recorded.exists() else file.touch()
                os.truncate(file, self._bytes(column, len(self.store)))
            return {
                "format_version": PRECOMPUTED_FORMAT,
                "store": self.store.fingerprint,
                "identity": self.identity,
                "columns": [asdict(column) for column in self.columns],
                "num_samples": len(self.store),
                **facts,
            }

        with locked(self.path):
            if not (self.path / "meta.json").exists():
                if (done := self.recorded()) != len(self.store):
                    raise DataError(
                        f"{self._partial} holds the columns of {done} of {len(self.store)} "
                        "samples: something else has changed it. Start again."
                    )
                publish(self.path, fill)
            shutil.rmtree(self._partial, ignore_errors=True)

    # What is done, as it grows, and after an interruption

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial")

    def _recorded(self, column: Column) -> Path:
        return self._partial / f"{column.name}.bin"

    def record(self, values: Values, first: int, last: int) -> None:
        """Keep the values of the samples ``first`` to ``last - 1``: those before them are kept
        already. Raises DataError where the disk does not take them."""
        directory = self._partial
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for column in self.columns:
                path = self._recorded(column)
                with path.open("r+b" if path.exists() else "w+b") as stream:
                    stream.seek(self.rows(column, first, last).start * column.value_bytes)
                    values[column.name].tofile(stream)
                    stream.flush()
                    os.fsync(stream.fileno())
            write_json(directory / "journal.json", {"samples": last})
        except OSError as error:
            raise cannot_write(directory.parent, error) from error

    def recorded(self) -> int:
        """The number of samples, from the first one, whose values are recorded."""
        try:
            text = (self._partial / "journal.json").read_text("utf-8")
            done = int(json.loads(text)["samples"])
            if not 0 <= done <= len(self.store):
                return 0
            for column in self.columns:
                if self._recorded(column).stat().st_size < self._bytes(column, done):
                    return 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return done


def check_values(
    tensors: Mapping[str, Any], columns: Sequence[Column], counts: Mapping[str, int], *, task: str
) -> Values:
    """The values of ``Task.precompute`` as arrays. ``counts``: of the batch, by ``place``.

    Raises:
        ConfigError: other columns, or other shapes, than are declared.
        DataError: a value that is not finite.
    """
    if set(tensors) != {column.name for column in columns}:
        raise ConfigError(
            f"task={task}: precompute() gave {listed(tensors) if tensors else 'nothing'}; "
            f"`precomputed` declares {listed(column.name for column in columns)}."
        )
    values: Values = {}
    for column in columns:
        array = np.asarray(tensors[column.name].detach().cpu().numpy())
        shape = (counts[place(column)], *column.shape)
        if array.shape != shape:
            by = "target token" if column.per == "token" else column.per
            raise ConfigError(
                f"task={task}: precompute() gave {column.name} in the shape {array.shape}; by {by} "
                f"it is {shape} here."
            )
        with np.errstate(over="ignore"):  # refused below
            values[column.name] = array.astype(column.numpy_dtype)
        if column.numpy_dtype.kind == "f" and not np.isfinite(values[column.name]).all():
            raise DataError(
                f"The precomputed column {column.name} has a value that is not finite: the frozen "
                "model overflows, or its weights are damaged. Check the model; with precision=fp16 "
                "try precision=bf16 or fp32."
            )
    return values
