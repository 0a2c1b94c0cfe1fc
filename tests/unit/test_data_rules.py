"""What ``data`` must hold before a file is read: each broken rule is said, with its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmx.config import Experiment, SourceConfig
from llmx.config.validate import COLUMNS, data_problems
from llmx.data import split as part
from llmx.data.format.formats import FORMATS
from llmx.data.split import DatasetSplit
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
