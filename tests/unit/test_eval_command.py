"""``python -m llmx eval``: the loss of training on any data, and metrics of completions."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from llmx.cli import evaluate
from llmx.cli.main import run_here
from llmx.errors import ConfigError
from llmx.run import snapshot
from llmx.run.metrics.completions import METRICS, score, words
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, tokenizer_of
from tests.chat_templates import PUBLISHED
from tests.data_rows import sequences, turn, write_rows
from tests.rundirs import experiment, write_run


def tiny(tokenizer: Any, auto_class: Any = AutoModelForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    config.update(more)
    return auto_class.from_config(config)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An SFT run on chats that wrote its model."""
    directory = tmp_path_factory.mktemp("run")
    path = str(write_chats(directory / "train.jsonl", 6))
    data = {"path": path, "eval_samples": 2, "packing": "best_fit"}
    exp = experiment(directory / "run", ranks=1, data=data)
    run_dir = write_run(exp)
    tokenizer = tokenizer_of(exp)
    tiny(tokenizer).save_pretrained(run_dir.final_model)
    tokenizer.save_pretrained(run_dir.final_model)
    return run_dir


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [turn("user", question), turn("assistant", answer)]}


def write_chats(path: Path, count: int) -> Path:
    rows = [
        chat(f"What is {i} plus 1?", f"It is {i + 1}, of course." * (1 + i % 3))
        for i in range(count)
    ]
    return write_rows(path, rows)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., str]:
    """The command, in the directory of the test; what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    get_accelerator()  # warns of the CPU when it is first called in a process

    def measure(*argv: Any, code: int = 0) -> str:
        assert run_here("eval", [str(word) for word in argv]) == code
        found = capsys.readouterr()
        return str(found.err if code else found.out)

    return measure


def metrics_in(path: Path) -> dict[str, float]:
    return dict(read_json(path)["metrics"])


def plain_loss(model: Path, store: Any) -> float:
    """Of every sequence alone, by the model's own logits."""
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    losses = []
    for row in sequences(store):
        ids, targets = torch.tensor(row.tokens.tolist()), torch.tensor(row.targets[1:].tolist())
        with torch.no_grad():
            logits = network(input_ids=ids[None]).logits[0, :-1].double()
        losses.append(cross_entropy(logits[targets], ids[1:][targets], reduction="none"))
    return float(torch.cat(losses).mean())


def test_a_run_on_its_own_held_out_data(run: RunDir, measured: Any) -> None:
    out = measured(run.root)
    found = read_json(run.root / "eval-train.json")
    exp = snapshot.load(run)
    store = prepare(exp, tokenizer_of(exp), split="eval")
    wanted = plain_loss(run.final_model, store)
    assert found["metrics"]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["metrics"]["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-4)
    assert found["samples"] == len(store)
    assert "perplexity" in out


def test_other_data_completions_and_a_metric_of_ones_own(
    run: RunDir, measured: Any, tmp_path: Path
) -> None:
    write_chats(tmp_path / "test.jsonl", 5)
    (tmp_path / "own_metric_of_a_test.py").write_text(
        "def length(completions, references):\n"
        "    return {'mean_length': sum(map(len, references)) / len(references)}\n"
    )
    out = measured(
        run.root, "data.path=test.jsonl", "--generate", 3, "--max-new-tokens", 4,
        "--metrics", "rougeL,own_metric_of_a_test:length", "--out", "found.json",
    )  # fmt: skip
    found = read_json(tmp_path / "found.json")
    assert found["data"] == "test.jsonl"
    assert set(found["metrics"]) >= {"loss", "perplexity", "rougeL", "mean_length"}
    assert len(found["completions"]) == 3
    assert found["completions"][0]["expected"].startswith("It is 1")
    assert found["metrics"]["mean_length"] > 10
    assert "ROUGE-L" in out
    assert "mean length" in out


def test_the_data_that_is_typed_is_measured_whatever_the_run_had(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the evaluation file, the sources or the limit of rows of the run."""
    monkeypatch.chdir(tmp_path)
    of_run = {
        "own": {"path": "train.jsonl", "eval_path": "dev.jsonl", "max_rows": 3},
        "mixture": {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "eval_samples": 7},
    }
    for name, data in of_run.items():
        shutil.copytree(run.root, tmp_path / name)
        write_run(experiment(tmp_path / name, ranks=1, data=data))

    def data_of(*words: str) -> tuple[str | None, str, int | None, int]:
        options = argparse.Namespace(
            target=Path(words[0]), overrides=words[1:], model=None, out=None,
            generate=None, max_new_tokens=None, trust=False,
        )  # fmt: skip
        _, exp, _ = evaluate.measured_of(options)
        data = exp.data
        return data.eval_path, data.path, data.max_rows, len(data.sources)

    for name in of_run:
        typed = data_of(name, "data.path=test.jsonl")
        assert typed == ("test.jsonl", "test.jsonl", None, 0)
        assert data_of(name, "data.eval_path=test.jsonl")[0] == "test.jsonl"
        assert data_of(name, "data.path=demo")[:2] == (None, "demo")
    limited = data_of("own", "data.path=test.jsonl", "data.max_rows=5")
    assert limited == ("test.jsonl", "test.jsonl", 5, 0)
    assert data_of("own")[0] == "dev.jsonl"
    with pytest.raises(ConfigError, match="eval measures one source"):
        data_of("own", "data.sources=[{path: a.jsonl}]")


def test_a_model_directory_needs_data_and_may_take_a_task(
    run: RunDir, measured: Any, tmp_path: Path
) -> None:
    write_chats(tmp_path / "chats.jsonl", 4)
    (tmp_path / "text.txt").write_text("one two three\n\nfour five six\n" * 20)
    model = run.final_model
    words = ["data=messages", "data.path=chats.jsonl", "data.seq_len=64"]
    measured(model, *words, "--batch", 2)
    two = metrics_in(tmp_path / "eval-chats.json")["loss"]
    measured(model, *words, "--batch", 1)
    assert metrics_in(tmp_path / "eval-chats.json")["loss"] == pytest.approx(two)
    text = ["task=pretrain", "data=text", "data.path=text.txt", "data.seq_len=32"]
    measured(model, *text)
    assert read_json(tmp_path / "eval-text.json")["task"] == "pretrain"
    for argv, problem in (
        ([model], "is a model directory, so name the data. Add, for example, data=messages"),
        ([tmp_path], "is neither a run directory"),
        ([model, "zero=stage3"], "eval takes data and task"),
        ([model, *words[:2], "data.seq_len=4096"], "takes at most 128 positions"),
        ([model, *words, "--metrics", "rougeL"], "Add --generate 100"),
        ([model, *words, "--generate", "1", "--metrics", "rouge"], "neither one of exact_match"),
        ([model, *words, "--generate", "1", "--metrics", "no_such:f"], "cannot be imported"),
        ([model, *text, "--generate", "1"], "has no prompts"),
        ([run.root, "--model", tmp_path], "no config.json in it"),
    ):
        assert problem in measured(*argv, code=2)


def test_a_task_that_generates_is_measured_by_completions(
    run: RunDir, measured: Any, tmp_path: Path
) -> None:
    """One sample is one prompt there, without a word on packing."""
    words = ["task=grpo", "task.options.rewards=[length]", "data=messages", "data.seq_len=128"]
    words += [f"data.path={run.root.parent / 'train.jsonl'}"]
    text = measured(run.final_model, *words, "task.eval_generate=0", code=2)
    assert "task=grpo is measured by completions. Add --generate 100." in text
    out = ["--generate", 2, "--max-new-tokens", 2, "--out", tmp_path / "out.json"]
    assert "exact match" in measured(run.final_model, *words, *out)
    metrics = metrics_in(tmp_path / "out.json")
    assert 0 < metrics["reward"] == metrics["reward/length"] <= 1


def test_answers_that_are_learned_by_heart_match_exactly(measured: Any, tmp_path: Path) -> None:
    """With Qwen3's template, whose empty thought before an answer is learned, too."""
    path = write_rows(tmp_path / "train.jsonl", [chat("a", "one"), chat("b", "two")])
    tokenizer = PUBLISHED["qwen3"].tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    exp = experiment(
        tmp_path / "run",
        data={"path": str(path), "seq_len": 256},
        model={"tokenizer": str(tmp_path / "model")},
    )
    store = prepare(exp, tokenizer_of(exp))
    network = tiny(tokenizer, max_position_embeddings=256, hidden_size=64, num_hidden_layers=2)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(60):
        for row in sequences(store):
            ids, targets = torch.tensor(row.tokens.tolist()), torch.tensor(row.targets.tolist())
            labels = ids.where(targets, -100)
            network(input_ids=ids[None], labels=labels[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(tmp_path / "model")
    words = [tmp_path / "model", "data=messages", "data.path=train.jsonl", "data.seq_len=256",
             "--generate", 2]  # fmt: skip
    assert "WARNING" not in measured(*words)
    found = read_json(tmp_path / "eval-train.json")
    assert found["metrics"]["exact_match"] == 1
    assert found["completions"][0]["completion"] == "<think>\n\n</think>\n\none"
    short = measured(*words, "--max-new-tokens", 3)
    assert "2 of 2 expected completions have more than 3 tokens" in short


def test_a_classifier_is_measured_with_the_labels_that_it_was_trained_with(
    measured: Any, tmp_path: Path
) -> None:
    for name, labels in (("train", "abcabc"), ("test", "acca")):
        rows = [{"text": f"row {i}", "label": label} for i, label in enumerate(labels)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    data = {"path": f"{tmp_path}/train.jsonl", "form": "labelled", "data_map": {"prompt": "text"}}
    exp = experiment(tmp_path / "run", ranks=1, task={"kind": "classify"}, data=data)
    run_dir, tokenizer = write_run(exp), tokenizer_of(exp)
    network = tiny(tokenizer, AutoModelForSequenceClassification, num_labels=3, pad_token_id=0)
    network.save_pretrained(run_dir.final_model)
    tokenizer.save_pretrained(run_dir.final_model)
    words = [f"data.path={tmp_path / 'test.jsonl'}"]
    measured(run_dir.root, *words)
    found = metrics_in(run_dir.root / "eval-test.json")
    assert {"loss", "accuracy", "macro_f1"} <= set(found)
    assert found["accuracy"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert "perplexity" not in found
    said = measured(
        run_dir.final_model, *words, "task=classify", "data=labelled",
        "data.seq_len=64", "data.data_map.prompt=text", code=2,
    )  # fmt: skip
    assert "has 3 outputs, and the data 2" in said


def test_rouge_by_hand() -> None:
    assert words("The cat's_9 Lives!") == ["the", "cat", "s", "9", "lives"]
    assert words("我爱 GPT4 好") == ["我", "爱", "gpt4", "好"]
    said, wanted = "the cat sat on the mat", "the cat was on a mat"
    # Shared: the, cat, on, mat of 6 and 6; (the, cat) of 5 and 5; the cat on mat.
    assert METRICS["rouge1"](said, wanted) == pytest.approx(8 / 12)
    assert METRICS["rouge2"](said, wanted) == pytest.approx(2 / 10)
    assert METRICS["rougeL"](said, wanted) == pytest.approx(8 / 12)
    assert METRICS["rougeL"]("mat the", "the cat mat") == pytest.approx(2 / 5)
    assert METRICS["rougeL"]("", "a") == METRICS["rouge2"]("a", "a") == 0.0
    assert score(["exact_match"], [" a", "b"], ["a", "c"]) == {"exact_match": 0.5}


def test_where_the_result_goes_is_checked_before_the_work(
    run: RunDir, measured: Any, tmp_path: Path
) -> None:
    said = measured(run.root, "--out", tmp_path, code=2)
    assert f"{tmp_path}: is a directory. Set --out FILE.json." in said
    (tmp_path / "file").touch()
    said = measured(run.root, "--out", tmp_path / "file" / "a.json", code=2)
    assert "is a file. Set --out" in said


@pytest.mark.parametrize(
    ("code", "name", "problem"),
    [
        ("1 / 0", "f", r"ZeroDivisionError.*metrics_\w*.py, line 1\)"),
        ("def f(:", "f", r"SyntaxError.*metrics_\w*.py, line 1\)"),
        ("text = 'x'", "text", "is a str, not a function"),
        ("def f(a, b): return 'high'", "f", "gave 'high' for f; it gives a number"),
        (
            "class Mine:\n    @staticmethod\n    def f(a, b):\n        return a[5]",
            "Mine.f",
            r"Mine.f failed on 1 completions: IndexError.*line 4\)",
        ),
    ],
)
def test_a_metric_that_is_none_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    module = f"metrics_{tmp_path.name}"  # imported once in a process
    (tmp_path / f"{module}.py").write_text(code + "\n")
    with pytest.raises(ConfigError, match=problem):
        score([f"{module}:{name}"], ["a"], ["a"])


def test_an_adapter_is_measured_on_its_base(run: RunDir, measured: Any, tmp_path: Path) -> None:
    """One whose second matrices are zero computes what its base does."""
    import peft

    write_chats(tmp_path / "chats.jsonl", 4)
    base = AutoModelForCausalLM.from_pretrained(run.final_model)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    words = ["data=messages", "data.path=chats.jsonl", "data.seq_len=64"]
    found = []
    for model in (run.final_model, tmp_path / "adapter"):
        measured(model, *words)
        found.append(metrics_in(tmp_path / "eval-chats.json")["loss"])
    assert found[0] == pytest.approx(found[1])


def other_model(run: RunDir, directory: Path) -> Path:
    """Of other weights, with the tokenizer of the run."""
    network = AutoModelForCausalLM.from_pretrained(run.final_model)
    with torch.no_grad():
        network.get_output_embeddings().weight.mul_(30)
    network.save_pretrained(directory)
    tokenizer_of(snapshot.load(run)).save_pretrained(directory)
    return directory


def test_a_task_with_a_teacher_is_measured_with_it(
    run: RunDir, measured: Any, tmp_path: Path
) -> None:
    teacher = other_model(run, tmp_path / "teacher")
    words = ["task=distill", f"task.options.teacher={teacher}"]

    def found(*more: str) -> dict[str, float]:
        measured(run.root, *words, *more, "--out", tmp_path / "found.json")
        return metrics_in(tmp_path / "found.json")

    live = found("task.options.teacher_logits=live")
    stored = found("task.options.top_k=60000")
    assert stored == pytest.approx(live, rel=1e-5)
    assert live["divergence"] > 0.01
    assert found("task.options.top_k=4")["divergence"] < live["divergence"]
    measured(run.root, "--out", tmp_path / "found.json")
    assert live["loss"] == pytest.approx(metrics_in(tmp_path / "found.json")["loss"], rel=1e-5)


def test_preferences_are_measured_against_what_the_run_began_with(
    run: RunDir, measured: Any, tmp_path: Path
) -> None:
    pair = {"prompt": "What is 1 plus 1?", "chosen": "It is 2.", "rejected": "I do not know."}
    data = {"path": str(write_rows(tmp_path / "pairs.jsonl", [pair] * 3)), "eval_samples": 2}

    def trained(name: str, **model: Any) -> RunDir:
        model = {"tokenizer": str(run.final_model), **model}
        task = {"kind": "dpo", "steps": 2}
        run_dir = write_run(experiment(tmp_path / name, ranks=1, data=data, model=model, task=task))
        other_model(run, run_dir.final_model)
        return run_dir

    began = {"kind": "hf", "init": "pretrained", "path": str(run.final_model), "config": {}}
    out = measured(trained("tuned", **began).root)
    found = metrics_in(tmp_path / "tuned" / "eval-pairs.json")
    assert found["loss"] != pytest.approx(math.log(2), abs=1e-3), "it is not the reference"
    assert found["margin"] == pytest.approx(found["rewards_chosen"] - found["rewards_rejected"])
    assert "margin" in out
    refused = measured(trained("scratch").root, code=2)
    assert "'reference'" in refused
    assert "it is random weights, and kept nowhere" in refused
