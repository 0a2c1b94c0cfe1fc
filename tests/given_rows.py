"""Rows that a test gives: as a file, as an experiment on it, and as the store that a task makes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llmx import data
from llmx.config import Experiment
from llmx.data import SampleStore, collate
from llmx.errors import DataError
from llmx.tasks import task_of, tokenizer_of
from tests.rundirs import experiment

Row = dict[str, Any]


def written(path: Path, rows: Iterable[Row]) -> str:
    """The path of a JSONL file of these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def experiment_on(
    directory: Path, kind: str, rows: Iterable[Row], options: Row | None = None, **data: Any
) -> Experiment:
    """An experiment of this task on ``directory/rows.jsonl``."""
    path = written(directory / "rows.jsonl", rows)
    return experiment(
        directory / "run",
        data={"path": path, "max_rows": None, "form": "auto", **data},
        task={"kind": kind, "options": options or {}},
    )


def prepared(exp: Experiment, tokenizer: Any = None) -> tuple[Any, SampleStore]:
    """The experiment's task, and its data as that prepares it."""
    tokenizer = tokenizer or tokenizer_of(exp)
    task = task_of(exp, tokenizer)
    return task, data.prepare(exp.data, exp.seed, tokenizer, task)


def sequences_of(store: SampleStore) -> list[tuple[int, ...]]:
    """The tokens of each sequence, in the order of the store."""
    samples = (store[number] for number in range(len(store)))
    return [tuple(tokens.tolist()) for one in samples for tokens, _ in one.sequences()]


def batch_of(store: SampleStore, *numbers: int) -> dict[str, Any]:
    """These samples as a packed micro batch; all of them if none is named."""
    samples = [store[number] for number in numbers or range(len(store))]
    columns = store.batch_columns
    return collate(samples, seq_len=store.seq_len, pad_id=0, layout="packed", columns=columns)


def assert_rejected(exp: Experiment, *, line: int, match: str = "") -> SampleStore:
    """Assert that a row is an error that names it, and where it is to be skipped is counted.
    The store without it."""
    with pytest.raises(DataError, match=match) as caught:
        prepared(exp)
    assert f"rows.jsonl, line {line}" in str(caught.value)
    exp.data.on_bad_row = "skip"
    _, store = prepared(exp)
    assert sum(store.meta["rejected"].values()) == 1
    return store
