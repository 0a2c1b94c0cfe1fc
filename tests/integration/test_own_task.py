"""The task of docs/tasks.md, used as the page says: pairs, a frozen reference, metrics, resume."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
TOPICS = ("rain", "snow", "tea", "bread", "a river", "the sea", "a lamp", "a horse")


def llmx(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llmx", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def lines(run: Path, kind: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_the_example_of_the_docs_trains_resumes_and_exports(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(code.splitlines()) < 80
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "my_tasks.py").write_text(code, encoding="utf-8")
    pairs = [
        {
            "prompt": f"Say something of {topic}, number {number}.",
            "chosen": f"I like {topic}.",
            "rejected": f"No word of {topic} from me, never.",
        }
        for topic in TOPICS
        for number in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    run = tmp_path / "run"
    first = llmx(
        "task.kind=my_tasks:Dpo", "task.options.beta=0.5", "data=file", "data.path=../pairs.jsonl",
        "data.eval_samples=8", "data.seq_len=256", "hardware=cpu2", "zero=stage2", "optim.lr=0.003",
        "batch.global_batch=8", "task.steps=12", "task.stop_at_step=6", "task.log_every_steps=1",
        "checkpoint.metric=eval/accuracy", f"run_dir={run}",
        cwd=tasks,
    )  # fmt: skip
    assert "accuracy" in first
    (start,) = lines(run, "start")
    assert start["metrics"]["accuracy"]["higher_is_better"] is True
    before = lines(run, "train")
    assert before[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "policy and reference are equal"
    assert before[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert [line["step"] for line in before] == list(range(1, 7))
    # From another directory: the code is found where it was.
    llmx("resume", str(run), "task.stop_at_step=null", cwd=tmp_path)
    after = lines(run, "train")
    assert [line["step"] for line in after] == list(range(1, 13))
    assert after[-1]["loss"] < 0.5 < before[0]["loss"]
    assert lines(run, "eval")[-1]["accuracy"] == 1.0
    assert (run / "model" / "model.safetensors").is_file()
    provenance = json.loads((run / "provenance.json").read_text())
    assert list(provenance["task_code"]) == ["my_tasks.py"]
    (newest,) = (run / "checkpoints").glob("step-*12/state.json")
    state = json.loads(newest.read_text())
    assert all(name.startswith("policy.") for name in state["parameters"])
    # The checkpoint gives the same model as the end of the run did, under the names of the Hub.
    llmx("export", str(run), cwd=tmp_path)
    exported = load_file(next(run.glob("export/*/model.safetensors")))
    final = load_file(run / "model" / "model.safetensors")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)
