"""Reading sources, and what is said about bad ones: file, line, what is wrong, excerpt."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from llmx.data.source import lines
from llmx.data.source.files import read_file, source_files
from llmx.data.source.records import Document, Record, Where
from llmx.errors import DataError

ROWS = [{"text": "one ü"}, {"text": "two\nlines"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def values(path: Path) -> list[dict]:
    records = list(read_file(path))
    assert all(isinstance(record, Record) for record in records)
    return [record.value for record in records]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json", b"\xef\xbb\xbf  \n" + json.dumps(ROWS).encode()),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n\r\n")),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.json.zst", zstandard.compress(json.dumps(ROWS).encode())),
        ("a.jsonl.zst", zstandard.compress(LINES[:9]) + zstandard.compress(LINES[9:])),
        ("a.JSONL.ZST", zstandard.compress(LINES)),
        ("a.csv", 'text\none ü\n"two\nlines"\n'.encode()),
    ],
)
def test_forms_and_compressions(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    assert values(tmp_path / name) == ROWS


def test_tsv_has_no_quoting(tmp_path: Path):
    (tmp_path / "a.tsv").write_text('label\ttext\n1\t"so he said\n')
    assert values(tmp_path / "a.tsv") == [{"label": "1", "text": '"so he said'}]


def test_text_is_one_document_of_a_bounded_size(tmp_path: Path, monkeypatch):
    text = "first line\n  indented\n\n\nlast line ü\r\nx"
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    monkeypatch.setattr(lines, "DOCUMENT_CHARS", len(text))
    assert list(read_file(file)) == [Document(text, Where(file, 1, "line"))]
    monkeypatch.setattr(lines, "DOCUMENT_CHARS", len(text) - 1)
    with pytest.raises(DataError, match=r"a\.txt: more than 37 characters.*data\.text_unit=line"):
        list(read_file(file))
    assert len(list(read_file(file, text_unit="paragraph"))) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2, column 13: not JSON"),
        ("a.json", b'[{"text": "a"},\n {"text": }]', r"a\.json, line 2, column 11: not JSON"),
        ("a.json", b'[{"text": "a"}, 3]', r"a\.json, row 2: 3 is not an object"),
        ("a.jsonl", b'{"text": "a"}\n"b"\n', r"a\.jsonl, line 2: b is not an object"),
        ("a.jsonl", b'{"a": 1}\n{"text": "\xff"}\n', r"line 2, column 11: not UTF-8.*iconv"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "damaged or cut off"),
        ("a.jsonl.gz", LINES, "damaged or cut off"),
        ("a.jsonl.zst", zstandard.compress(LINES)[:-3], "damaged or cut off"),
        ("a.jsonl.xz", b"", r"\.xz files are not read\. Unpack it first: `unxz -k .*a\.jsonl\.xz"),
        ("a.jsonl.bz2", b"", r"\.bz2 files are not read\. Unpack it first: `bunzip2 -k /"),
        ("a b.zip", b"", r"\.zip files are not read\. Unpack it first: `unzip '.*/a b\.zip'`"),
        ("a.tsv", b"a\tb\n1\t2\n1\n", r"line 3: 1 cell, but the header names 2 columns"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_file(*source_files(str(tmp_path / name))))


def test_files_of_a_path(tmp_path: Path):
    for name in ("b.jsonl", "a.txt", "deep/c.json.gz", "README.md", ".old/d.jsonl", "._a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    names = [file.name for file in source_files(str(tmp_path))]
    assert names == ["a.txt", "b.jsonl", "c.json.gz"]
    assert [file.name for file in source_files(f"{tmp_path}/*.jsonl")] == ["b.jsonl"]
    assert [file.name for file in source_files(f"{tmp_path}/**/*.gz")] == ["c.json.gz"]
    (tmp_path / "pictures.zip").touch()
    (tmp_path / "rows.csv.xz").touch()
    with pytest.raises(DataError, match=r"rows\.csv\.xz: \.xz files are not read"):
        source_files(str(tmp_path))
    with pytest.raises(DataError, match="no such file"):
        source_files(f"{tmp_path}/none/*.json")
    with pytest.raises(DataError, match=r"README\.md: \.md files are not read; those that end in"):
        source_files(f"{tmp_path}/README.md")


def test_a_line_or_a_paragraph_as_document(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\n\n  two \r\nthree\n \n\nfour\n\xff\nfive")
    bad: list[str] = []

    def pieces(unit: str) -> list[tuple[str, int]]:
        found = read_file(file, bad=lambda error: bad.append(error.reason), text_unit=unit)
        return [(piece.text, piece.where.number) for piece in found]

    lines = [("one", 1), ("  two ", 3), ("three", 4), ("four", 7)]
    assert pieces("line") == [*lines, ("five", 9)]
    paragraphs = [("one", 1), ("  two \r\nthree", 3), ("four\nfive", 7)]
    assert pieces("paragraph") == paragraphs
    assert bad == ["not UTF-8"] * 2
