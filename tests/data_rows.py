"""Experiments on a few rows of data, and what is read back of their stores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from llmx.config import Experiment
from llmx.data import SampleStore
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.data.tokenize.conversations import TokenSequence
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
    directory: Path, rows: Iterable[Any] | str | bytes, name: str = "rows.jsonl", **data: Any
) -> Experiment:
    """An experiment on these rows, with a cache of its own; ``data`` are keys of its group."""
    path = directory / name
    if isinstance(rows, str | bytes):
        path.write_bytes(rows.encode() if isinstance(rows, str) else rows)
    else:
        write_rows(path, rows)
    exp = Experiment()
    options = {"path": str(path), "cache_dir": str(directory / "cache"), "seq_len": 64, **data}
    for key, value in options.items():
        setattr(exp.data, key, value)
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
