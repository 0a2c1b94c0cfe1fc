"""What ``data`` must hold before a file is read: each broken rule is said, with its key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from llmx.config import DataConfig, Experiment, SourceConfig, file_formats
from llmx.config.validate import COLUMNS, data_problems
from llmx.data import split as part
from llmx.data.format.formats import FORMATS, Format, Reading, conversation_of
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.lines import lines_of
from llmx.data.source.records import OnBad, Record, refuse
from llmx.data.split import DatasetSplit, Source
from llmx.errors import DataError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {"promt": "x"}}, 'data.columns.promt: no such column. Did you mean "p'),
        ({"data_map": {"response": "x"}}, "data.data_map.response: no such column."),
        (
            {"sources": [SourceConfig("a", columns={"b": "c"})]},
            "data.sources[0].columns.b: no such",
        ),
    ],
)
def test_a_broken_rule(changes: dict, message: str):
    exp = Experiment()
    assert list(data_problems(exp.data)) == []
    for name, value in changes.items():
        setattr(exp.data, name, value)
    (problem,) = data_problems(exp.data)
    assert problem.startswith(message)


def test_every_key_of_a_form_can_be_mapped():
    keys = {key for one in FORMATS.values() for key in one.keys}
    assert keys <= set(COLUMNS)


def test_the_text_column_may_be_mapped_like_the_others(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "words"}\n')
    exp = Experiment()
    exp.data.path, exp.data.columns = str(path), {"text": "body"}
    (row,) = DatasetSplit.of(exp.data, exp.seed, "train").rows()
    assert row is not None
    assert row.text == "words"  # type: ignore[union-attr]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "words"}\n')
    exp = Experiment()
    exp.data.path = str(path)

    def refuses(file: Path, *, cache: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    # Root, as whom tests may run, is refused nothing.
    monkeypatch.setattr(part, "digest_of", refuses)
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read \(Permission denied\)"):
        DatasetSplit.of(exp.data, exp.seed, "train").digests(cache=tmp_path)


def test_another_format_and_file_type_come_from_outside(tmp_path: Path, monkeypatch):
    """A file with two functions and two calls: no other code of llmx knows of them."""

    def to_dialogue(record: Record, reading: Reading) -> Conversation | None:
        question, answer = record.value["dialogue"].split(" -> ")
        messages = [Message("user", question), Message("assistant", answer)]
        return conversation_of(record, messages, reading)

    dialogue = Format("dialogue", ("dialogue",), {Conversation: to_dialogue}, keys=("dialogue",))
    monkeypatch.setitem(FORMATS, "dialogue", dialogue)  # as ``register`` does, and undone
    monkeypatch.setattr(file_formats, "FILE_TYPES", [*file_formats.FILE_TYPES, LINES])
    (tmp_path / "rows.dialogue").write_text("Q -> A\nq -> a\n")
    source = Source.of(DataConfig(), SourceConfig(path=str(tmp_path)), split="train")
    assert source.form == "dialogue"
    rows = list(source.rows(refuse))
    assert [[message.content for message in row.messages] for row in rows] == [
        ["Q", "A"],
        ["q", "a"],
    ]


def read_dialogues(file: Path, stream: IO[bytes], bad: OnBad, text_unit: str) -> Iterator[Record]:
    for line, where in lines_of(file, stream, bad):
        yield Record({"dialogue": line.strip()}, where)


LINES = file_formats.FileType((".dialogue",), f"{__name__}:read_dialogues")
