"""Mutated rows: each becomes a row with all of its text, or one error that says why.

Seeded and in process. By hand, with more rows: ``LLMX_FUZZED_ROWS=20000 python -m pytest
tests/unit/test_data_fuzz.py``.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmx.config import DataConfig, SourceConfig
from llmx.data.format.rows import Conversation
from llmx.data.source.records import RecordError, refuse
from llmx.data.split import Source
from llmx.data.tokenize.conversations import Renderer
from llmx.errors import LlmxError
from llmx.text import printable
from tests.data_rows import CHATML
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_data_tools import CALL, CHAT, OWN, WITHOUT

ROWS = int(os.environ.get("LLMX_FUZZED_ROWS", "600"))
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "How warm?"},
        {"from": "function_call", "value": json.dumps([{"name": "a", "arguments": {}}] * 2)},
        {"from": "observation", "value": '["21", "22"]'},
        {"from": "gpt", "value": "Between."},
    ],
    "tools": json.dumps([CALL], ensure_ascii=False).replace("ö", "o"),
}
SEEDS: list[dict[str, Any]] = [
    CHAT,
    SHAREGPT,
    {"instruction": "Do", "input": "this", "output": "done", "history": [["before", "after"]]},
    {"prompt": "Why?", "completion": "Because.", "label": True},
    {"prompt": CHAT["messages"][:1], "completion": [{"role": "assistant", "content": "Cold."}]},
    {"conversations": SHAREGPT["conversations"][:1], "chosen": "good", "rejected": "worse"},
    {"prompt": "Why?", "chosen": {"from": "gpt", "value": "good"}, "rejected": "worse"},
    {"text": "A document.", "url": "http://x", "score": 3.5},
    {"title": "Head", "content": "Body of it."},
]
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 1.5, float("nan"), 10**30, "", " ", "\x00", "\x1b[2J", "\ud800",
    "<|im_end|>", "<image>", "{", "[", "[]", "{}", "null", '{"a": 1}', "[1, 2]", [], [[]], [None],
    [{}], {}, {"a": None}, [1, "a"], ["a", "b"], [["a", "b"]], [{"role": "user", "content": "odd"}],
    [{"from": "gpt", "value": 1}], {"role": ["user"], "content": ["odd"]}, "long " * 1000,
    [{"type": "text", "text": "odd"}], [{"type": "image_url"}],
]  # fmt: skip
KEYS = [
    "role", "from", "content", "value", "tool_calls", "function_call", "weight", "loss", "label",
    "images", "score", "system", "tools", "history", "input", "context", "rejected", "chosen",
    "messages", "conversations", "text", "title", "name", "arguments", "functions", "thinking", "",
    "\x1b", "note",
]  # fmt: skip
NAMES = {"role", "from", "type", "id", "tool_call_id", "name"}
"""Keys of values that say who speaks and how, not what is said."""


def mutated(chance: random.Random, value: Any) -> Any:
    """The value with one change somewhere in it."""
    if chance.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return copy.deepcopy(chance.choice(ODD))
    value = copy.copy(value)
    what = chance.random()
    if isinstance(value, dict):
        key = chance.choice(list(value))
        if what < 0.15:
            del value[key]
        elif what < 0.3:
            value[chance.choice(KEYS)] = copy.deepcopy(chance.choice(ODD))
        elif what < 0.4:
            value[chance.choice(KEYS)] = value.pop(key)
        else:
            value[key] = mutated(chance, value[key])
        return value
    place = chance.randrange(len(value))
    if what < 0.1:
        value.pop(place)
    elif what < 0.2:
        value.insert(place, copy.deepcopy(chance.choice(ODD)))
    elif what < 0.3:
        value.insert(place, copy.deepcopy(value[place]))
    elif what < 0.4:
        chance.shuffle(value)
    else:
        value[place] = mutated(chance, value[place])
    return value


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every text in a value that says something, with where it stands."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            yield from texts(json.loads(value), path)
        except ValueError:
            yield value, path
    elif isinstance(value, str) and value.strip():
        yield value, path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from texts(inner, (*path, place))


def lost(row: dict[str, Any], found: Any, source: Source) -> list[tuple[str, tuple[Any, ...]]]:
    """Texts of the row that are neither in what is trained nor in a column that is named."""
    if not isinstance(found, Conversation):
        kept = found.text
    else:
        parts = [message.content for message in found.messages] + [found.tools]
        kept = "\0".join([*parts, *(json.dumps(part, ensure_ascii=False) for part in parts)])
    missing = []
    for text, path in texts(row):
        column = path[0]
        named = {column, *(f"{column}.{name}" for name in path[1:3])}
        if named & source.ignored or NAMES & {*path} or text in ("[]", "null"):
            continue
        if source.form == "preference" and column == "rejected":
            continue  # of a pair, the chosen answer is learned
        # Turns behind the last answer are left out.
        in_turn = isinstance(found, Conversation) and path[1:] and isinstance(path[1], int)
        if in_turn and path[1] >= len(found.messages) - 1:
            continue
        if text.strip() not in kept and json.dumps(text, ensure_ascii=False)[1:-1] not in kept:
            missing.append((text, path))
    return missing


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_rows(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    tokenizers = [byte_tokenizer(*CHATML, "<|call|>", chat_template=t) for t in (OWN, WITHOUT)]
    renderers = [*map(Renderer, tokenizers)]
    path = tmp_path / "rows.jsonl"
    outcomes = {"row": 0, "nothing": 0, "error": 0}
    for _ in range(ROWS):
        row = chance.choice(SEEDS)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            row = mutated(chance, row)
        row = row if isinstance(row, dict) else {"x": row}
        path.write_text(json.dumps(row) + "\n")
        source = Source.of(DataConfig(), SourceConfig(path=str(path)), split="train")
        problem: LlmxError | None
        try:
            (found,) = source.rows(refuse)
            if isinstance(found, Conversation):
                for renderer in renderers:
                    renderer.conversations([found])
            problem = None
        except LlmxError as error:
            problem = error
        if problem is not None:
            outcomes["error"] += 1
            assert str(problem).startswith(f"{path}, line 1: "), (row, str(problem))
            assert printable(str(problem), keep="") == str(problem), (row, str(problem))
            assert not isinstance(problem, RecordError) or problem.reason
            continue
        outcomes["row" if found is not None else "nothing"] += 1
        if found is not None:
            assert not lost(row, found, source), (row, found)
    assert outcomes["row"] > ROWS / 10, outcomes
    assert outcomes["error"] > ROWS / 10, outcomes
