"""Bad input: said with its place, or counted and kept with the reason; nothing earlier is lost."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmx.config import Experiment
from llmx.data.store import staging
from llmx.data.store.summary import summary
from llmx.errors import DataError
from llmx.tasks import prepare
from tests.small_tokenizers import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['content'] == 'refuse me' %}{{ raise_exception('no') }}{% endif %}"
    "{{ ('Q' if m['role'] == 'user' else 'A') + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A' }}{% endif %}"
)
GOOD = json.dumps({"prompt": "q", "response": "a"}).encode()
USER = {"role": "user", "content": "x"}


@pytest.fixture
def tokenizer():
    return byte_tokenizer("<|end|>", chat_template=TEMPLATE)


def experiment(tmp_path: Path, name: str, content: bytes, **data) -> Experiment:
    exp = Experiment()
    (tmp_path / name).write_bytes(content)
    exp.data.path, exp.data.cache_dir = str(tmp_path / name), str(tmp_path / "cache")
    exp.data.seq_len, exp.data.on_bad_row = 64, "skip"
    for key, value in data.items():
        setattr(exp.data, key, value)
    return exp


def row(**values) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode()


BAD_LINES = [
    # (a line of JSON Lines, the reason that is counted, what the message says)
    (b'{"prompt": "q", "resp', "not JSON", "line 2, column 17: not JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8", "line 2, column 13: not UTF-8"),
    (b"[1, 2]", "not an object", r"line 2: \[1, 2\] is not an object"),
    (row(prompt="q"), "a missing column", 'line 2: no column "response"; the row has prompt'),
    (
        row(prompt=["q"], response="a"),
        "a value of a wrong type",
        r'line 2: "prompt" is \["q"\], not text',
    ),
    (
        row(prompt="refuse me", response="a"),
        "the template refuses it",
        "line 2: the chat template .* cannot render",
    ),
    (
        b'{"prompt": "abc \\ud83d d", "response": "a"}',
        "half of a surrogate pair",
        r"line 2: character 5 of a text is half of .* \(\\ud83d\), .*skip: abc \\ud83d d",
    ),
    (
        b'{"prompt": "q", "response": "a", "n": ' + b"9" * 5000 + b"}",
        "not JSON",
        "line 2, column 1: not JSON .a number of more than 4,300 digits",
    ),
    (
        row(prompt="q", response="a", tools="[" * 100_000),
        "wrong tools",
        "line 2: tools are not JSON",
    ),
    (b"[" * 100_000, "not JSON", "line 2, column 1: not JSON .nested too deeply"),
]


@pytest.mark.parametrize(("line", "reason", "message"), BAD_LINES)
def test_a_bad_line(tmp_path: Path, tokenizer, line: bytes, reason: str, message: str):
    content = GOOD + b"\n" + line + b"\n" + GOOD + b"\n"
    store = prepare(experiment(tmp_path, "rows.jsonl", content), tokenizer)
    assert (store.num_sequences, store.meta["rejected"]) == (2, {reason: 1})
    assert store.meta["dropped"] == {}
    (rejected,) = Path(store.meta["rejected_file"]).read_text().splitlines()
    found = json.loads(rejected)
    assert (found["line"], found["reason"]) == (2, reason)
    assert found["file"] == str(tmp_path / "rows.jsonl")
    assert f"{reason} (1)" in summary(store)
    with pytest.raises(DataError, match=rf"rows\.jsonl, {message}"):
        prepare(experiment(tmp_path, "rows.jsonl", content, on_bad_row="fail"), tokenizer)
    assert store.path.is_dir()  # what was prepared before is still there


BAD_TURNS = [
    ([USER, USER], "turns out of order", "turns 1 and 2 .* both have the role user"),
    ([{"role": "assistant", "content": "a"}], "turns out of order", "no user turn precedes"),
    ([USER, {"role": "tool", "content": "1"}], "turns out of order", "no call of a tool precedes"),
    ([USER, {"role": "system", "content": "s"}], "turns out of order", "only the first turn"),
    ([], "no turns", "must be a list with at least one turn"),
    ([{"role": "users", "content": "x"}], "an unknown role", "has the role users"),
    ([{"role": "user", "content": 1}], "a wrong content", "has the content 1"),
    ([USER, "a"], "a wrong turn", "is a, not an object"),
    (
        {"role": ["user", "assistant", "user"], "content": ["x", "y"]},
        "columns of unequal length",
        "role: 3, content: 2",
    ),
    (
        [USER, {"role": "assistant", "content": [{"type": "reasoning", "value": "x"}]}],
        "content that is not text",
        "of the type reasoning",
    ),
]


@pytest.mark.parametrize(("turns", "reason", "message"), BAD_TURNS)
def test_bad_turns(tmp_path: Path, tokenizer, turns: list | dict, reason: str, message: str):
    good = [USER, {"role": "assistant", "content": "a"}]
    content = row(messages=good) + b"\n" + row(messages=turns) + b"\n"
    store = prepare(experiment(tmp_path, "rows.jsonl", content), tokenizer)
    assert (store.num_sequences, store.meta["rejected"]) == (1, {reason: 1})
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{message}"):
        prepare(experiment(tmp_path, "rows.jsonl", content, on_bad_row="fail"), tokenizer)


LINES = (GOOD + b"\n") * 3000


@pytest.mark.parametrize(
    ("name", "content", "rows", "reason"),
    [
        (
            "a.jsonl.gz",
            gzip.compress(LINES, mtime=0)[:-40],
            None,
            "damaged or cut off; the file ends here",
        ),
        ("a.json", b"[" + GOOD + b", " + GOOD + b", {", 2, "not JSON; the array ends here"),
        ("a.json", b"[" + GOOD + b", 3, " + GOOD + b"]", 2, "not an object"),
        ("a.csv", b"prompt,response\nq,a\nq\nq,a\n", 2, "another number of cells than the header"),
        ("a.csv", b'prompt,response\nq,a\nq,"a" b\nq,a\n', 2, "not a table's row"),
        ("a.tsv", b"prompt\tresponse\nq\ta\nq\xff\ta\nq\ta\n", 2, "not UTF-8"),
    ],
)
def test_a_damaged_file(tmp_path: Path, tokenizer, name: str, content: bytes, rows, reason: str):
    store = prepare(experiment(tmp_path, name, content), tokenizer)
    assert store.meta["rejected"] == {reason: 1}
    assert store.num_sequences == rows or (rows is None and 0 < store.num_sequences < 3000)
    with pytest.raises(DataError, match=name):
        prepare(experiment(tmp_path, name, content, on_bad_row="fail"), tokenizer)


def test_empty_rows_are_counted_and_no_error(tmp_path: Path, tokenizer):
    content = GOOD + b"\n\n  \n" + row(prompt="q", response=" ") + b"\n"
    store = prepare(experiment(tmp_path, "a.jsonl", content, on_bad_row="fail"), tokenizer)
    assert (store.num_sequences, store.meta["dropped"]) == (1, {"without an answer": 1})
    content = row(text="some words") + b"\n" + row(text=" \n") + b"\n" + row(text="") + b"\n"
    exp = experiment(tmp_path, "t.jsonl", content, on_bad_row="fail")
    exp.task.kind, exp.data.packing = "pretrain", "concat"
    store = prepare(exp, tokenizer)
    assert (store.num_sequences, store.meta["dropped"]) == (1, {"empty": 2})


def test_a_source_of_nothing_but_bad_rows_is_an_error(tmp_path: Path, tokenizer):
    exp = experiment(tmp_path, "a.jsonl", b'{"prompt"\n{"prompt": "q"}\n', form="prompt_response")
    with pytest.raises(DataError, match="not JSON .1., a missing column .1... The first:"):
        prepare(exp, tokenizer)
    exp = experiment(tmp_path, "a.jsonl", b"")
    with pytest.raises(DataError, match=r"a\.jsonl: there is no row in it"):
        prepare(exp, tokenizer)
    (tmp_path / "nothing").mkdir()
    exp.data.path = str(tmp_path / "nothing")
    with pytest.raises(DataError, match="no file there ends in"):
        prepare(exp, tokenizer)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system of 256 KiB, which only root can make."""
    directory.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)  # a store is mapped


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path, tokenizer, monkeypatch):
    with small_disk(tmp_path / "disk") as disk:
        first = prepare(experiment(tmp_path, "a.jsonl", GOOD, cache_dir=str(disk)), tokenizer)
        before = {path.name: path.read_bytes() for path in first.path.iterdir()}
        large = experiment(tmp_path, "b.jsonl", LINES * 10, cache_dir=str(disk))
        full = rf"disk of {disk}/data is full: b-train-[\w-]+ needs about [\d.]+ [KM]iB in all, "
        with pytest.raises(DataError, match=full + r".* No part of it is kept.*data\.cache_dir"):
            prepare(large, tokenizer)
        assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before
        kept = [path for path in first.path.parent.iterdir() if path.suffix != ".lock"]
        assert [path for path in kept if path.is_dir()] == [first.path]
        first.verify()
        # What was noted by then is gone on from, when there is room.
        monkeypatch.setattr(staging, "JOURNAL_BYTES", 1 << 14)
        with pytest.raises(
            DataError, match=full + r".* The first [\d,]+ rows are kept in .*partial"
        ):
            prepare(large, tokenizer)
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        store = prepare(large, tokenizer)
        assert store.num_sequences == 30_000
        assert store.meta["resumed_at_row"] > 0
        store.verify()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_filled_by_rejected_rows_is_said(tmp_path: Path, tokenizer):
    with small_disk(tmp_path / "disk") as disk:
        content = GOOD + b"\n" + (b'{"prompt": "q", "resp' + b"x" * 500 + b"\n") * 1000
        exp = experiment(tmp_path, "a.jsonl", content, cache_dir=str(disk))
        with pytest.raises(DataError, match=r"rejected rows .*No space left.*data\.cache_dir"):
            prepare(exp, tokenizer)
        assert not list(disk.rglob("*.rejected.jsonl"))
