"""``llmx data``: the summary, the picture, the preview, and the words it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmx.__main__ import main
from llmx.cli.arguments import split_own
from llmx.config.build import shown
from llmx.data.store.samples import Sample
from llmx.data.store.summary import sample_lines
from llmx.errors import ConfigError
from tests.small_tokenizers import byte_tokenizer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def test_prepares_and_says_what_became_of_the_rows(here: Path, capfd: pytest.CaptureFixture[str]):
    rows = [{"prompt": f"What is {i}?", "response": "A number."} for i in range(20)]
    rows += [{"prompt": "word " * 300, "response": "lost"}, {"prompt": "q", "response": ""}]
    path = here / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "data",
        "model=tiny",
        "model.tokenizer=demo",
        "data=file",
        f"data.path={path}",
        "data.seq_len=64",
    ]
    code, said = main([*words, "preview=1"]), capfd.readouterr()
    assert code == 0, said.err
    assert "22 read, 20 in samples" in said.out
    assert "without an answer (1), without an answer in the first seq_len tokens (1)" in said.out
    assert "format prompt_response" in " ".join(said.out.replace("│", " ").split())
    (picture,) = (here / "cache" / "data").glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "── example 1" in said.out
    assert "«" in said.out
    assert "⟨<|end|>⟩" in said.out
    # Nothing but the store: preparing is no run.
    assert not list(here.rglob("plan.json"))
    assert main(words) == 0
    assert "found prepared; preparing took" in capfd.readouterr().out


def test_unknown_words_are_errors(capfd):
    assert main(["data", "data.seq_lne=3"]) == 2
    assert 'Did you mean "data.seq_len"?' in capfd.readouterr().err
    assert main(["data", "nonsense"]) == 2
    assert main(["data", "-m", "data.seq_len=32,64"]) == 2
    assert "data: takes one config" in capfd.readouterr().err


@pytest.mark.parametrize("word", ["preview=many", "split=test", "preview=" + "9" * 5000])
def test_own_words_are_checked(here: Path, capfd: pytest.CaptureFixture[str], word: str):
    assert main(["data", word]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"llmx: {shown(word)}"[:50])
    assert error.count("\n") == 1


def test_own_words_are_told_from_overrides():
    words = ["preview=3", "data.seq_len=4", "split=eval"]
    assert split_own(words, ("preview", "split")) == (["preview=3", "split=eval"], words[1:2])
    with pytest.raises(ConfigError, match=r'prevew: no such key. Did you mean "preview"'):
        split_own(["prevew=3"], ("preview", "split"))


def test_preview_shows_every_token_once():
    tokenizer = byte_tokenizer("<|x|>")
    rows = ["ab", "é\n€"]
    ids = [tokenizer(text)["input_ids"] for text in rows]
    control = tokenizer.convert_tokens_to_ids("<|x|>")
    tokens = np.array([*ids[0], control, *ids[1]], np.uint32)
    targets = np.zeros(len(tokens), np.bool_)
    targets[1:3] = True
    sample = Sample(tokens, targets, np.array([0, 3]))
    lines = [
        "".join(text for text, _ in line) for line in sample_lines(sample, tokenizer, colour=False)
    ]
    assert lines == [
        "── example 1, 3 tokens ──",
        "a«b|⟨<|x|>⟩»",
        "── example 2, 6 tokens ──",
        "é|↵\n|€",
    ]
    coloured = sample_lines(sample, tokenizer, colour=True)
    assert [style for _, style in coloured[1]] == ["", "green", "black on green"]
    assert "".join(text for text, _ in coloured[3]) == "é↵\n€"
