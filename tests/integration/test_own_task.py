"""The task of docs/custom-tasks.md, used as it says: pairs, a reference, metrics, resume."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command_runs import SMALL, lines, succeeds

pytestmark = pytest.mark.deepspeed

PAGE = Path(__file__).parents[2] / "docs" / "custom-tasks.md"
TOPICS = ("rain", "snow", "tea", "bread", "a river", "the sea", "a lamp", "a horse")


def example(part: str) -> str:
    """The one Python example of the page that has this in it."""
    every = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    (found,) = [code for code in every if part in code]
    return found


def write_pairs(path: Path) -> None:
    pairs = [
        {"prompt": f"{topic} {number}?", "chosen": f"I like {topic}.",
         "rejected": f"No word of {topic}, never."}
        for topic in TOPICS
        for number in range(8)
    ]  # fmt: skip
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def assert_exported(directory: Path, run: Path) -> None:
    """The checkpoint gives the same model as the end of the run did, under the names of the Hub."""
    succeeds(directory, "export", str(run))
    exported = load_file(next(run.glob("export/*/model.safetensors")))
    final = load_file(run / "model" / "model.safetensors")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)
    assert not any("score" in name for name in final), "the main model is the policy"


def test_the_example_of_the_docs_trains_resumes_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first run also teaches later plans what this machine reaches.
    monkeypatch.setenv("LLMX_LEARNED", "on")
    monkeypatch.setenv("LLMX_TRACES", "on")
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    code = example("class Dpo")
    assert len(code.splitlines()) < 80
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "my_tasks.py").write_text(code, encoding="utf-8")
    write_pairs(tmp_path / "pairs.jsonl")
    run = tmp_path / "run"
    first = succeeds(
        tasks,
        "task.kind=my_tasks:Dpo", "task.options.beta=0.5", "data=file", "data.path=../pairs.jsonl",
        "data.eval_samples=8", "data.seq_len=256", "hardware=cpu2", "zero=stage2", "optim.lr=0.003",
        "batch.global_batch=8", "task.steps=12", "task.stop_at_step=6", "task.log_every_steps=1",
        "checkpoint.metric=eval/accuracy", f"run_dir={run}",
    )  # fmt: skip
    assert "accuracy" in first
    (start,) = lines(run, "start")
    assert start["metrics"]["accuracy"]["higher_is_better"] is True
    before = lines(run, "train")
    assert before[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "policy and reference are equal"
    assert before[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert [line["step"] for line in before] == list(range(1, 7))
    learned = json.loads((tmp_path / "cache" / "learned.json").read_text())
    (shown,) = learned["observations"]
    assert (shown["device"], shown["task"], shown["stage"]) == ("cpu", "my_tasks:Dpo", 2)
    assert 0 < shown["tflops"] < 100
    # From another directory: the code is found where it was.
    succeeds(tmp_path, "resume", str(run), "task.stop_at_step=null")
    after = lines(run, "train")
    assert [line["step"] for line in after] == list(range(1, 13))
    assert after[-1]["loss"] < 0.5 < before[0]["loss"]
    assert lines(run, "eval")[-1]["accuracy"] == 1.0
    learned = json.loads((tmp_path / "cache" / "learned.json").read_text())
    assert len(learned["observations"]) == 2, "what was resumed teaches, too"
    assert (run / "model" / "model.safetensors").is_file()
    provenance = json.loads((run / "provenance.json").read_text())
    assert list(provenance["task_code"]) == ["my_tasks.py"]
    (newest,) = (run / "checkpoints").glob("step-*12/state.json")
    state = json.loads(newest.read_text())
    assert all(name.startswith("policy.") for name in state["parameters"])
    assert_exported(tmp_path, run)


def test_the_rollout_of_the_docs_trains_on_what_it_draws(tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(example("class Grpo"), encoding="utf-8")
    write_pairs(tmp_path / "pairs.jsonl")
    run = tmp_path / "run"
    succeeds(
        tmp_path, *SMALL, "task.kind=my_tasks:Grpo", "task.options.max_new_tokens=6", "data=file",
        "data.path=pairs.jsonl", "data.max_rows=null", "data.eval_samples=8",
        "data.seq_len=64", "data.packing=none",
        f"data.cache_dir={tmp_path / 'cache'}", "hardware=cpu2", "precision=fp32", "zero=stage2",
        "batch.global_batch=4", "optim.lr=0.01", "task.steps=4", "task.log_every_steps=1",
        f"run_dir={run}",
    )  # fmt: skip
    found = lines(run, "train")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    # Policy and reference are equal before the first update, and advantages add up to nothing.
    assert found[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert found[0]["loss"] == pytest.approx(0.0, abs=0.5)
    assert found[-1]["kl"] > 0.0
    assert all(0 <= line["reward"] <= 1 for line in found)
    # A group whose rewards are all the same teaches nothing.
    assert any(line["grad_norm"] > 0 for line in found)
    assert lines(run, "eval") == [], "it measures nothing on held-out data"
