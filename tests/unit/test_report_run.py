"""The report of whole, failed, unfinished and damaged runs, from their directories alone.

More damage is done by the fuzz."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llmx.cli.main import run_here
from llmx.data import EvalPrompt
from llmx.errors import ConfigError
from llmx.observe.page.run import run_page
from llmx.observe.report import figure, wording
from llmx.observe.report.step_time import MAX_RANKS, steps_by_rank
from llmx.observe.run import Run, load_run
from llmx.plan.types import MemoryPlan
from llmx.run.metrics.declared import RESERVED
from llmx.run.rundir import RunDir, read_json, write_json, write_text
from llmx.run.tail import SHAPES
from tests import tracked_run
from tests.rundirs import experiment, write_run
from tests.unit.test_serve_command import write_model

ROWS = (
    (
        "Anna has a red ball. Ben has a blue kite.\nWhat colour is Ben's kite?",
        "blue",
        "the the <script>alert(1)</script>",
        " blue\n",
    ),
    ("用英文说你好[/bold]", "hello", "", "hallo"),
    ("Say yes.", "yes", "no", None),
)
KEYS = ("prompt", "expected", "before", "after")
SAMPLES = {
    "rows": [dict(zip(KEYS, row, strict=True)) for row in ROWS],
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
def begun(tmp_path: Path) -> RunDir:
    """A run that has not logged anything."""
    return tracked_run.write_start(tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has ended."""
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


# --- How it ended ----------------------------------------------------------------------------


def test_golden(run: RunDir, capsys, golden) -> None:
    text = report(run, capsys).replace(str(run.root), "/runs/tiny")
    golden("report/run_80.txt", "\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def test_tables_fit_and_places_can_be_copied(run: RunDir, capsys) -> None:
    for width in (40, 200):
        text = report(run, capsys, width=width)
        head, places = text.split(" run directory", 1)
        assert all(len(line) <= width for line in head.splitlines())
        for place in (run.loss_curve, "wandb sync /runs/x/wandb/o", f"llmx generate {run.root} "):
            assert str(place) in places
    assert "\x1b" not in text, "plain where it is no terminal"
    run.report.unlink()
    run.report.mkdir()
    ascii_only = {"PATH": "", "PYTHONIOENCODING": "ascii", "HOME": str(run.root)}
    argv = [sys.executable, "-m", "llmx", "report", str(run.root)]
    said = subprocess.run(argv, env=ascii_only, capture_output=True, check=True).stdout
    assert b"trained 40 steps" in said
    assert b"not written (Is a directory)" in b" ".join(said.split())


def test_failed_run(run: RunDir, capsys) -> None:
    write_json(run.result, tracked_run.result("oom", **FAILURE))
    text = report(run, capsys, width=100)
    first = text.strip().splitlines()[0]
    assert first.startswith("✗ tiny-演示: failed (oom) after 40 steps")
    assert "(rank 3, node-b)" in first
    for words in (
        FAILURE["cause"], FAILURE["fix"], "torch.OutOfMemoryError: CUDA out of memory",
        "... 20 lines before", run.rank_log(3), f"python -m llmx resume {run.root}\n",
    ):  # fmt: skip
        assert str(words) in text
    page = run.report.read_text(encoding="utf-8")
    assert "torch.OutOfMemoryError" in page
    assert FAILURE["fix"] in page


@pytest.mark.parametrize(
    ("logged", "result", "says"),
    [
        (0, {}, "planned, not started"),
        (7, {}, "no result.json yet (10 of 40 steps"),
        (0, {"outcome": "config", "cause": "ssh: refused"}, "failed (config) after 0 steps|ssh:"),
    ],
    ids=["only planned", "still training", "never trained"],
)
def test_a_run_without_an_end(
    begun: RunDir, capsys, logged: int, result: dict[str, str], says: str
) -> None:
    if logged:
        tracked_run.append(begun, tracked_run.lines()[:logged])
    if result:
        write_json(begun.result, tracked_run.result(**result))
    text = report(begun, capsys)
    for words in says.split("|"):
        assert words in text
    assert begun.loss_curve.exists() == bool(logged)
    assert begun.report.is_file()
    if not (logged or result):
        assert f"python -m llmx resume {begun.root}" in text
    assert ("reproduce" in text) == bool(logged or result)


def test_interrupted_between_two_logged_steps(begun: RunDir, capsys) -> None:
    saved = {"kind": "event", "event": "saved", "step": 11, "time": tracked_run.START_S + 3}
    tracked_run.append(begun, [*tracked_run.lines()[:7], saved])  # to step 10
    values = {"cause": "ended by Ctrl-C", "other_fix": "request more time; or fewer steps"}
    fix = f"to resume: python -m llmx resume {begun.root}; {values['other_fix']}"
    write_json(begun.result, tracked_run.result("interrupted", fix=fix, **values))
    text = report(begun, capsys, width=200)
    assert "interrupted after 11 of 40 steps" in text
    assert "to resume:" not in text
    assert "request more time; or fewer steps" in text
    assert "python -m llmx resume" in text


def test_times_of_a_resumed_run_are_of_the_time_since(run: RunDir, capsys) -> None:
    """The metrics are of the whole run, ``result.json`` is of its last supervisor."""
    later = tracked_run.START_S + 5000
    event = {"kind": "event", "event": "resumed", "step": 40, "attempt": 2, "total_steps": 44}
    lines = [{**event, "time": later + 10}]
    less = {"memory_gib": [0.25, 0.125]}  # the peak is that of the whole run
    lines += [{**tracked_run.train_line(s), "time": later + 20 + s, **less} for s in (42, 44)]
    tracked_run.append(run, lines)
    write_json(run.result, {**tracked_run.result(), "started": later, "ended": later + 70})
    text = report(run, capsys, width=100)
    assert "trained 44 steps (resumed at step 40, 1 min 10 s since)" in text
    assert "1 min 10 s (training 2.0 s)   (since the resume" in text
    assert "0.43 GiB on the fullest rank" in text


def test_no_run_directory(tmp_path: Path, capsys) -> None:
    tracked_run.write_start(tmp_path / "runs" / "mine")
    for place, says in (
        (tmp_path / "runs", "not a run directory.* config.yaml.*Runs in it: mine."),
        (tmp_path / "runs" / "mien", 'Did you mean "mine"?'),
    ):
        assert run_here("report", [str(place)]) == 2
        assert re.search(says, capsys.readouterr().err)


# --- What is shown ---------------------------------------------------------------------------


def test_generated_samples_are_shown_with_each_reward(run: RunDir, capsys) -> None:
    from llmx.tasks import GeneratedSample
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
    assert "Samples of step 30" in text
    assert re.search(r"What is 6 times 7\? +It is <42>\. +1 +- +- +0", text)
    assert re.search(r"\(nothing\) +1 +0\.5 +1\.5 +-1\.25", text)
    assert text.count("What is 6 times 7?") == 1, "of the newest step"
    assert "Eval question?" in text
    write_json(run.provenance, {"git": {"diff": "+" * 3_000_000}})
    report(run, capsys)
    assert run.report.stat().st_size < 500_000
    assert "whole in provenance.json" in run.report.read_text(encoding="utf-8")
    page = run.report.read_text(encoding="utf-8")
    assert '"Samples of step 30":[{"table":' in page
    assert "It is \\u003c42>." in page
    assert '["prompt","completion","exact_match","short","reward","advantage"]' in page


def test_the_page_is_one_whole_file(run: RunDir, capsys) -> None:
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


def test_predicted_against_measured(begun: RunDir) -> None:
    """Of a run on GPUs the memory, too; nothing where the plan had no prediction. A step that was
    repeated counts once, and a loss is not shown twice."""
    start, *lines = tracked_run.lines()
    again = {**tracked_run.train_line(20), "loss": 1.0}  # after a restart
    lines = [*lines, again, {"kind": "eval", "step": 40, "loss": 0.5, "plain_loss": 0.5}]
    tracked_run.append(begun, [{**start, "num_trained": 32_768}, *lines])
    before = load_run(begun.root)
    assert [line["step"] for line in before.train] == list(range(2, 42, 2)), "each step once"
    assert [line["step"] for line in before.train if line["loss"] == 1.0] == [20]
    rows = dict(wording.summary_rows(before))
    assert rows["trained"].startswith("32.8 k parameters")
    assert not {"predicted", "plain loss"} & {*rows}
    paces = [line["step_time_s"] for line in before.train]
    plan = read_json(begun.plan)
    plan |= {"time": {"step_s": statistics.median(paces[1:]) / 2}, "accelerator": "cuda"}
    plan["memory"] = [asdict(MemoryPlan("a", 10, 2, 3, 4, 0, 1, 0, 80))]
    write_json(begun.plan, plan)
    assert "predicted" not in dict(wording.summary_rows(load_run(begun.root), is_brief=True))
    text = dict(wording.summary_rows(load_run(begun.root)))["predicted"]
    assert "(+100%) a step; memory 20.0 GiB, measured" in text


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.3, "waiting for samples 40 % of a step, measured 30 %"),
        (0.7, "measured 70 % (let more hosts draw: rollout.hosts)"),
        (0.1, "measured 10 % (let fewer hosts draw: rollout.hosts)"),
    ],
)
def test_hosts_that_draw_against_the_plan(begun: RunDir, share: float, expected: str) -> None:
    tracked_run.append(begun, [{**x, "rollout_wait_share": share} for x in tracked_run.lines()])
    rollout = {"training_idle": 0.4, "drawing_idle": [["node-b", 0.6]]}
    write_json(begun.plan, read_json(begun.plan) | {"time": {"step_s": 0.1, "rollout": rollout}})
    assert wording.predicted(load_run(begun.root)).endswith(expected)


# --- The timeline of a step by rank ----------------------------------------------------------


def timed(root: Path, **last: Any) -> Run:
    """A run whose last logged step has these times."""
    run = tracked_run.write_start(root)
    lines = tracked_run.lines()
    lines[-3].update(last)
    tracked_run.append(run, lines)
    return load_run(run.root)


TIMES = {"forward_s": [0.05, 0.02], "backward_s": [0.10, 0.16], "update_s": [0.03, 0.03]}


def test_waiting_is_what_a_backward_pass_has_beyond_its_proportion(tmp_path: Path) -> None:
    data = timed(tmp_path, **TIMES, step_time_s=0.22)
    steps = steps_by_rank(data)
    slow, fast = steps.ranks
    assert (slow.backward, slow.waits) == (pytest.approx(0.10), pytest.approx(0.0))
    assert (fast.backward, fast.waits) == (pytest.approx(0.04), pytest.approx(0.12))
    assert (slow.idle, fast.idle) == (0.0, pytest.approx(0.6))
    assert slow.rest == pytest.approx(0.04)
    idle = dict(wording.summary_rows(data))["idle"]
    assert idle == "30 % of the ranks' computing time, most on rank 1 (localhost): 60 %"
    _, bars, table = run_page(data)["sections"]["One step by rank"]
    assert bars["bars"]["rows"][1] == ["rank 1", 20.0, 40.0, 120.0, 30.0, 10.0]
    assert table["table"]["rows"][1][5] == "120.0"
    assert table["table"]["rows"][1][-1] == "0.43"


@pytest.mark.parametrize("times", [{}, TIMES | {"update_s": [0.1]}, TIMES | {"forward_s": [0, 0]}])
def test_a_run_that_measured_nothing_has_no_timeline(tmp_path: Path, times: dict[str, Any]) -> None:
    data = timed(tmp_path, **times)
    assert steps_by_rank(data) is None
    assert "One step by rank" not in run_page(data)["order"]
    assert "idle" not in dict(wording.summary_rows(data))


def test_of_many_ranks_the_extremes_are_shown(tmp_path: Path) -> None:
    forward = [0.1 - 0.0001 * rank for rank in range(300)]
    times = {"forward_s": forward, "backward_s": [0.2] * 300, "update_s": [0.01] * 300}
    text, _, table = run_page(timed(tmp_path, **times))["sections"]["One step by rank"]
    assert f"{300 - MAX_RANKS} ranks between them are left out" in text["text"]
    ranks = [row[0] for row in table["table"]["rows"]]
    assert (ranks[0], ranks[-1], len(ranks)) == ("0", "299", MAX_RANKS)


def test_events_of_the_split_are_told(begun: RunDir) -> None:
    event = {"kind": "event", "time": tracked_run.START_S, "step": 8}
    straggler = {"event": "straggler", "rank": 1, "host": "node-b", "factor": 2.1}
    changed = {"event": "rebalanced", "sizes": [[6, 6], [4]], "time_factor": 0.6}
    tracked_run.append(begun, [{**event, **straggler}, {**event, **changed}])
    assert wording.events(load_run(begun.root)) == [
        "Rank 1 (node-b) computed 2.1 times as long as the others for its share, at step 8.",
        "Samples were redistributed after step 8 (batch.rebalance), by rank: 12, 4.",
    ]


# --- Damaged files are one line, not a traceback ---------------------------------------------


@pytest.mark.parametrize(
    ("command", "shown"), [("report", "trained 40 steps"), ("status", ""), ("compare", "")]
)
def test_a_value_of_another_kind(
    run: RunDir, tmp_path: Path, capsys, command: str, shown: str
) -> None:
    plan = read_json(run.plan)
    write_json(run.plan, {**plan, "batch": {**plan["batch"], "accumulation": "x"}})
    other = [str(tracked_run.write_start(tmp_path / "other").root)] * (command == "compare")
    assert run_here(command, [str(run.root), *other]) in (0, 1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "plan.json has a value that llmx does not write" in printed
    assert shown in printed, "and the rest is shown"
    assert "batch.accumulation is 'x'" in printed


WRONG_KINDS = {
    "rows": 5, "outcome": 5, "hosts": 5, "tables": 5, "train": 5, "wandb": 5, "loss": "x",
    "cause": 5, "name": [], "rewards": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "content", [bytes(range(256)), b"[1, 2]\n", json.dumps(WRONG_KINDS).encode() + b"\n"]
)
def test_each_damaged_file_is_named_in_one_line(begun: RunDir, content: bytes) -> None:
    run = begun
    tracked_run.append(run, tracked_run.lines())
    for path in (
        run.config, run.overrides, run.plan, run.samples, run.tables, run.result, run.data,
        run.tracking, run.metrics, run.attempts, run.rollouts,
    ):  # fmt: skip
        former = path.read_bytes() if path.exists() else b""
        path.write_bytes(content)
        data = load_run(run.root)
        named = [warning for warning in data.warnings if path.name in warning]
        assert len(named) == 1, (path.name, data.warnings)
        assert "\n" not in named[0]
        assert run_page(data)["title"]
        path.write_bytes(former) if former else path.unlink()


def test_no_metric_of_a_task_is_taken_for_damage() -> None:
    assert set(SHAPES["metrics.jsonl"]) <= RESERVED


def test_eval_says_a_damaged_tokenizer_in_a_line(tmp_path: Path, capsys) -> None:
    run = write_run(experiment(tmp_path / "run", ranks=1))
    write_model(run.final_model)
    (run.final_model / "tokenizer.json").write_text('{"version": 1, "added_tokens": 7}')
    of_class = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (run.final_model / "tokenizer_config.json").write_text(of_class)
    assert run_here("eval", [str(run.root), "data.path=demo"]) == ConfigError.exit_code
    assert "has no tokenizer that can be loaded" in capsys.readouterr().err
