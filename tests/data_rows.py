"""Experiments on a few rows of data, and what is read back of their stores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from llmx import data
from llmx.config import Experiment
from llmx.data import SampleStore, collate
from llmx.data.examples import TokenSequence
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.errors import DataError
from llmx.tasks import task_of, tokenizer_of
from tests.rundirs import experiment
from tests.small_tokenizers import byte_tokenizer

WHERE = Where(Path("rows.jsonl"), 7, "line")
CHATML = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if 'no' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{{ ('Q' if m['role'] == 'user' else 'A') + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A' }}{% endif %}"
)
"""Refuses a conversation that begins with a "no"."""


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A turn of OpenAI's messages."""
    return {"role": role, "content": content, **more}


def chat(*contents: str, system: str = "", **more: Any) -> Conversation:
    """Questions and answers by turns, behind a system message."""
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)]
    first = [Message("system", system)] if system else []
    return Conversation((*first, *messages), WHERE, **more)


USER, BOT = turn("user", "q"), turn("assistant", "a")


def row_tokenizer(*control: str) -> PreTrainedTokenizerFast:
    """Of the template above."""
    return byte_tokenizer("<|end|>", *control, chat_template=TEMPLATE)


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A file of JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def of_rows(
    directory: Path, rows: Iterable[Any] | str | bytes, name: str = "rows.jsonl", **options: Any
) -> Experiment:
    """An experiment on these rows, with a cache of its own; ``options`` are those of data."""
    path = directory / name
    if isinstance(rows, str | bytes):
        path.write_bytes(rows.encode() if isinstance(rows, str) else rows)
    else:
        write_rows(path, rows)
    exp = Experiment()
    small = {"path": str(path), "cache_dir": str(directory / "cache"), "seq_len": 64}
    for key, value in (small | options).items():
        setattr(exp.data, key, value)
    return exp


def chat_row(i: int) -> dict[str, str]:
    """Some have no answer, some have another key, some are refused by the template."""
    question = f"no {i}" if i % 11 == 5 else f"q{i}" * (i % 9 + 1)
    answer = "" if i % 17 == 3 else f"a{i}"
    return {"prompt": question, "answer" if i % 23 == 7 else "response": answer}


def of_text(directory: Path, rows: Iterable[Any] | str, **data: Any) -> Experiment:
    """Pretraining on a text, or on the documents of rows."""
    name = "corpus.txt" if isinstance(rows, str) else "rows.jsonl"
    exp = of_rows(directory, rows, name, **{"seq_len": 32, "packing": "concat", **data})
    exp.task.kind = "pretrain"
    return exp


def sequences(store: SampleStore) -> list[TokenSequence]:
    """Every sequence of a store, in its order."""
    return [TokenSequence(*pair) for i in range(len(store)) for pair in store[i].sequences()]


def texts(store: SampleStore, tokenizer: Any) -> list[str]:
    """Every sequence as text."""
    return [tokenizer.decode(one.tokens) for one in sequences(store)]


def learned(tokenizer: Any, row: TokenSequence) -> list[str]:
    """The text of every run of targets."""
    runs: list[list[int]] = []
    before = False
    for token, target in zip(row.tokens.tolist(), row.targets.tolist(), strict=True):
        if target and not before:
            runs.append([])
        if target:
            runs[-1].append(token)
        before = target
    return [tokenizer.decode(run) for run in runs]


# Rows as a task makes samples of them

Row = dict[str, Any]


def experiment_on(
    directory: Path, kind: str, rows: Iterable[Row], options: Row | None = None, **changes: Any
) -> Experiment:
    """An experiment of this task on ``directory/rows.jsonl``."""
    path = str(write_rows(directory / "rows.jsonl", rows))
    return experiment(
        directory / "run",
        data={"path": path, "max_rows": None, "form": "auto", **changes},
        task={"kind": kind, "options": options or {}},
    )


def prepared(exp: Experiment, tokenizer: Any = None) -> tuple[Any, SampleStore]:
    """The experiment's task, and its data as that prepares it."""
    tokenizer = tokenizer or tokenizer_of(exp)
    task = task_of(exp, tokenizer)
    return task, data.prepare(exp.data, exp.seed, tokenizer, task)


def sequences_of(store: SampleStore) -> list[tuple[int, ...]]:
    """The tokens of each sequence, in the order of the store."""
    return [tuple(one.tokens.tolist()) for one in sequences(store)]


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
