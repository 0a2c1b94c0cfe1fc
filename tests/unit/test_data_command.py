"""``llmx data``: the summary, the preview; near duplicates, contaminated rows, mixtures and splits
as a new file; the bundled set."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmx.cli import data as command
from llmx.cli.data_out import Options
from llmx.cli.main import run_here
from llmx.cli.words import parse
from llmx.config.build import shown
from llmx.data import progress
from llmx.data.progress import MIB, PreparationProgress
from llmx.data.similar import EvalTexts, NearDuplicates, words_of
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.data.store.samples import Sample
from llmx.data.store.summary import sample_lines
from llmx.errors import ConfigError, exit_code
from tests.conftest import REPOSITORY
from tests.data_rows import write_rows
from tests.rundirs import experiment
from tests.small_tokenizers import byte_tokenizer

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


def data(*words: str, **options: Any) -> int:
    """The command on a composed config, in this process."""
    exp = experiment(Path("run").absolute(), data={"max_rows": None, **options})
    return exit_code(lambda: command.run(exp, parse("data", words).own))


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_prepares_and_says_what_became_of_the_rows(here: Path, capfd: pytest.CaptureFixture[str]):
    rows = [{"prompt": f"What is {i}?", "response": "A number."} for i in range(20)]
    rows += [{"prompt": "word " * 300, "response": "lost"}, {"prompt": "q", "response": ""}]
    path = write_rows(here / "chats.jsonl", rows)
    words = ["model=tiny", "model.tokenizer=demo", f"data.path={path}"]
    code, said = run_here("data", [*words, "data.seq_len=256", "preview=1"]), capfd.readouterr()
    assert code == 0, said.err
    assert "22 read, 20 in samples" in said.out
    assert "without an answer (1), without an answer in the first seq_len tokens (1)" in said.out
    assert "format prompt_response" in " ".join(said.out.replace("│", " ").split())
    assert re.search(r"up to +\d+  █+ +\d", said.out)
    for shown_of_the_sample in ("── example 6", "«", "⟨<|end|>⟩", "\n... and "):
        assert shown_of_the_sample in said.out
    assert "── example 7" not in said.out
    assert re.search(r"time +│ preparing took", said.out)
    assert run_here("data", [*words, "data.seq_len=256"]) == 0
    assert re.search(r"time +│ found prepared; preparing took", capfd.readouterr().out)
    # Nothing but the store: preparing is no run.
    assert not list(here.rglob("plan.json"))


def test_unknown_words_and_values_are_errors(here: Path, capsys: pytest.CaptureFixture[str]):
    words = parse("data", ["preview=3", "data.seq_len=4", "split=eval"])
    assert (words.own, words.overrides) == ({"preview": "3", "split": "eval"}, ("data.seq_len=4",))
    with pytest.raises(ConfigError, match=r'prevew: no such key. Did you mean "preview"'):
        parse("data", ["prevew=3"])
    for word in ("preview=many", "split=test", "preview=" + "9" * 5000):
        assert data(word) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"llmx: {shown(word)}"[:50])
        assert error.count("\n") == 1


def test_preview_shows_every_token_once():
    tokenizer = byte_tokenizer("<|x|>")
    first, second = (tokenizer(text)["input_ids"] for text in ("ab", "é\n€"))
    control = tokenizer.convert_tokens_to_ids("<|x|>")
    tokens = np.array([*first, control, *second], np.uint32)
    targets = np.zeros(len(tokens), np.bool_)
    targets[1:3] = True
    sample = Sample(tokens, targets, np.array([0, 3]))
    lines = sample_lines(sample, tokenizer, colour=False)
    assert ["".join(text for text, _ in line) for line in lines] == [
        "── example 1, 3 tokens ──",
        "a«b|⟨<|x|>⟩»",
        "── example 2, 6 tokens ──",
        "é|↵\n|€",
    ]
    coloured = sample_lines(sample, tokenizer, colour=True)
    assert [style for _, style in coloured[1]] == ["", "green", "black on green"]
    assert "".join(text for text, _ in coloured[3]) == "é↵\n€"


def test_progress_is_a_line_now_and_then_with_rates_and_what_is_left(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    stream = io.StringIO()
    with PreparationProgress("Preparing x", total_bytes=4 * MIB, stream=stream) as shown:
        shown.add(size=MIB, tokens=1000)
        shown.add(size=3 * MIB, tokens=1000)
    first, last = stream.getvalue().splitlines()
    number = r"[\d,]+\.\d+"
    pattern = rf"Preparing x: 25%, 1\.0 MiB, {number} MiB/s, {number} M tokens/s, \d+:\d\d left"
    assert re.fullmatch(pattern, first)
    assert last.startswith("Preparing x: 100%, 4.0 MiB, ")
    assert last.endswith(" 0:00 left")
    monkeypatch.undo()
    with PreparationProgress("short, of an unknown end", stream=(stream := io.StringIO())) as shown:
        shown.add(size=MIB, tokens=1000)
    assert stream.getvalue() == ""
    assert "left" not in shown.rates()


# out=: a new file


def chat(prompt: str, response: str, number: int) -> dict[str, Any]:
    return {"id": number, "prompt": prompt, "response": response}


def distinct(count: int, start: int = 0) -> list[dict[str, Any]]:
    words = [(n, ANSWERS[n % 10]) for n in range(count)]
    return [
        chat(f"Where is the {word} {n} {word}{n} kept at night?", f"In {word} hall {n}.", start + n)
        for n, word in words
    ]


def test_words_in_scripts_without_blanks_are_characters() -> None:
    pytest.importorskip("rensa")
    words = ["a", "don", "t", "stop", "天", "雷", "2", "日"]
    assert words_of("\uff21 ｢Don't｣ stop, 天雷\uff01 2日") == words
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


def test_rows_are_removed_split_and_recorded(here: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("rensa")
    rows = distinct(40)
    rows.append({**rows[3], "id": 100})
    rows.append(chat("Tell me a story.", STORY, 101))
    rows.append(chat("Tell me a story!", STORY.replace("winter", "autumn"), 102))
    rows.append(chat("Who wrote it?", "It reads: " + " ".join(ANSWERS) + " one two three end", 103))
    source = write_rows(here / "rows.jsonl", rows)
    write_rows(here / "test.jsonl", [chat("What?", " ".join(ANSWERS) + " one two three", 0)])
    words = ["near=0.7", "decontaminate=test.jsonl"]
    assert data(*words, path=str(source)) == 0
    report = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for line in (
        "rows read 44 identical to an earlier row 1 (2.27 %) rows.jsonl, line 41:",
        "near duplicates 1 (2.27 %) rows.jsonl, line 43 (like line 42, 0.",
        "contaminated 1 (2.27 %) rows.jsonl, line 44: cedar falcon",
        "written nothing; out=FILE.jsonl",
    ):
        assert line in report
    assert not list(here.glob("*.provenance.json"))
    assert data(*words, "out=clean.jsonl", path=str(source), eval_fraction=0.1) == 0
    train, held_out = read("clean.jsonl"), read("clean.eval.jsonl")
    assert len(held_out) == 4
    kept = [row for row in rows if row["id"] < 102 and row["id"] != 100]
    assert sorted(train + held_out, key=lambda row: row["id"]) == kept
    record = json.loads(Path("clean.provenance.json").read_text())
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert record["sources"][0]["sha256"] == {str(source): digest}
    assert sum(record["rows_removed"].values()) == 3
    assert record["files"]["clean.jsonl"]["rows"] == 37
    capsys.readouterr()
    assert data(*words, "out=clean.jsonl", path=str(source)) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_mixture_is_written_by_weight(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = str(write_rows(here / "a.jsonl", distinct(3)))
    second = str(write_rows(here / "b.jsonl", distinct(2, start=50)))
    sources = [{"path": first, "weight": 2}, {"path": second}]
    assert data("out=mixed.jsonl", sources=sources) == 0
    assert [row["id"] for row in read("mixed.jsonl")] == [0, 1, 2, 0, 1, 2, 50, 51]
    other = str(write_rows(here / "c.jsonl", [{"text": STORY}]))
    assert data("out=both.jsonl", sources=[{"path": first}, {"path": other}]) == 2
    assert "the sources have different formats" in capsys.readouterr().err


def test_values_are_checked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rensa")
    for words, problem in (
        (["near=2"], "near=2: must be a number from 0.3 to 1"),
        (["decontaminate=a", "ngram=4.5"], "ngram=4.5: must be a whole number from 5"),
        (["ngram=8"], "ngram is for decontaminate"),
        (["out=rows.csv"], "must end in .jsonl"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Options.of(parse("data", words).own)
    assert data("near=0.8", "preview=2") == 2
    assert "preview shows prepared data, and near prepares none" in capsys.readouterr().err


# The bundled set


def test_the_script_makes_the_bundled_bytes(tmp_path: Path):
    script = REPOSITORY / "scripts" / "make_demo_data.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True)
    made, bundled = (
        {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        for place in (tmp_path, DEMO_DIRECTORY)
    )
    assert made == bundled
    asked, asked_later = (
        {row["prompt"].lower() for row in read(f"{DEMO_DIRECTORY}/{name}.jsonl")}
        for name in ("train", "eval")
    )
    assert asked_later
    assert not asked & asked_later, "what is evaluated is new"
