"""``data=[a,b]`` mixes data sets that have a name; a file that cannot be one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmx.compose.overrides import check_overrides
from llmx.errors import ConfigError
from tests.composing import composed

FILES = {
    "mine": 'path: a.jsonl\nform: alpaca\ncolumns: {instruction: "die Frage, groß"}\n',
    "reviews": "path: b.tsv\nform: labelled\ndata_map: {prompt: text_a}\nmax_rows: 5\n",
    "long": "path: c.jsonl\nseq_len: 4096\n",
    "nowhere": "form: alpaca\n",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name, text in FILES.items():
        (tmp_path / "data" / f"{name}.yaml").write_text(text)
    return tmp_path


def checked(directory: Path, *words: str) -> list[str]:
    return check_overrides(words, config_dirs=[str(directory)]).words


def test_named_data_sets_become_sources(directory: Path) -> None:
    assert checked(directory, "data=[mine,{reviews: 0.5}]") == [
        "data=mixture",
        "data.sources=[{path: 'a.jsonl', form: 'alpaca', columns: {instruction: "
        "'die Frage, groß'}, weight: 1}, {path: 'b.tsv', form: 'labelled', max_rows: 5, "
        "columns: {prompt: 'text_a'}, weight: 0.5}]",
    ]
    assert checked(directory, "data=[long]", "data.seq_len=512")[0] == "data=mixture"


def test_they_are_composed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    for name in ("a.jsonl", "b.tsv"):
        Path(name).write_text("")
    words = checked(directory, "data=[mine,{reviews: 0.5}]")
    first, second = composed(words).experiment.data.sources
    assert (first.path, first.weight) == (str(directory / "a.jsonl"), 1.0)
    assert first.columns == {"instruction": "die Frage, groß"}
    assert (second.form, second.max_rows, second.weight) == ("labelled", 5, 0.5)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data=[mine,reviewss]", 'no such option. Did you mean "reviews"'),
        ("data=[long]", r"data.seq_len holds for a whole mixture.* Type data.seq_len=4096"),
        ("data=[mine,nowhere]", "nowhere.yaml: has no path"),
        ("data=[mine,demo]", r"demo\.yaml: data\.seq_len holds for a whole mixture"),
        ("data=[{mine: much}]", r"data=\[{mine: much}\]: the weight is a number"),
        ("data=[]", "names no data set"),
    ],
)
def test_what_cannot_be_mixed_is_refused(directory: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(directory, word)


def test_a_defaults_list_does_not_drop_one_of_two_options(directory: Path) -> None:
    (directory / "experiment").mkdir()
    (directory / "experiment" / "both.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: [mine, reviews]\n"
    )
    with pytest.raises(ConfigError, match=r"line 3: data takes one option.*data\.sources"):
        checked(directory, "experiment=both")
