"""``python -m llmx generate``: prompts of the command line; files of them, and a command that was
killed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from llmx.cli import generate, generate_file
from llmx.cli.generate import Stream, learns_chats, sampling_of
from llmx.cli.generate_file import Job, _Progress, batches_of, read_prompts
from llmx.cli.main import main, run_here
from llmx.cli.target import find_target, load_network
from llmx.cli.words import parse
from llmx.config.schema import TaskConfig
from llmx.errors import DataError
from llmx.models import generate as service
from llmx.models.generate import decoder_of, takes_left_padding
from llmx.models.sampling import Sampling
from llmx.run.rundir import RunDir
from llmx.tasks import tokenizer_of
from tests.data_rows import turn, write_rows
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
    """An SFT run that wrote its model."""
    exp = experiment(tmp_path_factory.mktemp("run") / "writer", ranks=1)
    run_dir, tokenizer = write_run(exp), tokenizer_of(exp)
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    model.save_pretrained(run_dir.final_model)
    tokenizer.save_pretrained(run_dir.final_model)
    return run_dir


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_bf16_is_fp16_on_a_gpu_that_emulates_it(
    capability: tuple[int, int], dtype: str, run: RunDir, tmp_path: Path, monkeypatch: Any
) -> None:
    """But for what is fp32, such as the frequencies of the positions."""
    saved = AutoModelForCausalLM.from_pretrained(run.final_model, dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    target = find_target(tmp_path, command="generate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda network, device: network)
    network = load_network(target)
    assert {str(p.dtype) for p in network.parameters()} == {f"torch.{dtype}"}
    assert {b.dtype for b in network.buffers()} == {torch.float32}
    assert decoder_of(network).dtype == getattr(torch, dtype)


class Command:
    """The command on the run."""

    def __init__(self, run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
        self._run, self._capsys = run, capsys

    def __call__(self, *words: Any, code: int = 0) -> Any:
        """What it said, as ``capsys`` has it."""
        found = run_here("generate", [str(self._run.root), *map(str, words)])
        said = self._capsys.readouterr()
        assert found == code, said
        return said

    def lines(self, *words: Any) -> list[str]:
        return self(*words).out.splitlines()

    def rows(self, *words: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(*words, "--json")]


@pytest.fixture
def command(run: RunDir, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(run, capsys)


def test_a_seed_gives_the_same_completions_again(command: Command) -> None:
    keys = ["--temperature=1.5", "--top-p=0.99", "--top-k=80", "--max-new-tokens=8"]
    first = command.lines("Why?", *keys, "--seed=1", "--n=3")
    assert [line[:6] for line in first] == ["[1/3] ", "[2/3] ", "[3/3] "]
    assert len({line[6:] for line in first}) == 3
    assert command.lines(*keys, "--seed=1", "--n=3", "Why?") == first
    assert command.lines("Why?", *keys, "--seed=1", "--n=2")[0] == "[1/2] " + first[0][6:]
    assert command.lines("Why?", *keys, "--seed=1") == [first[0][6:]]
    assert command.lines("Why?", *keys, "--seed=2") != [first[0][6:]]
    assert len({command.lines("Why?", *keys)[0] for _ in range(3)}) > 1


def test_json_has_tokens_and_log_probabilities(run: RunDir, command: Command) -> None:
    tokenizer = tokenizer_of(experiment(run.root))
    rows = command.rows("Why?", "No?", "--n=2", "--max-new-tokens", "4")
    assert [row["prompt"] for row in rows] == ["Why?", "Why?", "No?", "No?"]
    for row in rows:
        assert len(row["tokens"]) == len(row["logps"]) == len(row["sampled_logps"]) <= 4
        assert row["logps"] == row["sampled_logps"], "temperature 1: the model itself"
        kept = row["tokens"][: -1 if row["ended"] == "stop" else None]
        assert row["completion"] == tokenizer.decode(kept, skip_special_tokens=True).strip()
        (alone,) = command.rows(row["prompt"], f"--seed={row['seed']}", "--max-new-tokens=4")
        for name in ("logps", "sampled_logps"):  # up to the arithmetic of another batch
            assert alone.pop(name) == pytest.approx(row.pop(name), abs=1e-5)
        assert alone == row
    (greedy,) = command.rows("No?", "--max-new-tokens=4")
    assert greedy["seed"] is None
    assert set(greedy["sampled_logps"]) == {0.0}


def test_a_prompt_may_look_like_an_option(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = "--max-new-tokens=2"
    assert command.lines("Why?", few) == command.lines(few, "--", "Why?")
    assert len(command.lines("Why?", few, "--", "--n=2", "--json")) == 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    words = ["lr=1", "what is x = 1?", "1+1=", "--n=2", "--json", "--", "n=3"]
    options = parse("generate", words)
    assert (str(options.target), options.prompt) == ("lr=1", ["what is x = 1?", "1+1="])
    assert (options.json, options.n, options.behind) == (True, 2, ["n=3"])


def test_an_option_of_sampling_alone_means_temperature_1() -> None:
    def sampling(*words: str) -> Sampling:
        options = parse("generate", ["x", *words])
        return sampling_of(options, n=options.n)

    assert sampling().greedy
    assert sampling("--n=1", "--top-p=1", "--top-k=0").greedy
    for word in ("--top-p=0.9", "--top-k=5", "--seed=1", "--n=2"):
        assert sampling(word).temperature == 1
    # A prompt is a question where conversations were learned, as in most tasks.
    learned = [learns_chats(TaskConfig(kind=kind)) for kind in ("sft", "pretrain", "own:Task")]
    assert learned == [True, False, True]


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
        (["--prompts", "q.txt"], "do not go together"),
        (["--out", "x"], "add --prompts FILE"),
    ],
)
def test_a_mistake_says_what_to_type(command: Command, words: list[str], says: str) -> None:
    assert says in command("Why?", *words, code=2).err


def test_a_prompt_without_tokens_is_said_and_the_next_completed(command: Command) -> None:
    said = command("", "Why?", "--plain", "--max-new-tokens=2", code=2)
    assert "llmx: the prompt has no tokens." in said.err
    assert len(said.out.splitlines()) == 1


def test_the_other_spelling_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["generate", "x", "top_p=0.9"], "top_p=0.9: write --top-p 0.9. To complete it as a pro"),
        (["export", "x", "to=gguf"], "to=gguf: write --to gguf."),
        (["doctor", "json=true"], "json=true: write --json."),
        (["data", "--preview", "3"], "--preview: write preview=N."),
        (["resume", "x", "--step=4"], "--step=4: write step=4."),
    ):
        assert main(words) == 2
        assert says in capsys.readouterr().err
    parse("chat", ["x", "--system", "seed=1"])


def test_a_terminal_sees_a_completion_grow(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "REDRAW_S", 0.0)
    pieces = ["one", " ", "two\x1b", "\ufffd", "!", " "]
    stream = Stream(lambda tokens: "".join(pieces[n] for n in tokens).strip(), frozenset({9}))
    shown = []
    for token in (0, 1, 2, 3):
        stream.on_token(0, token)
        shown.append(capsys.readouterr().out)
    assert shown == ["one", "", " two\\x1b", ""], "half a character waits for its other half"
    pieces[3] = "é"
    for token in (4, 5, 9):
        stream.on_token(0, token)
    assert capsys.readouterr().out == "é!"
    stream.end("one two\x1bé!")
    assert capsys.readouterr().out == "\n"
    stream.end("another")
    assert capsys.readouterr().out == "\nanother\n"


def test_an_empty_input_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run_here("generate", [str(tmp_path)]) == 2
    assert "standard input is empty" in capsys.readouterr().err


# --- Files of prompts ------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    lines = [{"prompt": text, "id": i} for i, text in enumerate(QUESTIONS)]
    return write_rows(tmp_path / "q.jsonl", lines)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``kills(n)``: Ctrl-C at the n-th batch of a few completions; 0 for never again."""
    monkeypatch.setattr(generate_file, "TOGETHER", 3)
    real, left = service.generate, [0]

    def generated(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(service, "generate", generated)
    return lambda batch: left.__setitem__(0, batch)


def test_lines_are_in_the_order_of_the_prompts_and_as_one_by_one(
    command: Command, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    words = ["--prompts", questions, "--out", out, "--max-new-tokens=6"]
    assert "7 completions; " in command(*words, "--json", "--batch-tokens=30").out
    found = rows(out)
    assert [(row["id"], row["prompt"]) for row in found] == list(enumerate(QUESTIONS))
    assert not (tmp_path / "a.jsonl.partial").exists()
    for one, other in zip(found, command.rows(*QUESTIONS, "--max-new-tokens=6"), strict=True):
        assert one["completion"] == other["completion"]
        assert one["tokens"] == other["tokens"]
        assert one["logps"] == pytest.approx(other["logps"], abs=1e-4)
    assert "exists already" in command(*words, code=2).err


@pytest.mark.parametrize("keys", [(), ("--temperature=1.2", "--top-p=0.95", "--seed=5", "--n=2")])
def test_a_killed_command_continues(
    command: Command, questions: Path, tmp_path: Path, kills: Any, keys: Any
) -> None:
    words = ["--prompts", questions, "--max-new-tokens=6", "--json", *keys]
    command(*words, "--out", tmp_path / "whole.jsonl")
    out, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    kills(3)
    assert "the same command continues from" in command(*words, "--out", out, code=130).err
    assert not out.exists()
    with partial.open("ab") as stream:  # kill -9 amid a line
        stream.write(b'{"prompt": "Wh')
    assert "found; continuing." in command(*words, "--out", out).err
    unsure = {"logps": [], "sampled_logps": []}
    for one, other in zip(rows(out), rows(tmp_path / "whole.jsonl"), strict=True):
        assert {**one, **unsure} == {**other, **unsure}
    assert not partial.exists()


def test_another_command_is_refused_with_what_differs(
    command: Command, questions: Path, tmp_path: Path, kills: Any
) -> None:
    words = ["--prompts", questions, "--out", tmp_path / "a.jsonl"]
    drawn = [*words, "--max-new-tokens=4", "--temperature=0.5"]
    kills(2)
    command(*drawn, code=130)
    for other, problem in (
        (["--max-new-tokens=4", "--temperature=0.6"], "temperature=0.5, and now temperature"),
        (["--max-new-tokens=5", "--temperature=0.5"], "max_new_tokens=4, and now max_new"),
        ([*drawn[-2:], "--seed=1"], "and now seed=1"),
        ([*drawn[-2:], "--plain"], "plain=False, and now plain=True"),
    ):
        assert problem in command(*words, *other, code=2).err
    whole = questions.read_text()
    questions.write_text('{"prompt": "Less?"}\n' + whole)
    assert "the prompts are other ones" in command(*drawn, code=2).err
    questions.write_text(whole)
    # The seed that was drawn stays; other batches may be asked for, as where memory was too small.
    command(*drawn, "--batch-tokens", 30)
    assert len({row["seed"] for row in rows(tmp_path / "a.jsonl")}) == len(QUESTIONS)
    partial, words[-1] = tmp_path / "b.jsonl.partial", tmp_path / "b.jsonl"
    for own in ("my own file\n", '{"mine": 1}\n'):
        partial.write_text(own)
        assert "was not written by generate" in command(*words, code=2).err
        assert partial.read_text() == own
    partial.write_text('{"model": "/m')  # killed at the very start
    command(*words, "--max-new-tokens=2")


def test_what_may_stand_in_a_file(command: Command, tmp_path: Path) -> None:
    chat = [turn("system", "Be brief."), turn("user", "Why?")]
    lines: list[dict[str, Any]] = [
        {"messages": chat},
        {"messages": [*chat, turn("assistant", "So.")], "id": "x"},
        {"prompt": "Why?", "completion": "Thus."},
        {"prompt": [chat[1]]},
        {"prompt": "word " * 300},
    ]
    path, out = tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    path.write_text("\ufeff" + "\n\n".join(json.dumps(line) for line in lines))
    said = command("--prompts", path, "--out", out, "--max-new-tokens=3").out
    assert "1 at the last position of the model" in said
    first, second, third, fourth, fifth = rows(out)
    assert first["completion"] == second["completion"]
    assert (second["expected"], second["id"]) == ("So.", "x")
    assert third["expected"] == "Thus."
    assert third["completion"] == fourth["completion"]
    assert (fifth["completion"], fifth["ended"]) == ("", "positions")
    text = tmp_path / "q.txt"
    text.write_text("Why?\n\n  No? \n")
    assert [prompt.text for prompt in read_prompts(text)] == ["Why?", "No?"]
    assert "--out completions.jsonl" in command("--prompts", text, code=2).err
    assert "cannot be read (No such file" in command("--prompts=none", "--out=x", code=3).err
    assert not Path("x.partial").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "there is no prompt in it"),
        (b"[1]\n", "is JSON, but not an object"),
        (b'{"text": "x"}\n', "has no prompt. A line is"),
        (b'{"prompt": ""}\n{"a": 1}\n', "line 1: has no prompt"),
        (b'{"prompt": "a"}\n{"prompt\n', "line 2: is not a JSON object"),
        (b'{"prompt": "a\\ud800"}\n', "line 1: is not a JSON object"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}\n', "line 1"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_file_without_prompts_is_said(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "q.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_prompts(tmp_path / "q.jsonl")


def test_batches_keep_to_their_tokens() -> None:
    jobs = [Job(i, 0, (0,) * (5 + i * 7 % 40)) for i in range(50)]
    batches = batches_of(jobs, budget=200, new_tokens=10, equal=False)
    assert sorted(job.prompt for batch in batches for job in batch) == list(range(50))
    assert all(len(b) * (len(b[0].tokens) + 10) <= 200 or len(b) == 1 for b in batches)
    same = batches_of(jobs, budget=200, new_tokens=10, equal=True)
    assert all(len({len(job.tokens) for job in batch}) == 1 for batch in same)


def test_padding_is_tried() -> None:
    """Where it is found that nothing sees it, a batch of several lengths gives what each does;
    a state along the sequence sees it."""
    layers = ["linear_attention", "full_attention"]
    with_state = converted_model("qwen3_5_text", layer_types=layers).eval()
    for model in (*map(small_model, KINDS), with_state):
        tried = decoder_of(model, try_padding=True)
        assert takes_left_padding(tried.config, tried.attention) == (model is not with_state)


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
