"""The report of whole, failed, unfinished and damaged runs, from their directories only."""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from llmx import text as human
from llmx.cli.main import run_here
from llmx.data import EvalPrompt
from llmx.observe.report import figure, wording
from llmx.observe.report.run_data import load_run
from llmx.plan.types import MemoryPlan
from llmx.run.rundir import RunDir, read_json, write_json, write_text
from tests import tracked_run

SAMPLES = {
    "rows": [
        {
            "prompt": "Anna has a red ball. Ben has a blue kite.\nWhat colour is Ben's kite?",
            "expected": "blue",
            "before": "the the <script>alert(1)</script>",
            "after": " blue\n",
        },
        {"prompt": "用英文说你好[/bold]", "expected": "hello", "before": "", "after": "hallo"},
        {"prompt": "Say yes.", "expected": "yes", "before": "no", "after": None},
    ],
    "exact_match_before": 0.0,
    "exact_match_after": 0.5,
}
FAILURE = {
    "cause": "CUDA out of memory in the first optimizer step.",
    "fix": "batch.micro_batch=2, or zero=stage3",
    "failed_rank": 3,
    "host": "node-b",
    "traceback": "Traceback (most recent call last):\n"
    + "".join(f'  File "model.py", line {i}, in forward\n' for i in range(30))
    + "torch.OutOfMemoryError: CUDA out of memory",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = tracked_run.write_start(tmp_path / "run", kinds=["wandb"])
    tracked_run.append(run, tracked_run.lines())
    write_json(run.samples, SAMPLES)
    write_json(run.result, tracked_run.result())
    write_text(run.rank_log(3), "the log\n")
    (run.final_model).mkdir()
    sync = {"state": "offline", "message": "no API key", "sync": "wandb sync /runs/x/wandb/o"}
    write_json(run.root / "tracking.json", {"wandb": sync})
    return run


def report(run: RunDir, capsys: pytest.CaptureFixture[str], *, width: int = 80) -> str:
    assert run_here("report", [str(run.root), "--width", str(width)]) == 0
    return capsys.readouterr().out


def test_golden(run: RunDir, capsys: pytest.CaptureFixture[str], golden) -> None:
    text = report(run, capsys).replace(str(run.root), "/runs/tiny")
    golden("report/run_80.txt", "\n".join(line.rstrip() for line in text.splitlines()) + "\n")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fit_and_places_can_be_copied(
    run: RunDir, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    text = report(run, capsys, width=width)
    head, places = text.split(" run directory", 1)
    assert all(len(line) <= width for line in head.splitlines())
    assert str(run.loss_curve) in places
    assert "wandb sync /runs/x/wandb/o" in places
    assert f"python -m llmx generate {run.root} " in places
    assert "\x1b" not in text, "plain where it is no terminal"


def test_failed_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.result, tracked_run.result("oom", **FAILURE))
    text = report(run, capsys, width=100)
    first = text.strip().splitlines()[0]
    assert first.startswith("✗ tiny-演示: oom after 40 steps")
    assert "(rank 3, node-b)" in first
    assert FAILURE["cause"] in text
    assert FAILURE["fix"] in text
    assert "torch.OutOfMemoryError: CUDA out of memory" in text
    assert "... 20 lines before" in text
    assert str(run.rank_log(3)) in text
    assert f"python -m llmx resume {run.root}\n" in text
    page = run.report.read_text(encoding="utf-8")
    assert "torch.OutOfMemoryError" in page
    assert FAILURE["fix"] in page


def test_run_that_still_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tracked_run.write_start(tmp_path / "run")
    tracked_run.append(run, tracked_run.lines()[:7])
    text = report(run, capsys)
    assert "no result.json yet (10 of 40 steps" in text
    assert run.loss_curve.is_file()
    assert "reproduce" in text


def test_run_that_never_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tracked_run.write_start(tmp_path / "run")
    write_json(run.result, tracked_run.result("config", cause="ssh: connection refused"))
    text = report(run, capsys)
    assert "config after 0 steps" in text
    assert "ssh: connection refused" in text
    assert not run.loss_curve.exists()
    assert run.report.is_file()


def test_run_that_was_only_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tracked_run.write_start(tmp_path / "run")
    text = report(run, capsys)
    assert "planned, not started" in text
    assert f"python -m llmx resume {run.root}" in text
    assert "reproduce" not in text


def test_interrupted_between_two_logged_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tracked_run.write_start(tmp_path / "run")
    tracked_run.append(run, tracked_run.lines()[:7])  # to step 10
    saved = {"kind": "event", "event": "saved", "step": 11, "time": tracked_run.START_S + 3}
    tracked_run.append(run, [saved])
    values = {"cause": "ended by Ctrl-C", "other_fix": "request more time; or fewer steps"}
    fix = f"to resume: python -m llmx resume {run.root}; {values['other_fix']}"
    write_json(run.result, tracked_run.result("interrupted", fix=fix, **values))
    text = report(run, capsys, width=200)
    assert "interrupted after 11 of 40 steps" in text
    assert "to resume:" not in text
    assert "request more time; or fewer steps" in text
    assert "python -m llmx resume" in text


def test_times_of_a_resumed_run_are_of_the_time_since(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics are of the whole run, ``result.json`` is of its last supervisor."""
    later = tracked_run.START_S + 5000
    event = {"kind": "event", "event": "resumed", "step": 40, "attempt": 2, "total_steps": 44}
    lines = [{**event, "time": later + 10}]
    lines += [{**tracked_run.train_line(s), "time": later + 20 + s} for s in (42, 44)]
    tracked_run.append(run, lines)
    write_json(run.result, {**tracked_run.result(), "started": later, "ended": later + 70})
    text = report(run, capsys, width=100)
    assert "trained 44 steps (resumed at step 40, 1 min 10 s since)" in text
    assert "1 min 10 s (training 2.0 s)   (since the resume" in text


def test_generated_samples_are_shown_with_each_reward(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    from llmx.tasks.base import GeneratedSample
    from llmx.train.evaluation import write_samples
    from llmx.train.rollout import write_rollouts

    prompts = [EvalPrompt((), prompt="Eval question?", expected="42", expected_tokens=1)]
    write_samples(run, prompts, ["41"], {}, when="before")
    rewards = {"exact_match": 1.0, "short": None, "reward": None}
    samples = [
        GeneratedSample("What is 6 times 7?", "It is <42>.", rewards, 0.0),
        GeneratedSample("And 6 plus 7?", "", {**rewards, "short": 0.5, "reward": 1.5}, -1.25),
    ]
    for step in (29, 30):
        write_rollouts(run, samples, step=step, attempt=1)
    write_samples(run, prompts, ["42"], {}, when="after")
    text = report(run, capsys, width=110)
    assert "samples of step 30" in text
    assert re.search(r"What is 6 times 7\? +It is <42>\. +exact_match 1 +0", text)
    assert re.search(r"\(nothing\) +exact_match 1 +-1\.25", text)
    assert re.search(r"^ +short 0\.5 *$", text, re.M), "a line for each"
    assert text.count("What is 6 times 7?") == 1, "of the newest step"
    assert "Eval question?" in text
    page = run.report.read_text(encoding="utf-8")
    assert '"Samples of step 30":[{"table":' in page
    assert "It is \\u003c42>." in page
    assert '["prompt","completion","exact_match","short","reward","advantage"]' in page


def test_damaged_files_are_named_and_the_rest_is_shown(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.plan.write_text('{"hosts": [')
    run.samples.write_text("[]")
    with run.metrics.open("a", encoding="utf-8") as stream:
        stream.write("garbage\n" + '{"kind": "train", "st')
    text = report(run, capsys, width=100)
    assert "trained 40 steps" in text
    assert "plan.json cannot be read" in text
    assert "samples.json is not a JSON object" in text
    assert "metrics.jsonl: unreadable lines are left out (1)." in text


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("report", [str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "not a run directory" in error
    assert "config.yaml" in error
    tracked_run.write_start(tmp_path / "mine")
    assert run_here("report", [str(tmp_path)]) == 2
    assert "Runs in it: mine." in capsys.readouterr().err
    assert run_here("report", [str(tmp_path / "mien")]) == 2
    assert 'Did you mean "mine"?' in capsys.readouterr().err


def test_a_huge_diff_does_not_make_a_huge_page(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(run.provenance, {"git": {"diff": "+" * 3_000_000}})
    report(run, capsys)
    assert run.report.stat().st_size < 500_000
    assert "whole in provenance.json" in run.report.read_text(encoding="utf-8")


def test_a_step_repeated_after_a_restart_counts_once(tmp_path: Path) -> None:
    run = tracked_run.write_start(tmp_path / "run")
    again = {**tracked_run.train_line(4), "loss": 1.0}
    tracked_run.append(run, [*map(tracked_run.train_line, (2, 4, 6)), again])
    train = load_run(run.root).train
    assert [(line["step"], line["loss"] == 1.0) for line in train] == [
        (2, False),
        (4, True),
        (6, False),
    ]


def test_the_page_is_one_whole_file(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    report(run, capsys)
    page = run.report.read_text(encoding="utf-8")
    assert "\\u003cscript>alert(1)" in page
    for shown in ("model.config.hidden_size", "stage", "abc123", "0.96875", "eval/loss"):
        assert shown in page
    own_files = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)=|url\(|@import", own_files), "nothing is loaded"


def test_picture_shows_the_curves(run: RunDir) -> None:
    from matplotlib import pyplot

    assert figure.draw_losses([load_run(run.root)], run.loss_curve)
    pixels = pyplot.imread(run.loss_curve)[..., :3]
    blue = (abs(pixels - (0.12, 0.47, 0.71)) < 0.1).all(axis=-1)
    orange = (abs(pixels - (1.0, 0.50, 0.05)) < 0.1).all(axis=-1)
    assert blue.sum() > 500, "the train loss is drawn"
    assert orange.sum() > 50, "the evaluations are drawn"
    columns = blue.any(axis=0).nonzero()[0]
    assert columns[-1] - columns[0] > pixels.shape[1] / 2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (human.count(950), "950"),
        (human.count(6_738_415_616), "6.74 B"),
        (human.duration(0.84), "0.8 s"),
        (human.duration(72), "1 min 12 s"),
        (human.duration(11_100), "3 h 5 min"),
        (human.percent(0.96875), "96.9 %"),
        (human.number(0.4), "0.4000"),
        (human.number(math.nan), "nan"),
    ],
)
def test_forms(found: str, expected: str) -> None:
    assert found == expected


def test_ascii_terminal(run: RunDir) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmx", "report", str(run.root)],
        env={"PATH": "", "PYTHONIOENCODING": "ascii", "HOME": str(run.root)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"trained 40 steps" in done.stdout


def test_predicted_against_measured(tmp_path: Path) -> None:
    """Of a run on GPUs the memory, too; nothing where the plan had no prediction."""
    run = tracked_run.write_start(tmp_path / "run", kinds=[])
    tracked_run.append(run, tracked_run.lines())
    before = load_run(run.root)
    paces = [line["step_time_s"] for line in before.train]
    assert "predicted" not in dict(wording.summary_rows(before))
    plan = read_json(run.plan)
    plan |= {"time": {"step_s": statistics.median(paces[1:]) / 2}, "accelerator": "cuda"}
    plan["memory"] = [asdict(MemoryPlan("a", 10, 2, 3, 4, 0, 0, 1, 0, 80))]
    write_json(run.plan, plan)
    assert "predicted" not in dict(wording.summary_rows(load_run(run.root), is_brief=True))
    text = dict(wording.summary_rows(load_run(run.root)))["predicted"]
    assert "(+100%) a step; memory 20.0 GiB, measured" in text


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.3, "waiting for samples 40 % of a step, measured 30 %"),
        (0.7, "measured 70 % (let more hosts draw: rollout.hosts)"),
        (0.1, "measured 10 % (let fewer hosts draw: rollout.hosts)"),
    ],
)
def test_hosts_that_draw_against_the_plan(tmp_path: Path, share: float, expected: str) -> None:
    run = tracked_run.write_start(tmp_path / "run", kinds=[])
    lines = [{**line, "rollout_wait_share": share} for line in tracked_run.lines()]
    tracked_run.append(run, lines)
    plan = read_json(run.plan)
    rollout = {"training_idle": 0.4, "drawing_idle": [["node-b", 0.6]]}
    write_json(run.plan, plan | {"time": {"step_s": 0.1, "rollout": rollout}})
    assert wording.predicted(load_run(run.root)).endswith(expected)
