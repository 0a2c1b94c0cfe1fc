"""``python -m llmx generate``: its options, what they do, and what a mistake says."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from llmx.cli import generate
from llmx.cli.arguments import check_spelling
from llmx.cli.flags import parse
from llmx.cli.generate import Stream, learns_chats, wanted
from llmx.cli.main import main, run_here
from llmx.errors import ConfigError
from llmx.models.sampling import Sampling
from llmx.run.rundir import RunDir
from tests.reference import word_tokenizer
from tests.rundirs import experiment, write_run
from tests.small_models import small_model

STOP = frozenset({2})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of pretraining that wrote its model."""
    run_dir = write_run(
        experiment(tmp_path_factory.mktemp("run"), ranks=1, task={"kind": "pretrain"})
    )
    small_model("llama").save_pretrained(run_dir.final_model)
    word_tokenizer().save_pretrained(run_dir.final_model)
    return run_dir


def completed(run: RunDir, capsys: Any, *words: str, code: int = 0) -> list[str]:
    assert run_here("generate", [str(run.root), *words]) == code
    return list(capsys.readouterr().out.splitlines())


def test_a_seed_gives_the_same_completions_again(run: RunDir, capsys: Any) -> None:
    keys = ["--temperature=1.5", "--top-p=0.99", "--top-k=80", "--max-new-tokens=8"]
    first = completed(run, capsys, "w5 w6", *keys, "--seed=1", "--n=3")
    assert [line[:6] for line in first] == ["[1/3] ", "[2/3] ", "[3/3] "]
    assert len({line[6:] for line in first}) == 3
    assert completed(run, capsys, *keys, "--seed=1", "--n=3", "w5 w6") == first
    assert completed(run, capsys, "w5 w6", *keys, "--seed=1", "--n=2")[0] == "[1/2] " + first[0][6:]
    assert completed(run, capsys, "w5 w6", *keys, "--seed=1") == [first[0][6:]]
    assert completed(run, capsys, "w5 w6", *keys, "--seed=2") != [first[0][6:]]
    drawn = {completed(run, capsys, "w5 w6", *keys)[0] for _ in range(3)}
    assert len(drawn) > 1


def test_json_has_tokens_and_log_probabilities(run: RunDir, capsys: Any) -> None:
    words = ["w5 w6", "w7", "--json", "--n=2", "--max-new-tokens", "4"]
    lines = [json.loads(line) for line in completed(run, capsys, *words)]
    assert [line["prompt"] for line in lines] == ["w5 w6", "w5 w6", "w7", "w7"]
    for line in lines:
        assert len(line["tokens"]) == len(line["logps"]) == len(line["sampled_logps"]) <= 4
        assert line["logps"] == line["sampled_logps"], "temperature 1: the model itself"
        kept = line["tokens"][: -1 if line["ended"] == "stop" else None]
        assert line["completion"] == word_tokenizer().decode(kept, skip_special_tokens=True)
        again = completed(
            run, capsys, line["prompt"], "--json", f"--seed={line['seed']}", "--max-new-tokens=4"
        )
        alone = json.loads(again[0])
        for name in ("logps", "sampled_logps"):  # up to the arithmetic of another batch
            assert alone.pop(name) == pytest.approx(line.pop(name), abs=1e-5)
        assert alone == line
    greedy = json.loads(completed(run, capsys, "w7", "--json")[0])
    assert greedy["seed"] is None
    assert set(greedy["sampled_logps"]) == {0.0}


def test_a_prompt_may_look_like_an_option(run: RunDir, capsys: Any) -> None:
    plain = completed(run, capsys, "--", "w5")
    assert completed(run, capsys, "w5") == plain
    assert len(completed(run, capsys, "w5", "--", "--n=2", "--json")) == 3


def test_the_words_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    words = ["lr=1", "what is x = 1?", "1+1=", "--n=2", "--json", "--", "n=3"]
    check_spelling("generate", words)
    options = parse("generate", words)
    assert (str(options.target), options.prompt) == ("lr=1", ["what is x = 1?", "1+1="])
    assert (options.json, options.n, options.behind) == (True, 2, ["n=3"])


def test_an_option_of_sampling_alone_means_temperature_1() -> None:
    def sampling(*words: str) -> Sampling:
        options = parse("generate", ["x", *words])
        return wanted(options, n=options.n).sampling

    assert sampling().greedy
    assert sampling("--n=1", "--top-p=1", "--top-k=0").greedy
    for word in ("--top-p=0.9", "--top-k=5", "--seed=1", "--n=2"):
        assert sampling(word).temperature == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--temprature=0.7"], 'Did you mean "--temperature"?'),
        (["--temperature=hot"], "--temperature: hot is not a number from 0 to 100"),
        (["--temperature=0.001"], "temperature=0.001 must be 0 (greedy), or a number from 0.01"),
        (["--n=two"], "--n: two is not a whole number from 1 to 10000"),
        (["--top-p=0.9", "--temperature=0"], "--top-p has no effect with --temperature 0"),
        (["--n=2", "--temperature=0"], "--n has no effect with --temperature 0 (greedy)"),
        (["--seed=3", "--temperature=0"], "leave --seed out"),
        (["--max-new-tokens=0"], "--max-new-tokens: 0 is not a whole number from 1"),
    ],
)
def test_a_mistake_says_what_to_type(run: RunDir, capsys: Any, words: Any, says: str) -> None:
    assert run_here("generate", [str(run.root), "w5", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_other_spelling_is_named(capsys: Any) -> None:
    for words, says in (
        (["generate", "x", "top_p=0.9"], "top_p=0.9: write --top-p 0.9. To complete it as a pro"),
        (["export", "x", "to=gguf"], "to=gguf: write --to gguf."),
        (["doctor", "json=true"], "json=true: write --json."),
        (["data", "--preview", "3"], "--preview: write preview=N."),
        (["resume", "x", "--step=4"], "--step=4: write step=4."),
    ):
        assert main(words) == 2
        assert says in capsys.readouterr().err
    check_spelling("chat", ["x", "--system", "seed=1"])


def test_a_prompt_without_tokens_is_said(run: RunDir, capsys: Any) -> None:
    assert run_here("generate", [str(run.root), "", "w5"]) == ConfigError.exit_code
    said = capsys.readouterr()
    assert "llmx: the prompt has no tokens." in said.err
    assert len(said.out.splitlines()) == 1


def test_a_terminal_sees_a_completion_grow(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "REDRAW_S", 0.0)
    pieces = ["one", " ", "two\x1b", "\ufffd", "!", " "]

    def decode(tokens: Any) -> str:
        return "".join(pieces[n] for n in tokens).strip()

    stream = Stream(decode, frozenset({9}))
    shown = []
    for token in (0, 1, 2, 3):
        stream.on_token(0, token)
        shown.append(capsys.readouterr().out)
    assert shown == ["one", "", " two\\x1b", ""], "half a character waits for its other half"
    pieces[3] = "é"
    stream.on_token(0, 4)
    stream.on_token(0, 5)
    stream.on_token(0, 9)
    assert capsys.readouterr().out == "é!"
    stream.end("one two\x1bé!")
    assert capsys.readouterr().out == "\n"
    stream.end("another")
    assert capsys.readouterr().out == "\nanother\n"


def test_a_prompt_is_a_question_where_conversations_were_learned() -> None:
    assert learns_chats("sft")
    assert not learns_chats("pretrain")
    assert learns_chats("not_installed_here:Own"), "as most tasks"


def test_an_empty_input_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run_here("generate", [str(directory)]) == 2
    assert "standard input is empty" in capsys.readouterr().err
