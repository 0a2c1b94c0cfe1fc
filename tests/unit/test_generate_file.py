"""``generate --prompts``: the order, the batches, and a command that was killed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from llmx.cli import generate_file
from llmx.cli.generate_file import Job, _Progress, batches_of, read_prompts
from llmx.cli.main import run_here
from llmx.errors import DataError
from llmx.models import generate as service
from llmx.models.generate import decoder_of, takes_left_padding
from llmx.run.rundir import RunDir
from llmx.tasks import tokenizer_of
from tests.rundirs import experiment, write_run
from tests.small_models import KINDS, converted_model, small_model

QUESTIONS = [
    "Which of these is a kind of bird: oak, wren?",
    "Why?",
    "What is 3 plus 4?",
    "one two three four five six seven eight nine ten eleven twelve",
    "No?",
    "Say a word that rhymes with moon, and then another one.",
    "Why?",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    exp = experiment(tmp_path_factory.mktemp("run") / "writer", ranks=1)
    run_dir = write_run(exp)
    tokenizer = tokenizer_of(exp)
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    model.save_pretrained(run_dir.final_model)
    tokenizer.save_pretrained(run_dir.final_model)
    return run_dir


def command(run: RunDir, *words: Any, code: int = 0) -> None:
    assert run_here("generate", [str(run.root), *map(str, words)]) == code


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_questions(path: Path, count: int = len(QUESTIONS)) -> Path:
    lines = [{"prompt": text, "id": i} for i, text in enumerate(QUESTIONS[:count])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_are_in_the_order_of_the_prompts_and_as_one_by_one(
    run: RunDir, tmp_path: Path, capsys: Any
) -> None:
    path = write_questions(tmp_path / "q.jsonl")
    out = tmp_path / "a.jsonl"
    command(run, "--prompts", path, "--out", out, "--max-new-tokens=6", "--json")
    assert "7 completions; " in capsys.readouterr().out
    found = rows(out)
    assert [row["id"] for row in found] == list(range(7))
    assert [row["prompt"] for row in found] == QUESTIONS
    assert not (tmp_path / "a.jsonl.partial").exists()
    command(run, *QUESTIONS, "--max-new-tokens=6", "--json")
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for one, other in zip(found, alone, strict=True):
        assert one["completion"] == other["completion"]
        assert one["tokens"] == other["tokens"]
        assert one["logps"] == pytest.approx(other["logps"], abs=1e-4)
    command(run, "--prompts", path, "--out", out, "--max-new-tokens=6", code=2)
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [(), ("--temperature=1.2", "--top-p=0.95", "--seed=5", "--n=2")])
def test_a_killed_command_continues(
    run: RunDir, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, keys: Any
) -> None:
    monkeypatch.setattr(generate_file, "TOGETHER", 3)
    path = write_questions(tmp_path / "q.jsonl")
    words = ["--prompts", path, "--max-new-tokens=6", "--json", *keys]
    command(run, *words, "--out", tmp_path / "whole.jsonl")
    real, calls = service.generate, []

    def killed(*arguments: Any, **options: Any) -> Any:
        calls.append(len(arguments[1]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    out, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    monkeypatch.setattr(service, "generate", killed)
    command(run, *words, "--out", out, code=130)
    assert "the same command continues from" in capsys.readouterr().err
    assert not out.exists()
    with partial.open("ab") as stream:  # kill -9 amid a line
        stream.write(b'{"prompt": "Wh')
    monkeypatch.setattr(service, "generate", real)
    command(run, *words, "--out", out)
    assert "found; continuing." in capsys.readouterr().err
    for one, other in zip(rows(out), rows(tmp_path / "whole.jsonl"), strict=True):
        assert one["tokens"] == other["tokens"]
        assert {**one, "logps": [], "sampled_logps": []} == {
            **other, "logps": [], "sampled_logps": []
        }  # fmt: skip
    assert not partial.exists()


def test_another_command_is_refused_with_what_differs(
    run: RunDir, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_file, "TOGETHER", 3)
    path = write_questions(tmp_path / "q.jsonl")
    words = ["--prompts", path, "--out", tmp_path / "a.jsonl"]
    drawn = [*words, "--max-new-tokens=4", "--temperature=0.5"]
    real, calls = service.generate, []

    def killed(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(service, "generate", killed)
    command(run, *drawn, code=130)
    capsys.readouterr()
    for other, problem in (
        (
            [*words, "--max-new-tokens=4", "--temperature=0.6"],
            "temperature=0.5, and now temperature",
        ),
        ([*words, "--max-new-tokens=5", "--temperature=0.5"], "max_new_tokens=4, and now max_new"),
        ([*drawn, "--seed=1"], "and now seed=1"),
        ([*drawn, "--plain"], "plain=False, and now plain=True"),
    ):
        command(run, *other, code=2)
        assert problem in capsys.readouterr().err
    whole = path.read_text()
    path.write_text('{"prompt": "Less?"}\n' + whole)
    command(run, *drawn, code=2)
    assert "the prompts are other ones" in capsys.readouterr().err
    path.write_text(whole)
    monkeypatch.setattr(service, "generate", real)
    # The seed that was drawn stays; other batches may be asked for, as where memory was too small.
    command(run, *drawn, "--batch-tokens", 30)
    assert len({row["seed"] for row in rows(tmp_path / "a.jsonl")}) == len(QUESTIONS)
    for own in ("my own file\n", '{"mine": 1}\n'):
        (tmp_path / "b.jsonl.partial").write_text(own)
        command(run, "--prompts", path, "--out", tmp_path / "b.jsonl", code=2)
        assert "was not written by generate" in capsys.readouterr().err
        assert (tmp_path / "b.jsonl.partial").read_text() == own
    (tmp_path / "b.jsonl.partial").write_text('{"model": "/m')  # killed at the very start
    command(run, "--prompts", path, "--out", tmp_path / "b.jsonl", "--max-new-tokens=2")


def test_what_may_stand_in_a_file(run: RunDir, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "q.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    lines: list[dict[str, Any]] = [
        {"messages": chat},
        {"messages": [*chat, {"role": "assistant", "content": "So."}], "id": "x"},
        {"prompt": "Why?", "completion": "Thus."},
        {"prompt": [chat[1]]},
        {"prompt": "word " * 300},
    ]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(line) for line in lines))
    command(run, "--prompts", path, "--out", tmp_path / "a.jsonl", "--max-new-tokens=3")
    first, second, third, fourth, fifth = rows(tmp_path / "a.jsonl")
    assert first["completion"] == second["completion"]
    assert (second["expected"], second["id"]) == ("So.", "x")
    assert third["expected"] == "Thus."
    assert third["completion"] == fourth["completion"]
    assert (fifth["completion"], fifth["ended"]) == ("", "positions")
    assert "1 at the last position of the model" in capsys.readouterr().out
    text = tmp_path / "q.txt"
    text.write_text("Why?\n\n  No? \n")
    assert [prompt.text for prompt in read_prompts(text)] == ["Why?", "No?"]
    for content, problem in (
        ("", "there is no prompt in it"),
        ("[1]\n", "is JSON, but not an object"),
        ('{"text": "x"}\n', "has no prompt. A line is"),
        ('{"prompt": ""}\n{"a": 1}\n', "line 1: has no prompt"),
        ('{"prompt": "a"}\n{"prompt\n', "line 2: is not a JSON object"),
        ('{"prompt": "a\\ud800"}\n', "line 1: is not a JSON object"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "line 1"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=problem.replace("[", r"\[")):
            read_prompts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        read_prompts(path)
    for words, problem in (
        (("--prompts", text), "--out completions.jsonl"),
        (("--out", "x"), "add --prompts FILE"),
        (("Why?", "--prompts", text, "--out", "x"), "do not go together"),
    ):
        command(run, *words, code=2)
        assert problem in capsys.readouterr().err
    command(run, "--prompts", tmp_path / "none", "--out", "x", code=3)
    assert "cannot be read (No such file" in capsys.readouterr().err
    assert not Path("x.partial").exists()


def test_batches_keep_to_their_tokens() -> None:
    jobs = [Job(i, 0, (0,) * (5 + i * 7 % 40)) for i in range(50)]
    batches = batches_of(jobs, budget=200, new_tokens=10, equal=False)
    assert sorted(job.prompt for batch in batches for job in batch) == list(range(50))
    assert all(len(b) * (len(b[0].tokens) + 10) <= 200 or len(b) == 1 for b in batches)
    same = batches_of(jobs, budget=200, new_tokens=10, equal=True)
    assert all(len({len(job.tokens) for job in batch}) == 1 for batch in same)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_tried(kind: str) -> None:
    """Where it is found that nothing sees it, a batch of several lengths gives what each does."""
    model = small_model(kind)
    tried = decoder_of(model, try_padding=True)
    assert takes_left_padding(tried.config, tried.attention)


def test_a_state_along_the_sequence_sees_padding() -> None:
    layers = ["linear_attention", "full_attention"]
    model = converted_model("qwen3_5_text", layer_types=layers).eval()
    tried = decoder_of(model, try_padding=True)
    assert not takes_left_padding(tried.config, tried.attention)


@pytest.mark.parametrize("live", [True, False])
def test_progress_is_speed_and_the_time_that_is_left(
    live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, screen = [0.0], io.StringIO()
    screen.isatty = lambda: live  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("llmx.cli.generate_file.time.monotonic", lambda: now[0])
    progress = _Progress(20, 120)
    for _ in range(7):
        now[0] += 10.0
        progress.add(5, 1000)
    shown = screen.getvalue()
    assert "50 of 120 completions, 100 tokens/s, 2:20 left" in shown
    assert shown.count("completions") == (7 if live else 1), "a line a minute"
