"""Sources: the Hub, several at once with weights, rows that are left out or held out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmx.config import Experiment, SourceConfig
from llmx.data import split as part
from llmx.data.format.rows import Conversation
from llmx.data.source import files as digests
from llmx.data.source.files import digest_of
from llmx.data.source.hub import hub_id, hub_rows, revision_of
from llmx.data.split import DatasetSplit
from llmx.data.store.samples import sha256_of_file
from llmx.errors import ConfigError, DataError
from tests.data_rows import BOT, USER, write_rows


def split_of(split: str = "train", *, seed: int = 0, **data: Any) -> DatasetSplit:
    exp = Experiment()
    for name, value in data.items():
        setattr(exp.data, name, value)
    return DatasetSplit(exp.data, seed, split)


def questions(split: str = "train", **options: Any) -> list[str]:
    rows = list(split_of(split, **options).rows())
    assert all(isinstance(row, Conversation) for row in rows)
    return [row.messages[0].content for row in rows]


def pairs(directory: Path, name: str, count: int) -> str:
    rows = [{"prompt": f"{name}{i}", "response": "A"} for i in range(count)]
    return str(write_rows(directory / f"{name}.jsonl", rows))


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
    rows = [{"text": str(i)} for i in range(3)]
    write_rows(tmp_path / "data" / "train-0.jsonl", rows)
    write_rows(tmp_path / "data" / "test-0.jsonl", [{"text": "t"}])
    found = list(hub_rows(str(tmp_path), subset=None, split=None))
    assert [record.value for record in found] == rows
    assert str(found[2].where) == f"{tmp_path}, row 3"
    (record,) = hub_rows(str(tmp_path), subset=None, split="test")
    assert record.value == {"text": "t"}
    with pytest.raises(DataError, match=r"dev.*data\.split"):
        next(hub_rows(str(tmp_path), subset=None, split="dev"))


def test_an_unreachable_hub_names_the_way_out(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.path=owner/name: neither.*hf download owner/name"):
        revision_of("owner/name")
    with pytest.raises(DataError, match=r"--repo-type dataset --local-dir DIR"):
        split_of(path="owner/name").digests(cache=tmp_path)


# Digests


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch):
    file, cache = tmp_path / "big.txt", tmp_path / "cache"
    file.write_bytes(b"a" * digests.WORTH_BYTES)
    first = digest_of(file, cache=cache)
    assert first == sha256_of_file(file)
    with monkeypatch.context() as context:
        context.setattr(digests, "sha256_of_file", None)  # it is not called
        assert digest_of(file, cache=cache) == first
    (note,) = (cache / "digests").iterdir()
    note.write_text("{")
    assert digest_of(file, cache=cache) == first
    with file.open("ab") as stream:
        stream.write(b"b")
    assert digest_of(file, cache=cache) == sha256_of_file(file) != first
    small = tmp_path / "small.txt"
    small.write_text("a")
    for path in (small, file):  # no cache can be made there
        assert digest_of(path, cache=tmp_path / "big.txt") == sha256_of_file(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(file: Path, *, cache: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    # Root, as whom tests may run, is refused nothing.
    monkeypatch.setattr(part, "digest_of", refuses)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(Permission denied\)"):
        split_of(path=pairs(tmp_path, "a", 1)).digests(cache=tmp_path)


# Several sources


def test_weights_and_limits(tmp_path: Path):
    a, b = pairs(tmp_path, "a", 4), pairs(tmp_path, "b", 1000)
    chat = str(write_rows(tmp_path / "c.jsonl", [{"messages": [USER, BOT]}] * 5))
    sources = [
        SourceConfig(path=a, weight=2),
        SourceConfig(path=b, weight=0.25),
        SourceConfig(path=b, max_rows=3),
        SourceConfig(path=chat),
    ]
    found = split_of(sources=sources)
    assert found.form == "prompt_response+messages"
    counts = Counter(questions(sources=sources))
    assert [counts[f"a{i}"] for i in range(4)] == [2] * 4
    assert counts["q"] == 5
    taken = {name for name in counts if name.startswith("b")}
    assert {"b0", "b1", "b2"} <= taken
    # Those of the second source, once each, and the three of the third.
    assert {counts[name] for name in taken - {"b0", "b1", "b2"}} == {1}
    assert {counts[name] for name in ("b0", "b1", "b2")} <= {1, 2}
    assert 200 < len(taken) < 300
    assert Counter(questions(sources=sources)) == counts
    assert Counter(questions(sources=sources, seed=1)) != counts
    half = [SourceConfig(path=b, weight=1.5)]
    assert set(Counter(questions(sources=half)).values()) == {1, 2}
    assert split_of(sources=half).identity() != found.identity()


def test_identical_rows_are_taken_once_and_never_held_out(tmp_path: Path):
    rows = [{"prompt": f"q{i % 6}", "response": "A", "id": i} for i in range(12)]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    once = {"path": path, "deduplicate": True}
    assert len(questions(path=path)) == 12
    found = split_of(**once)
    assert len(list(found.rows())) == 6
    assert found.left_out == {"identical to an earlier row": 6}
    train, held_out = (questions(split, **once, eval_samples=2) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (4, 2)
    assert sorted(train + held_out) == questions(**once) == [f"q{i}" for i in range(6)]
    with pytest.raises(ConfigError, match="eval_samples=6 of 6 rows"):
        questions(**once, eval_samples=6)


def test_held_out_rows_of_several_sources_are_never_trained(tmp_path: Path):
    a, b = pairs(tmp_path, "a", 30), pairs(tmp_path, "b", 30)
    options = {"sources": [SourceConfig(a, weight=3), SourceConfig(b)], "eval_samples": 10}
    train, held_out = (Counter(questions(split, **options)) for split in ("train", "eval"))
    assert len(held_out) == 10
    assert set(held_out.values()) == {1}
    assert not set(train) & set(held_out)
    assert len(set(train) | set(held_out)) == 60
    assert {name[0] for name in held_out} == {"a", "b"}
