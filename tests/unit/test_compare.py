"""Two run directories side by side: whatever state they are in."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from llmx.cli.main import run_here
from llmx.launch.supervision.outcome import Result
from llmx.run import snapshot
from llmx.run.metrics.equality import Gap
from llmx.run.rundir import RunDir, write_json
from tests.composing import composed


@pytest.fixture
def runs(tmp_path) -> list[RunDir]:
    made = []
    for name, words in (("a", ["zero=stage2"]), ("b", ["zero=stage3", "launch.env.NCCL_X=1"])):
        done = composed(["hardware=cpu2", f"name={name}", *words], run_dir=tmp_path / name)
        parts = (done.experiment, done.plan, done.ds_config)
        made.append(snapshot.write(*parts, overrides=list(words), environment={}))
    return made


def log(run: RunDir, *losses: float) -> None:
    lines: list[dict] = [{"kind": "start", "total_steps": 90, "time": 1.0}]
    for step, loss in enumerate(losses, start=1):
        lines.append({"kind": "train", "step": step, "loss": loss, "time": 1.0 + step})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def compared(capsys, *words: object) -> str:
    assert run_here("compare", [str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_config_environment_outcome_and_curves(runs, capsys) -> None:
    a, b = runs
    log(a, 3.0, 2.0, 1.5), log(b, 3.0, 2.5)
    oom = Result(outcome="oom", cause="CUDA out of memory", started=1, ended=9, restarts=2)
    write_json(a.result, oom.to_dict())
    record = json.loads(a.provenance.read_text())
    record["packages"]["torch"] = "1.0"
    write_json(a.provenance, record)
    said = compared(capsys, a.root, b.root)
    for words in (
        "zero.stage", "launch.env.NCCL_X  not set  1", "torch", "failed (oom) after 3 of 90 steps",
        "CUDA out of memory", "restarts", "no result.json yet",
        "losses: differs first at step 2: loss 2 in A, 2.5 in B",
        "2 of 3 logged lines up to step 2 of 3",
    ):  # fmt: skip
        assert words in said
    assert "run_dir" not in said
    assert not re.search(r"^ *(name|seed) ", said, re.M), "of each run its own, or equal"
    assert (b.root / "compare_a.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_equal_is_said_so(runs, tmp_path, capsys) -> None:
    a, b = runs
    shutil.copytree(a.root, tmp_path / "copy")
    said = compared(capsys, a.root, tmp_path / "copy")  # neither has logged anything
    for words in (
        "config: no difference", "environment: no difference", "no logged step in common",
        "no picture",
    ):  # fmt: skip
        assert words in said
    log(a, 3.0, 2.0), log(b, 3.0, 2.0)
    said = compared(capsys, a.root, b.root, "--out", tmp_path / "x.png")
    assert "losses: equal over the 2 logged lines up to step 2" in said
    assert (tmp_path / "x.png").is_file()


def test_what_cannot_be_done_is_one_line(runs, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in runs:
        log(run, 3.0, 2.0)
    for words, reason in (
        (["a", "b", "--out", "/dev/null/x.png"], "/dev/null is a file"),
        (["a", "b", "--out", "none/x.png"], "cannot write the picture (No such file"),
        (["a", "b", "--out", "."], "is a directory. Set --out to a file"),
        (["a", "b", "--out", "x" * 300], "the name is too long"),
        (["a", "a"], "compared with itself"),
    ):
        assert run_here("compare", words) == 2
        said = capsys.readouterr().err
        assert said.startswith("llmx: ")
        assert said.count("\n") == 1
        assert reason in said
    assert not list(tmp_path.rglob("*.tmp"))


def test_names_that_have_now_in_them_stay_whole() -> None:
    shown = Gap(3, "eval", "unknown_rate", 0.5, 0.25, 0.25, 0.5).shown("in A", "in B")
    assert shown == "eval unknown_rate 0.5 in A, 0.25 in B: off by 0.25 (0.5 relative)"
