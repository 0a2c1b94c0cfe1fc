"""``llmx data out=``: near duplicates, contaminated rows, mixtures and splits as a new file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from llmx.__main__ import main
from llmx.cli.data_out import Options
from llmx.data.similar import EvalTexts, NearDuplicates, words_of
from llmx.errors import ConfigError

pytest.importorskip("rensa")

STORY = (
    "the old lighthouse keeper climbed the spiral stairs every evening to light the lamp before "
    "the fishing boats came home through the fog and the long dark winter nights of the north"
)
ANSWERS = "cedar falcon granite helium indigo juniper kestrel lantern mosaic nectar".split()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(prompt: str, response: str, number: int) -> dict[str, Any]:
    return {"id": number, "prompt": prompt, "response": response}


def distinct(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        chat(f"Where is the {word} {n} {word}{n} kept at night?", f"In {word} hall {n}.", start + n)
        for n in range(count)
        for word in ANSWERS[n % 10 : n % 10 + 1]
    ]


def test_words_in_scripts_without_blanks_are_characters() -> None:
    assert words_of("\uff21 ｢Don't｣ stop, 天雷\uff01 2日") == [
        "a",
        "don",
        "t",
        "stop",
        "天",
        "雷",
        "2",
        "日",
    ]
    near = NearDuplicates(0.7, shingle=3)
    text = "今天的天气非常好我们一起去公园里散步然后回家吃晚饭看电影"
    assert near.add(0, words_of(text)) is None
    key, similarity = near.add(1, words_of(f"{text}。吧")) or (None, 0.0)
    assert key == 0
    assert similarity > 0.9
    assert near.add(2, words_of("明天下雨所以我们只能留在家里读书写字画画")) is None
    assert near.add(3, []) is near.add(4, []) is None


def test_contamination_is_a_run_of_words_of_an_evaluation_text() -> None:
    template = "answer the following question with a single letter and nothing else at all please"
    texts = [[f"{template} {word}", "yes"] for word in ANSWERS * 2] + [[STORY], ["天" * 9 + "地"]]
    found = EvalTexts(texts, length=13)
    words = STORY.split()
    assert found.match(["a", *words[4:17], "b"]) == " ".join(words[4:17])
    assert found.match(["a", *words[4:16], "b"]) == ""
    assert found.match(words_of(f"{template} something new")) == "", "the template of 20 rows"
    assert found.match(["yes"]) == ""
    assert found.match(words_of("我说" + "天" * 9 + "地" + "了")) == "天" * 9 + "地"


def test_rows_are_removed_split_and_recorded(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = distinct(40)
    rows.append({**rows[3], "id": 100})
    rows.append(chat("Tell me a story.", STORY, 101))
    rows.append(chat("Tell me a story!", STORY.replace("winter", "autumn"), 102))
    rows.append(chat("Who wrote it?", "It reads: " + " ".join(ANSWERS) + " one two three end", 103))
    source = write(here / "rows.jsonl", rows)
    write(here / "test.jsonl", [chat("What?", " ".join(ANSWERS) + " one two three", 0)])
    words = ["data", f"data.path={source}", "near=0.7", "decontaminate=test.jsonl"]
    assert main(words) == 0
    report = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert "rows read 44 identical to an earlier row 1 (2.27 %) rows.jsonl, line 41:" in report
    assert "near duplicates 1 (2.27 %) rows.jsonl, line 43 (like line 42, 0." in report
    assert "contaminated 1 (2.27 %) rows.jsonl, line 44: cedar falcon" in report
    assert "written nothing; out=FILE.jsonl" in report
    assert not list(here.glob("*.provenance.json"))
    assert main([*words, "out=clean.jsonl", "data.eval_fraction=0.1"]) == 0, capfd.readouterr().err
    train, held_out = read(here / "clean.jsonl"), read(here / "clean.eval.jsonl")
    assert len(held_out) == 4
    kept = [row for row in rows if row["id"] < 102 and row["id"] != 100]
    assert sorted(train + held_out, key=lambda row: row["id"]) == kept
    record = json.loads((here / "clean.provenance.json").read_text())
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert record["sources"][0]["sha256"] == {str(source): digest}
    assert sum(record["rows_removed"].values()) == 3
    assert record["files"]["clean.jsonl"]["rows"] == 37
    assert main([*words, "out=clean.jsonl"]) == 2
    assert "exists already" in capfd.readouterr().err


def test_a_mixture_is_written_by_weight(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = write(here / "a.jsonl", distinct(3))
    second = write(here / "b.jsonl", distinct(2, start=50))
    sources = f"data.sources=[{{path: {first}, weight: 2}}, {{path: {second}}}]"
    assert main(["data", "out=mixed.jsonl", sources]) == 0, capfd.readouterr().err
    ids = [row["id"] for row in read(here / "mixed.jsonl")]
    assert ids == [0, 1, 2, 0, 1, 2, 50, 51]
    other = write(here / "c.jsonl", [{"text": STORY}])
    sources = f"data.sources=[{{path: {first}}}, {{path: {other}}}]"
    assert main(["data", "out=both.jsonl", sources]) == 2
    assert "the sources have different formats" in capfd.readouterr().err


def test_values_are_checked(capfd: pytest.CaptureFixture[str]) -> None:
    for words, problem in (
        ({"near": "2"}, "near=2: must be a number from 0.3 to 1"),
        ({"decontaminate": "a", "ngram": "4.5"}, "ngram=4.5: must be a whole number from 5"),
        ({"ngram": "8"}, "ngram is for decontaminate"),
        ({"out": "rows.csv"}, "must end in .jsonl"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Options.of(words)
    assert main(["data", "near=0.8", "preview=2"]) == 2
    assert "preview shows prepared data, and near prepares none" in capfd.readouterr().err


def test_reviews_that_are_in_the_test_set_are_found(
    here: Path, real_data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reviews = real_data / "book_review"
    words = ["data=labelled", f"data.path={reviews / 'train.tsv'}", "data.data_map.label=label"]
    words += ["data.data_map.prompt=text_a", f"decontaminate={reviews / 'test.tsv'}", "near=0.8"]
    assert main(["data", *words, "data.max_rows=3000", "out=clean.jsonl"]) == 0
    in_test = {line.split("\t")[1] for line in (reviews / "test.tsv").read_text().splitlines()}
    removed = json.loads((here / "clean.provenance.json").read_text())["rows_removed"]
    assert removed["contaminated"] > 30
    texts = [row["text_a"] for row in read(here / "clean.jsonl")]
    assert not any(words_of(text) for text in in_test & set(texts)), "none but symbols"
    assert len(texts) == 3000 - sum(removed.values())
