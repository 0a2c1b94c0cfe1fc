"""Bad input: said with its place, or counted and kept with the reason; nothing earlier is lost."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from llmx.data.store.summary import summary
from llmx.data.tokenize import encoder
from llmx.errors import DataError
from llmx.tasks import prepare
from tests.data_rows import of_rows, row_tokenizer

TOKENIZER = row_tokenizer()


def row(**values: object) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode()


GOOD = row(prompt="q", response="a")
TWICE = b'{"prompt": "q", "response": "a", "meta": {"x": 1, "x": 2}}'
DIGITS = b'{"prompt": "q", "response": "a", "n": ' + b"9" * 5000 + b"}"


SURROGATE = b'{"prompt": "abc \\ud83d d", "response": "a"}'


BAD = [
    (b'{"prompt": "q", "resp', "not JSON", "line {}, column 17: not JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8", "line {}, column 13: not UTF-8"),
    (b"[1, 2]", "not an object", r"line {}: \[1, 2\] is not an object"),
    (TWICE, "a key that is there twice", 'line {}: the key "x" is there twice'),
    (row(prompt="q"), "a missing column", 'line {}: no column "response"; the row has prompt'),
    (row(prompt=["q"]), "a value of a wrong type", r'line {}: "prompt" is \["q"\], not text'),
    (row(prompt="no", response="a"), "the template refuses it", "line {}: the chat template"),
    (SURROGATE, "half of a surrogate pair", r"line {}: character 5 .* .\\ud83d., .*abc \\ud83d"),
    (DIGITS, "not JSON", "line {}, column 1: not JSON .a number of more than 4,300 digits"),
    (row(prompt="q", response="a", tools="[" * 9**5), "wrong tools", "line {}: tools are not JS"),
    (b"[" * 100_000, "not JSON", "line {}, column 1: not JSON .nested too deeply"),
]


def test_bad_lines_are_counted_and_written_with_their_place(tmp_path: Path):
    content = b"\n".join([GOOD, *(line for line, _, _ in BAD), GOOD, b""])
    store = prepare(of_rows(tmp_path, content, on_bad_row="skip"), TOKENIZER)
    reasons = Counter(reason for _, reason, _ in BAD)
    assert (store.num_sequences, store.meta["rejected"]) == (2, reasons)
    assert store.meta["dropped"] == {}
    assert all(f"{reason} ({count})" in summary(store) for reason, count in reasons.items())
    rejected = Path(store.meta["rejected_file"]).read_text().splitlines()
    found = {line["line"]: line for line in map(json.loads, rejected)}
    assert len(rejected) == len(BAD)
    for number, (_, reason, message) in enumerate(BAD, start=2):
        assert found[number]["reason"] == reason
        assert found[number]["file"] == str(tmp_path / "rows.jsonl")
        assert re.search(rf"rows\.jsonl, {message.format(number)}", found[number]["message"])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2, column 17: not JSON"):
        prepare(of_rows(tmp_path, content), TOKENIZER)
    assert store.path.is_dir()  # what was prepared before is still there


CUT_OFF = gzip.compress((GOOD + b"\n") * 3000, mtime=0)[:-40]


@pytest.mark.parametrize(
    ("name", "content", "rows", "reason"),
    [
        ("a.jsonl.gz", CUT_OFF, range(1, 3000), "damaged or cut off; the file ends here"),
        ("a.json", b"[%b, %b, {" % (GOOD, GOOD), [2], "not JSON; the array ends here"),
        ("a.json", b"[%b, 3, %b]" % (GOOD, GOOD), [2], "not an object"),
        ("a.csv", b"prompt,response\nq,a\nq\n", [1], "another number of cells than the header"),
        ("a.csv", b'prompt,response\nq,a\nq,"a" b\nq,a\n', [2], "not a table's row"),
        ("a.tsv", b"prompt\tresponse\nq\ta\nq\xff\ta\nq\ta\n", [2], "not UTF-8"),
    ],
)
def test_a_damaged_file(tmp_path: Path, name: str, content: bytes, rows, reason: str):
    store = prepare(of_rows(tmp_path, content, name, on_bad_row="skip"), TOKENIZER)
    assert store.meta["rejected"] == {reason: 1}
    assert store.num_sequences in rows
    with pytest.raises(DataError, match=name):
        prepare(of_rows(tmp_path, content, name), TOKENIZER)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"3\n" + row(prompt="q", response=1), "not an object .1., .* .1... The first:"),
        ("a.jsonl", b"", r"a\.jsonl: there is no row in it"),
        ("a.json", b"[]", r"a\.json: there is no row in it"),
        ("a.json", b'[{"prompt": "q", ]', r"no row of it can be used; 1 row rej.*column 18: not J"),
        ("a.json", b'[{"prompt": "q" "response": "a"}]', "not JSON .Expecting ',' delimiter"),
        ("a.json", b'["a", "b"]', "2 rows rejected .* row 1: a is not an object"),
    ],
)
def test_a_source_without_a_usable_row_is_an_error(
    tmp_path: Path, name: str, content: bytes, message: str
):
    with pytest.raises(DataError, match=message):
        prepare(of_rows(tmp_path, content, name, on_bad_row="skip"), TOKENIZER)
    assert not [path for path in tmp_path.glob("cache/data/*") if path.is_dir()]


def test_a_full_disk_is_said_and_loses_nothing(disk: Path, tmp_path: Path, monkeypatch):
    first = prepare(of_rows(tmp_path, GOOD, cache_dir=str(disk)), TOKENIZER)
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    rows = [{"prompt": "q" * 50, "response": "a"}] * 1500
    large = of_rows(tmp_path, rows, "b.jsonl", cache_dir=str(disk))
    monkeypatch.setattr(encoder, "BATCH_ROWS", 50)
    full = rf"disk of {disk}/data is full: b-train-[\w-]+ needs about [\d.]+ [KM]iB in all, "
    with pytest.raises(DataError, match=full + r".* No part of it is kept.*data\.cache_dir"):
        prepare(large, TOKENIZER)
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before
    assert [path for path in first.path.parent.iterdir() if path.is_dir()] == [first.path]
    first.verify()
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    store = prepare(large, TOKENIZER)
    assert store.num_sequences == 1500
    store.verify()


def test_a_disk_filled_by_rejected_rows_is_said(disk: Path, tmp_path: Path):
    content = GOOD + b"\n" + (b'{"prompt": "q", "resp' + b"x" * 500 + b"\n") * 1000
    exp = of_rows(tmp_path, content, cache_dir=str(disk), on_bad_row="skip")
    with pytest.raises(DataError, match=r"rejected rows .*No space left.*data\.cache_dir"):
        prepare(exp, TOKENIZER)
    assert not list(disk.rglob("*.rejected.jsonl"))
