"""``python -m llmx eval``: the loss of training on any data, and metrics of completions."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from llmx.cli import evaluate
from llmx.cli.main import run_here
from llmx.errors import ConfigError
from llmx.run import snapshot
from llmx.run.metrics.completions import METRICS, load_metric, score, words
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import prepare, tokenizer_of
from tests.chat_templates import PUBLISHED
from tests.rundirs import experiment, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An SFT run on chats that wrote its model."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "train.jsonl").write_text(chats(6))
    exp = experiment(
        directory / "run",
        ranks=1,
        data={"path": str(directory / "train.jsonl"), "eval_samples": 2, "packing": "best_fit"},
    )
    run_dir = write_run(exp)
    tokenizer = tokenizer_of(exp)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(run_dir.final_model)
    tokenizer.save_pretrained(run_dir.final_model)
    return run_dir


def chats(count: int) -> str:
    rows = [
        {"messages": [{"role": "user", "content": f"What is {i} plus 1?"},
                      {"role": "assistant", "content": f"It is {i + 1}, of course." * (1 + i % 3)}]}
        for i in range(count)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


def measured(capsys: Any, *argv: Any, code: int = 0) -> str:
    assert run_here("eval", [str(word) for word in argv]) == code
    found = capsys.readouterr()
    return str(found.err if code else found.out)


def plain_loss(model: Path, store: Any) -> float:
    """Of every sequence alone, by the model's own logits."""
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    total, count = 0.0, 0
    for index in range(len(store)):
        for tokens, targets in store[index].sequences():
            ids = torch.tensor([tokens.tolist()])
            with torch.no_grad():
                logs = network(input_ids=ids).logits[0, :-1].log_softmax(-1)
            picked = logs.gather(1, ids[0, 1:, None]).squeeze(1)
            wanted = torch.tensor(targets[1:].tolist())
            total -= float(picked[wanted].double().sum())
            count += int(wanted.sum())
    return total / count


def test_a_run_on_its_own_held_out_data(run: RunDir, capsys: Any) -> None:
    out = measured(capsys, run.root)
    found = read_json(run.root / "eval-train.json")
    exp = snapshot.load(run)
    store = prepare(exp, tokenizer_of(exp), split="eval")
    wanted = plain_loss(run.final_model, store)
    assert found["metrics"]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["metrics"]["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-4)
    assert found["samples"] == len(store)
    assert "perplexity" in out


def test_other_data_completions_and_a_metric_of_ones_own(
    run: RunDir, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.jsonl").write_text(chats(5))
    (tmp_path / "own_metric_of_a_test.py").write_text(
        "def length(completions, references):\n"
        "    return {'mean_length': sum(map(len, references)) / len(references)}\n"
    )
    out = measured(
        capsys, run.root, "data.path=test.jsonl", "--generate", 3, "--max-new-tokens", 4,
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
        data = evaluate.measured_of(options).exp.data
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
    run: RunDir, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "chats.jsonl").write_text(chats(4))
    (tmp_path / "text.txt").write_text("one two three\n\nfour five six\n" * 20)
    model = run.final_model
    words = ["data=messages", "data.path=chats.jsonl", "data.seq_len=64"]
    measured(capsys, model, *words, "--batch", 2)
    two = read_json(tmp_path / "eval-chats.json")["metrics"]["loss"]
    measured(capsys, model, *words, "--batch", 1)
    assert read_json(tmp_path / "eval-chats.json")["metrics"]["loss"] == pytest.approx(two)
    text = ["task=pretrain", "data=text", "data.path=text.txt", "data.seq_len=32"]
    measured(capsys, model, *text)
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
        assert problem in measured(capsys, *argv, code=2)


def test_a_task_that_generates_is_measured_by_completions(
    run: RunDir, tmp_path: Path, capsys: Any
) -> None:
    """One sample is one prompt there, without a word on packing."""
    words = ["task=grpo", "task.options.rewards=[length]", "data=messages", "data.seq_len=128"]
    words += [f"data.path={run.root.parent / 'train.jsonl'}"]
    text = measured(capsys, run.final_model, *words, "task.eval_generate=0", code=2)
    assert "task=grpo is measured by completions. Add --generate 100." in text
    out = ["--generate", 2, "--max-new-tokens", 2, "--out", tmp_path / "out.json"]
    assert "exact match" in measured(capsys, run.final_model, *words, *out)
    metrics = read_json(tmp_path / "out.json")["metrics"]
    assert 0 < metrics["reward"] == metrics["reward/length"] <= 1


def test_answers_that_are_learned_by_heart_match_exactly(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Qwen3's template, whose empty thought before an answer is learned, too."""
    monkeypatch.chdir(tmp_path)
    questions = [
        {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": answer}]}
        for name, answer in (("a", "one"), ("b", "two"))
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    tokenizer = PUBLISHED["qwen3"].tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    exp = experiment(
        tmp_path / "run",
        data={"path": str(tmp_path / "train.jsonl"), "seq_len": 256},
        model={"tokenizer": str(tmp_path / "model")},
    )
    store = prepare(exp, tokenizer_of(exp))
    rows = [pair for index in range(len(store)) for pair in store[index].sequences()]
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
        )
    )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(60):
        for tokens, targets in rows:
            labels = np.where(targets, tokens.astype(np.int64), -100)
            inputs = {"input_ids": tokens.astype(np.int64), "labels": labels}
            network(**{k: torch.from_numpy(v)[None] for k, v in inputs.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(tmp_path / "model")
    words = [tmp_path / "model", "data=messages", "data.path=train.jsonl", "data.seq_len=256",
             "--generate", 2]  # fmt: skip
    assert "WARNING" not in measured(capsys, *words)
    found = read_json(tmp_path / "eval-train.json")
    assert found["metrics"]["exact_match"] == 1
    assert found["completions"][0]["completion"] == "<think>\n\n</think>\n\none"
    short = measured(capsys, *words, "--max-new-tokens", 3)
    assert "2 of 2 expected completions have more than 3 tokens" in short


def test_a_classifier_is_measured_with_the_labels_that_it_was_trained_with(
    tmp_path: Path, capsys: Any
) -> None:
    def rows(labels: str) -> str:
        return "".join(json.dumps({"text": f"row {i}", "label": x}) + "\n"
                       for i, x in enumerate(labels))  # fmt: skip

    (tmp_path / "train.jsonl").write_text(rows("abcabc"))
    (tmp_path / "test.jsonl").write_text(rows("acca"))
    exp = experiment(
        tmp_path / "run",
        ranks=1,
        task={"kind": "classify"},
        data={"path": str(tmp_path / "train.jsonl"), "form": "labelled",
              "data_map": {"prompt": "text"}},
    )  # fmt: skip
    run_dir, tokenizer = write_run(exp), tokenizer_of(exp)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, num_labels=3,
        pad_token_id=0,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(run_dir.final_model)
    tokenizer.save_pretrained(run_dir.final_model)
    words = [f"data.path={tmp_path / 'test.jsonl'}"]
    measured(capsys, run_dir.root, *words)
    found = read_json(run_dir.root / "eval-test.json")["metrics"]
    assert {"loss", "accuracy", "macro_f1"} <= set(found)
    assert found["accuracy"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert "perplexity" not in found
    said = measured(
        capsys, run_dir.final_model, *words, "task=classify", "data=labelled",
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
    run: RunDir, tmp_path: Path, capsys: Any
) -> None:
    assert run_here("eval", [str(run.root), "--out", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a directory. Set --out FILE.json." in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run_here("eval", [str(run.root), "--out", str(tmp_path / "file" / "a.json")]) == 2
    assert "is a file. Set --out" in capsys.readouterr().err


def test_a_metric_that_is_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_metrics_of_a_test.py").write_text("text = 'x'\ndef f(a, b): return 'high'\n")
    (tmp_path / "broken_metrics_of_a_test.py").write_text("1 / 0\n")
    (tmp_path / "unread_metrics_of_a_test.py").write_text("def f(:\n")
    (tmp_path / "failing_metrics_of_a_test.py").write_text(
        "class Mine:\n    @staticmethod\n    def f(a, b):\n        return a[5]\n"
    )
    with pytest.raises(ConfigError, match=r"ZeroDivisionError.*broken_metrics\w*.py, line 1\)"):
        load_metric("broken_metrics_of_a_test:f")
    with pytest.raises(ConfigError, match=r"SyntaxError.*unread_metrics\w*.py, line 1\)"):
        load_metric("unread_metrics_of_a_test:f")
    with pytest.raises(ConfigError, match=r"Mine.f failed on 1 completions: IndexError.*line 4\)"):
        score(["failing_metrics_of_a_test:Mine.f"], ["a"], ["a"])
    with pytest.raises(ConfigError, match="is a str, not a function"):
        load_metric("bad_metrics_of_a_test:text")
    with pytest.raises(ConfigError, match="gave 'high' for f; it gives a number"):
        score(["bad_metrics_of_a_test:f"], ["a"], ["a"])


def test_an_adapter_is_measured_on_its_base(
    run: RunDir, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose second matrices are zero computes what its base does."""
    import peft

    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(chats(4))
    base = AutoModelForCausalLM.from_pretrained(run.final_model)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    words = ["data=messages", "data.path=chats.jsonl", "data.seq_len=64"]
    found = []
    for model in (run.final_model, tmp_path / "adapter"):
        measured(capsys, model, *words)
        found.append(read_json(tmp_path / "eval-chats.json")["metrics"]["loss"])
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
    run: RunDir, capsys: Any, tmp_path: Path
) -> None:
    teacher = other_model(run, tmp_path / "teacher")
    words = ["task=distill", f"task.options.teacher={teacher}"]

    def found(*more: str) -> dict[str, float]:
        measured(capsys, run.root, *words, *more, "--out", tmp_path / "found.json")
        return dict(read_json(tmp_path / "found.json")["metrics"])

    live = found("task.options.teacher_logits=live")
    stored = found("task.options.top_k=60000")
    assert stored == pytest.approx(live, rel=1e-5)
    assert live["divergence"] > 0.01
    assert found("task.options.top_k=4")["divergence"] < live["divergence"]
    measured(capsys, run.root, "--out", tmp_path / "found.json")
    plain = read_json(tmp_path / "found.json")["metrics"]["loss"]
    assert live["loss"] == pytest.approx(plain, rel=1e-5)


def test_preferences_are_measured_against_what_the_run_began_with(
    run: RunDir, capsys: Any, tmp_path: Path
) -> None:
    pairs = {"prompt": "What is 1 plus 1?", "chosen": "It is 2.", "rejected": "I do not know."}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pairs) + "\n") * 3)

    def trained(name: str, **model: Any) -> RunDir:
        exp = experiment(
            tmp_path / name,
            ranks=1,
            data={"path": str(tmp_path / "pairs.jsonl"), "eval_samples": 2},
            model={"tokenizer": str(run.final_model), **model},
            task={"kind": "dpo", "steps": 2},
        )
        run_dir = write_run(exp)
        other_model(run, run_dir.final_model)
        return run_dir

    began = {"kind": "hf", "init": "pretrained", "path": str(run.final_model), "config": {}}
    out = measured(capsys, trained("tuned", **began).root)
    found = read_json(tmp_path / "tuned" / "eval-pairs.json")["metrics"]
    assert found["loss"] != pytest.approx(math.log(2), abs=1e-3), "it is not the reference"
    assert found["margin"] == pytest.approx(found["rewards_chosen"] - found["rewards_rejected"])
    assert "margin" in out
    refused = measured(capsys, trained("scratch").root, code=2)
    assert "'reference'" in refused
    assert "it is random weights, and kept nowhere" in refused
