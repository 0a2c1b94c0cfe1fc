"""Sources: tables, saved data sets, the Hub, arrays, several at once with weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.config import Experiment, SourceConfig
from llmx.data.format.rows import Conversation
from llmx.data.source import lines as text_files
from llmx.data.source.files import read_file, source_files
from llmx.data.source.hub import hub_id, hub_rows, revision_of
from llmx.data.source.records import Record
from llmx.data.split import DatasetSplit
from llmx.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "Q ü"}, {"role": "assistant", "content": "A"}]
ROWS = [{"messages": CHAT, "id": number} for number in range(5)]


def values(path: Path, **options) -> list[dict]:
    records = [row for file in source_files(str(path), **options) for row in read_file(file)]
    assert all(isinstance(record, Record) for record in records)
    return [record.value for record in records]


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Tables


def test_parquet_and_both_kinds_of_arrow(tmp_path: Path):
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as w,
    ):
        w.write_table(table, max_chunksize=2)
    with (
        pa.OSFile(str(tmp_path / "c.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as w,
    ):
        w.write_table(table)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        assert values(tmp_path / name) == ROWS
    assert values(tmp_path) == ROWS * 3
    places = [str(record.where) for record in read_file(tmp_path / "a.parquet")]
    assert places[4] == f"{tmp_path}/a.parquet, row 5"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_cut_off_table_is_said(tmp_path: Path, name: str):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"{name}, after row 0: not a readable"):
        values(tmp_path / name)
    (tmp_path / name).write_bytes(b"(" + bytes(range(255, 0, -1)))
    with pytest.raises(DataError, match=rf"{name}, after row 0: not a readable"):
        values(tmp_path / name)


def test_text_of_a_table_that_is_none_is_a_bad_row(tmp_path: Path):
    offsets = pa.py_buffer(np.array([0, 1, 2, 3], np.int32))
    texts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"a\xffc"))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    bad: list[str] = []
    found = list(read_file(tmp_path / "a.parquet", bad=lambda error: bad.append(str(error))))
    assert [(record.value, record.where.number) for record in found] == [
        ({"text": "a"}, 1),
        ({"text": "c"}, 3),
    ]
    (message,) = bad
    assert message.startswith(f"{tmp_path}/a.parquet, row 2: a text holds bytes that are not UTF-8")


def test_a_saved_data_set(tmp_path: Path):
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    assert values(tmp_path / "one") == ROWS
    both = datasets.DatasetDict({"train": rows, "test": rows.select([3])})
    both.save_to_disk(tmp_path / "two")
    assert values(tmp_path / "two") == ROWS
    assert values(tmp_path / "two", split="test") == [ROWS[3]]
    with pytest.raises(DataError, match=r"no split 'dev'; it has train, test.*data\.split=train"):
        source_files(str(tmp_path / "two"), split="dev")
    next((tmp_path / "one").glob("*00001*.arrow")).unlink()
    with pytest.raises(DataError, match=r"state\.json names it"):
        source_files(str(tmp_path / "one"))


def test_a_compressed_table_is_refused(tmp_path: Path):
    (tmp_path / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(DataError, match="compressed inside"):
        source_files(str(tmp_path / "a.parquet.gz"))


# The Hub


def test_hub_ids(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub_id("owner/name.v2") == "owner/name.v2"
    assert hub_id("hub:squad") == "squad"
    for path in ("here", "here/rows.jsonl", "/abs/rows", "a/b/c", "*.jsonl", "rows.jsonl"):
        assert hub_id(path) is None


def test_rows_are_streamed_as_from_the_hub(tmp_path: Path):
    """The layout of a Hub repository, through ``load_dataset(streaming=True)``."""
    (tmp_path / "data").mkdir()
    lines(tmp_path / "data" / "train-0.jsonl", [{"text": str(i)} for i in range(3)])
    lines(tmp_path / "data" / "test-0.jsonl", [{"text": "t"}])
    found = list(hub_rows(str(tmp_path), subset=None, split=None))
    assert [record.value for record in found] == [{"text": str(i)} for i in range(3)]
    assert str(found[2].where) == f"{tmp_path}, row 3"
    (record,) = hub_rows(str(tmp_path), subset=None, split="test")
    assert record.value == {"text": "t"}
    with pytest.raises(DataError, match=r"dev.*data\.split"):
        next(hub_rows(str(tmp_path), subset=None, split="dev"))


def test_an_unreachable_hub_names_the_way_out(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.path=owner/name: neither.*hf download owner/name"):
        revision_of("owner/name")
    exp = Experiment()
    exp.data.path = "owner/name"
    with pytest.raises(DataError, match=r"--repo-type dataset --local-dir DIR"):
        DatasetSplit.of(exp.data, exp.seed, "train").digests(cache=tmp_path)


# Arrays


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(
        st.dictionaries(
            st.text(max_size=3),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                lambda inner: st.lists(inner, max_size=3),
                max_leaves=5,
            ),
            max_size=3,
        ),
        max_size=6,
    ),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
def test_arrays_are_read(tmp_path_factory, rows, indent, ascii_only):
    path = tmp_path_factory.mktemp("arrays") / "rows.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(text.encode("utf-8", "surrogatepass") if ascii_only else text.encode())
    assert values(path) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1},\n {"a": 2}', r"line 2, column 10: not JSON"),
        (b'[{"a": 1}\n {"a": 2}]', r"line 2, column 2: not JSON \(Expecting ',' delimiter\)"),
        (b'[{"a": 1},\n {"a": tru', "line 2, column 8: not JSON"),
        (b'[{"a": 1},\n {"a": "xy', "line 2, column 8: not JSON"),
        (b'[{"a": 1},\n]', "line 2, column 1: not JSON"),
        (b'[{"a": 1}]\n[]', "line 2, column 1: not JSON .Extra data"),
        (b'[{"a": 1},\n {"a": "\xff"}]', "line 2, column 9: not UTF-8"),
        (b'[{"a": 1}, 31]', "row 2: 31 is not an object"),
        (b'[{"a": 1},\n {"a": 1, "a": 2}]', 'row 2: the key "a" is there twice'),
        (b'[{"a": 1},\n ' + b"[" * 10**5, "line 2, column 2: not JSON .nested too deeply"),
        (b'[{"a": 1},\n {"a": ' + b"1" * 4301, "line 2, column 2: not JSON .a number of more than"),
    ],
)
def test_what_is_wrong_with_an_array_is_said(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_file(path))


def test_a_large_array_is_refused_with_the_command_that_converts_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(text_files, "ARRAY_BYTES", 20)
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "abcdefg"}]')
    with pytest.raises(
        DataError, match=r"rows\.json: a JSON array of more.*jq -c '\.\[\]' in\.json > out"
    ):
        values(path)
    path.write_text('[{"text": "abcdef"}]')
    assert values(path) == [{"text": "abcdef"}]


# Several sources


def source(tmp_path: Path, split: str = "train", seed: int = 0, **data) -> DatasetSplit:
    exp = Experiment()
    exp.seed = seed
    exp.data.cache_dir = str(tmp_path / "cache")
    for name, value in data.items():
        setattr(exp.data, name, value)
    return DatasetSplit.of(exp.data, exp.seed, split)


def questions(found: DatasetSplit) -> list[str]:
    rows = list(found.rows())
    assert all(isinstance(row, Conversation) for row in rows)
    return [row.messages[0].content for row in rows]


def pairs(tmp_path: Path, name: str, count: int) -> str:
    rows = [{"prompt": f"{name}{i}", "response": "A"} for i in range(count)]
    return lines(tmp_path / f"{name}.jsonl", rows)


def test_weights_and_limits(tmp_path: Path):
    a, b = pairs(tmp_path, "a", 4), pairs(tmp_path, "b", 1000)
    chat = lines(tmp_path / "c.jsonl", ROWS)
    sources = [
        SourceConfig(path=a, weight=2),
        SourceConfig(path=b, weight=0.25),
        SourceConfig(path=b, max_rows=3),
        SourceConfig(path=chat),
    ]
    found = source(tmp_path, sources=sources)
    assert found.form == "prompt_response+messages"
    counts = Counter(questions(found))
    assert [counts[f"a{i}"] for i in range(4)] == [2] * 4
    assert counts["Q ü"] == 5
    taken = {name for name in counts if name.startswith("b")}
    assert sum(counts[name] for name in taken) == len(taken | {"b0", "b1", "b2"}) + sum(
        counts[name] - 1 for name in ("b0", "b1", "b2")
    )
    assert 200 < len(taken) < 300
    assert Counter(questions(source(tmp_path, sources=sources))) == counts
    assert Counter(questions(source(tmp_path, sources=sources, seed=1))) != counts
    half = source(tmp_path, sources=[SourceConfig(path=b, weight=1.5)])
    assert set(Counter(questions(half)).values()) == {1, 2}
    assert half.identity() != found.identity()


def test_sources_that_cannot_be(tmp_path: Path):
    a = pairs(tmp_path, "a", 2)
    with pytest.raises(ConfigError, match=r"sources\[1\]\.weight=0"):
        list(source(tmp_path, sources=[SourceConfig(a), SourceConfig(a, weight=0)]).rows())
    with pytest.raises(ConfigError, match=r"sources\[0\]\.path is empty"):
        list(source(tmp_path, sources=[SourceConfig()]).rows())


def test_identical_rows_are_taken_once_and_never_held_out(tmp_path: Path):
    rows = [{"prompt": f"q{i % 6}", "response": "A", "id": i} for i in range(12)]
    path = lines(tmp_path / "rows.jsonl", rows)
    whole = source(tmp_path, path=path)
    assert len(questions(whole)) == 12
    once = source(tmp_path, path=path, deduplicate=True)
    assert questions(once) == [f"q{i}" for i in range(6)]
    assert once.left_out == {"identical to an earlier row": 6}
    parts = [
        questions(source(tmp_path, split, path=path, deduplicate=True, eval_samples=2))
        for split in ("train", "eval")
    ]
    assert [len(part) for part in parts] == [4, 2]
    assert sorted(parts[0] + parts[1]) == [f"q{i}" for i in range(6)]
    with pytest.raises(ConfigError, match="eval_samples=6 of 6 rows"):
        questions(source(tmp_path, path=path, deduplicate=True, eval_samples=6))


def test_held_out_rows_of_several_sources_are_never_trained(tmp_path: Path):
    a, b = pairs(tmp_path, "a", 30), pairs(tmp_path, "b", 30)
    options = {"sources": [SourceConfig(a, weight=3), SourceConfig(b)], "eval_samples": 10}
    train = Counter(questions(source(tmp_path, "train", **options)))
    held_out = Counter(questions(source(tmp_path, "eval", **options)))
    assert len(held_out) == 10
    assert set(held_out.values()) == {1}
    assert not set(train) & set(held_out)
    assert len(set(train) | set(held_out)) == 60
    assert {name[0] for name in held_out} == {"a", "b"}
