"""Two run directories side by side: whatever state they are in."""

from __future__ import annotations

import json
import shutil

import pytest

from llmx.cli.main import run_here
from llmx.launch.supervision.outcome import Result
from llmx.observe.compare import config_rows
from llmx.run import snapshot
from llmx.run.metrics.equality import Gap
from llmx.run.rundir import RunDir, write_json
from tests.composing import composed


@pytest.fixture
def runs(tmp_path):
    made = []
    for name, words in (("a", ["zero=stage2"]), ("b", ["zero=stage3", "launch.env.NCCL_X=1"])):
        done = composed(["hardware=cpu2", *words], run_dir=tmp_path / name)
        made.append(
            snapshot.write(
                done.experiment, done.plan, done.ds_config, overrides=list(words), environment={}
            )
        )
    return made


def log(run: RunDir, losses: list[float]) -> None:
    lines: list[dict] = [{"kind": "start", "total_steps": 90, "time": 1.0}]
    lines += [
        {"kind": "train", "step": step, "loss": loss, "time": 1.0 + step}
        for step, loss in enumerate(losses, start=1)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_config_environment_outcome_and_curves(runs, capsys) -> None:
    a, b = runs
    log(a, [3.0, 2.0, 1.5]), log(b, [3.0, 2.5])
    oom = Result(
        outcome="oom", cause="CUDA out of memory", started=1, ended=9, attempts=3, restarts=2
    )
    write_json(a.result, oom.to_dict())
    record = json.loads(a.provenance.read_text())
    record["packages"]["torch"] = "1.0"
    write_json(a.provenance, record)
    assert run_here("compare", [str(a.root), str(b.root)]) == 0
    said = capsys.readouterr().out
    assert "zero.stage" in said
    assert "launch.env.NCCL_X  not set  1" in said
    assert "run_dir" not in said
    assert "torch" in said
    assert "oom after 3 of 90 steps" in said
    assert "CUDA out of memory" in said
    assert "restarts" in said
    assert "no result.json yet" in said
    assert "2 lines in common, up to step 2. They differ first at step 2 (loss 2 in A, 2.5" in said
    assert (b.root / "compare_a.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_never_logged_and_are_the_same(runs, tmp_path, capsys) -> None:
    a, _ = runs
    shutil.copytree(a.root, tmp_path / "copy")
    assert run_here("compare", [str(a.root), str(tmp_path / "copy")]) == 0
    said = capsys.readouterr().out
    assert "config: no difference" in said
    assert "environment: no difference" in said
    assert "no logged step in common" in said
    assert "no picture" in said


def test_identical_curves_are_said_so(runs, tmp_path, capsys) -> None:
    a, b = runs
    log(a, [3.0, 2.0]), log(b, [3.0, 2.0])
    assert run_here("compare", [str(a.root), str(b.root), "--out", str(tmp_path / "x.png")]) == 0
    assert "losses: equal over the 2 logged lines up to step 2" in capsys.readouterr().out
    assert (tmp_path / "x.png").is_file()


def test_a_picture_that_cannot_be_written_is_one_line(runs, tmp_path, capsys) -> None:
    a, b = runs
    log(a, [3.0, 2.0]), log(b, [3.0, 2.0])
    for out, reason in (
        ("/dev/null/x.png", "/dev/null is a file"),
        (str(tmp_path / "none" / "x.png"), "cannot write the picture (No such file"),
        (str(tmp_path), "is a directory. Set --out to a file"),
        ("", "is a directory. Set --out to a file"),
        (str(tmp_path / ("x" * 300)), "the name is too long"),
    ):
        assert run_here("compare", [str(a.root), str(b.root), "--out", out]) == 2
        said = capsys.readouterr().err
        assert said.startswith("llmx: ")
        assert said.count("\n") == 1
        assert reason in said
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("words", [["a", "a"], ["a", "nowhere"]])
def test_what_cannot_be_compared_is_told(words, runs, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here("compare", words) == 2
    said = capsys.readouterr().err
    assert "compared with itself" in said or "no such directory" in said


def test_rows_are_values_that_differ_once() -> None:
    rows = config_rows(
        {"seed": 1, "name": "a", "launch": {"env": {}, "sync": "none"}},
        {"seed": 1, "name": "b", "launch": {"env": {"X": "1"}, "sync": "none"}},
    )
    assert [(row.key, row.a, row.b) for row in rows] == [("launch.env.X", "not set", "1")]


def test_names_that_have_now_in_them_stay_whole() -> None:
    gap = Gap(3, "eval", "unknown_rate", 0.5, 0.25)
    assert gap.shown("in A", "in B") == (
        "eval unknown_rate 0.5 in A, 0.25 in B: off by 0.25 (0.5 relative)"
    )
