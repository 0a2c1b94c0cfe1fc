"""Reading files of every kind, and what is said about bad ones: file, line, what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmx.data.source import lines
from llmx.data.source.files import read_file, source_files
from llmx.data.source.records import Document, Record
from llmx.errors import DataError

ROWS = [{"text": "one ü"}, {"text": "two\nlines"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def values(path: Path, **options: Any) -> list[dict[str, Any]]:
    records = [row for file in source_files(str(path), **options)[0] for row in read_file(file)]
    assert all(isinstance(record, Record) for record in records)
    return [record.value for record in records]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json", b"\xef\xbb\xbf  \n" + json.dumps(ROWS).encode()),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n  \n\r\n")),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.json.zst", zstd(json.dumps(ROWS).encode())),
        ("a.jsonl.zst", zstd(LINES[:9]) + zstd(LINES[9:])),
        ("a.JSONL.ZST", zstd(LINES)),
        ("a.csv", 'text\none ü\n"two\nlines"\n'.encode()),
    ],
)
def test_forms_and_compressions(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    assert values(tmp_path / name) == ROWS


def test_tsv_has_no_quoting(tmp_path: Path):
    (tmp_path / "a.tsv").write_text('label\ttext\n1\t"so he said\n')
    assert values(tmp_path / "a.tsv") == [{"label": "1", "text": '"so he said'}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2, column 13: not JSON"),
        ("a.jsonl", b'{"a": 1}\n{"text": "\xff"}\n', r"line 2, column 11: not UTF-8.*iconv"),
        ("a.jsonl", '{"text": "caf\u00e9"}'.encode("latin-1"), "like LATIN1.*iconv -f LATIN1 -t"),
        ("a.jsonl", '{"text": "\u6625\u5929"}'.encode("gb18030"), "iconv -f GB18030 -t UTF-8"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "damaged or cut off"),
        ("a.jsonl.gz", LINES, "damaged or cut off"),
        ("a.jsonl.zst", zstd(LINES)[:-3], "damaged or cut off"),
        ("a.jsonl.xz", b"", r"\.xz files are not read\. Unpack it first: `unxz -k .*a\.jsonl\.xz"),
        ("a b.zip", b"", r"\.zip files are not read\. Unpack it first: `unzip '.*/a b\.zip'`"),
        ("a.parquet.gz", b"", "compressed inside"),
        ("README.md", b"", r"README\.md: \.md files are not read; those that end in"),
        ("a.tsv", b"a\tb\n1\t2\n1\n", r"line 3: 1 cell, but the header names 2 columns"),
        ("a.tsv", b"a\tb\tb\n1\t2\t3\n", 'line 1: the header names the column "b" twice'),
        # Arrays
        ("a.json", b'[{"a": 1},\n {"a": }]', r"a\.json, line 2, column 8: not JSON"),
        ("a.json", b'[{"a": 1}\n {"a": 2}]', r"line 2, column 2: not JSON \(Expecting ',' delim"),
        ("a.json", b'[{"a": 1},\n {"a": "xy', "line 2, column 8: not JSON"),
        ("a.json", b'[{"a": 1}]\n[]', "line 2, column 1: not JSON .Extra data"),
        ("a.json", b'[{"a": 1},\n {"a": "\xff"}]', "line 2, column 9: not UTF-8"),
        ("a.json", b'[{"a": 1}, 31]', r"a\.json, row 2: 31 is not an object"),
        ("a.json", b'[{"a": 1},\n {"b": 1, "b": 2}]', 'row 2: the key "b" is there twice'),
        ("a.json", b'[{"a": 1},\n ' + b"[" * 10**5, "line 2, column 2: not JSON .nested too deep"),
        ("a.json", b'[{"a": 1},\n {"a": ' + b"1" * 4301, "column 2: not JSON .a number of more th"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        values(tmp_path / name)


def test_a_large_array_is_refused_with_the_command_that_converts_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lines, "ARRAY_BYTES", 20)
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "abcdefg"}]')
    command = r"jq -c '\.\[\]' in\.json > out"
    with pytest.raises(DataError, match=rf"rows\.json: a JSON array of more.*{command}"):
        values(path)
    path.write_text('[{"text": "abcdef"}]')
    assert values(path) == [{"text": "abcdef"}]


def test_files_of_a_path(tmp_path: Path):
    for name in ("b.jsonl", "a.txt", "deep/c.json.gz", "README.md", ".old/d.jsonl", "._a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")

    def names(path: str) -> list[str]:
        return [file.name for file in source_files(f"{tmp_path}{path}")[0]]

    assert names("") == ["a.txt", "b.jsonl", "c.json.gz"]
    assert names("/*.jsonl") == ["b.jsonl"]
    assert names("/**/*.gz") == ["c.json.gz"]
    (tmp_path / "pictures.zip").touch()
    (tmp_path / "rows.csv.xz").touch()
    with pytest.raises(DataError, match=r"rows\.csv\.xz: \.xz files are not read"):
        names("")
    with pytest.raises(DataError, match="no such file"):
        names("/none/*.json")


@pytest.mark.parametrize(
    ("files", "options", "read"),
    [
        # The Hub's rules for the names of splits.
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], {}, [0]),
        (["train.jsonl", "valid.jsonl", "notes.jsonl"], {}, [0]),
        (["train/a.jsonl", "dev/a.jsonl"], {"split": "validation"}, [1]),
        (["my_train_set.jsonl", "my-eval.jsonl"], {"prefers": ("validation", "test")}, [1]),
        # Words in other words, shards without a split, and one split alone say nothing.
        (["contest.jsonl", "trainer.jsonl"], {}, [0, 1]),
        (["code-00000-of-00001.jsonl", "web-00000-of-00001.jsonl"], {}, [0, 1]),
        (
            ["data/train_a-00000-of-00001.jsonl", "data/train_b-00000-of-00001.jsonl"],
            {"split": "train_b"},
            [1],
        ),
        (["dev.jsonl", "more.jsonl"], {}, [0, 1]),
    ],
)
def test_one_split_of_a_directory(tmp_path: Path, files: list[str], options: Any, read: list[int]):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    found, left_out = source_files(str(tmp_path), **options)
    expected = {str(tmp_path / files[i]) for i in read}
    assert {*map(str, found)} == expected
    assert {*map(str, left_out)} == {f"{tmp_path}/{name}" for name in files} - expected


def test_a_split_of_a_directory_that_is_not_there(tmp_path: Path):
    for name in ("dev.jsonl", "test.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    with pytest.raises(DataError, match="no split 'train'; it has test, validation.*data.split=te"):
        source_files(str(tmp_path))


# Text


def test_text_is_one_document_of_a_bounded_size(tmp_path: Path, monkeypatch):
    text = "first line\n  indented\n\n\nlast line ü\r\nx"
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    monkeypatch.setattr(lines, "DOCUMENT_CHARS", len(text))
    (found,) = read_file(file)
    assert isinstance(found, Document)
    assert (found.text, str(found.where)) == (text, f"{file}, line 1")
    monkeypatch.setattr(lines, "DOCUMENT_CHARS", len(text) - 1)
    with pytest.raises(DataError, match=r"a\.txt: more than 37 characters.*data\.text_unit=line"):
        list(read_file(file))
    assert len(list(read_file(file, text_unit="paragraph"))) == 2


def test_a_line_or_a_paragraph_as_document(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\n\n  two \r\nthree\n \n\nfour\n\xff\nfive")
    bad: list[str] = []

    def pieces(unit: str) -> list[tuple[str, int]]:
        found = read_file(file, bad=lambda error: bad.append(error.reason), text_unit=unit)
        return [(piece.text, piece.where.number) for piece in found]

    assert pieces("line") == [("one", 1), ("  two ", 3), ("three", 4), ("four", 7), ("five", 9)]
    assert pieces("paragraph") == [("one", 1), ("  two \r\nthree", 3), ("four\nfive", 7)]
    assert bad == ["not UTF-8"] * 2


# Tables

TURNS = {"messages": [{"role": "user", "content": "Q ü"}, {"role": "assistant", "content": "A"}]}
CHATS = [{**TURNS, "id": number} for number in range(5)]


def test_parquet_and_both_kinds_of_arrow(tmp_path: Path):
    table = pa.Table.from_pylist(CHATS)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for name, writer, chunk in (("b", pa.ipc.new_file, 2), ("c", pa.ipc.new_stream, None)):
        with writer(str(tmp_path / f"{name}.arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=chunk)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        assert values(tmp_path / name) == CHATS
    assert values(tmp_path) == CHATS * 3
    places = [str(record.where) for record in read_file(tmp_path / "a.parquet")]
    assert places[4] == f"{tmp_path}/a.parquet, row 5"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_is_said(tmp_path: Path, name: str):
    pq.write_table(pa.Table.from_pylist(CHATS), tmp_path / name)
    cut_off = (tmp_path / name).read_bytes()[:-9]
    for content in (cut_off, b"(" + bytes(range(255, 0, -1))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}, after row 0: not a readable"):
            values(tmp_path / name)


def test_text_of_a_table_that_is_none_is_a_bad_row(tmp_path: Path):
    offsets = pa.py_buffer(np.array([0, 1, 2, 3], np.int32))
    column = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"a\xffc"))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    bad: list[str] = []
    found = list(read_file(tmp_path / "a.parquet", bad=lambda error: bad.append(str(error))))
    assert [(one.value["text"], one.where.number) for one in found] == [("a", 1), ("c", 3)]
    (message,) = bad
    assert message.startswith(f"{tmp_path}/a.parquet, row 2: a text holds bytes that are not UTF-8")


def test_a_saved_data_set(tmp_path: Path):
    rows = datasets.Dataset.from_list(CHATS)
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    assert values(tmp_path / "one") == CHATS
    both = datasets.DatasetDict({"train": rows, "test": rows.select([3])})
    both.save_to_disk(tmp_path / "two")
    assert values(tmp_path / "two") == CHATS
    assert values(tmp_path / "two", split="test") == [CHATS[3]]
    with pytest.raises(DataError, match=r"no split 'dev'; it has train, test.*data\.split=train"):
        values(tmp_path / "two", split="dev")
    next((tmp_path / "one").glob("*00001*.arrow")).unlink()
    with pytest.raises(DataError, match=r"state\.json names it"):
        values(tmp_path / "one")
