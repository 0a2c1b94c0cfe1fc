"""The task of docs/custom-tasks.md, used as it says: pairs, a reference, metrics, resume."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmx.run.rundir import RunDir, read_json
from tests.command_runs import SMALL, forked, lines, succeeds
from tests.resumed_runs import events, measurements

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


EVERYTHING = Path(__file__).parents[1] / "programs" / "own_task.py"


@pytest.mark.nightly
def test_a_task_that_uses_all_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Pairs stored and generated, a frozen reference, a second trained network with a head, float
    weights, metrics: stopped, 2 -> 3 ranks, export, all by the commands of a user."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    shutil.copy(EVERYTHING, tasks / "my_everything.py")
    write_pairs(tmp_path / "pairs.jsonl")
    words = [
        *SMALL, "task.kind=my_everything:Everything", f"task.code_path={tasks}", "data=file",
        f"data.path={tmp_path / 'pairs.jsonl'}", "data.max_rows=null", "data.eval_samples=8",
        "data.seq_len=128",
        f"data.cache_dir={tmp_path / 'cache'}", "hardware=cpu2", "precision=fp32", "zero=stage3",
        "batch.global_batch=6", "optim.lr=0.01", "task.steps=8", "task.log_every_steps=1",
        "task.eval_every_steps=4", "checkpoint.every_steps=2", "checkpoint.metric=eval/accuracy",
        "task.save_model=true", "launch.restart_backoff_s=0",
    ]  # fmt: skip
    undisturbed, run = RunDir(tmp_path / "undisturbed"), RunDir(tmp_path / "run")
    succeeds(tmp_path, *words, f"run_dir={undisturbed.root}")

    succeeds(tmp_path, *words, "task.stop_at_step=4", f"run_dir={run.root}")
    wanted = [line for line in measurements(undisturbed) if line.get("step", 0) <= 4]
    found = [line for line in measurements(run) if line["kind"] != "end"]
    assert found == wanted, "bit for bit"
    (ended,) = [line for line in measurements(run) if line["kind"] == "end"]
    state = read_json(run.checkpoint(4) / "state.json")
    assert state["weights_hash"] == ended["weights_hash"]
    assert {name.split(".")[0] for name in state["parameters"]} == {"policy", "scorer"}
    assert list(state["frozen"]) == ["reference"]

    hosts = "hardware.hosts=[{name: localhost, slots: 3, device: cpu}]"
    succeeds(tmp_path, "resume", str(run.root), hosts, "task.stop_at_step=null", forked())
    assert [event["world_size"] for event in events(run, "resumed")] == [3]
    numbers, expected = (
        [
            [line[name] for name in ("loss", "grad_norm", "accuracy", "margin", "drift")]
            for line in measurements(one)
            if line["kind"] == "train"
        ]
        for one in (run, undisturbed)
    )
    assert len(numbers) == 8
    for mine, theirs in zip(numbers, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    drift, wanted_drift = (measurements(one)[-2]["drift"] for one in (run, undisturbed))
    assert drift == pytest.approx(wanted_drift, rel=1e-3)
    provenance = read_json(run.provenance)
    assert list(provenance["task_code"]) == ["my_everything.py"]

    assert_exported(tmp_path, run.root)


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
