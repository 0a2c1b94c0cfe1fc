"""How a sweep is shown: the journal, the table, the page, ``status`` and ``watch`` of a sweep."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from llmx.__main__ import main
from llmx.cli.main import run_here
from llmx.observe.page import document
from llmx.observe.page.sweep import sweep_page
from llmx.observe.report.sweep_data import axes, load_sweep
from llmx.observe.report.sweep_table import to_csv, to_markdown
from llmx.observe.status.sweep import Snapshot
from llmx.run.rundir import write_text
from llmx.run.sweepdir import Sweep, Trial
from tests import sweepdirs
from tests.sweepdirs import START_S

HERE = Path("/sweeps/one")


def trial(index: int, outcome: str = "ok", **values: Any) -> Trial:
    words = values.pop("overrides", (f"zero=stage{index}",))
    return Trial(index, words, HERE / f"{index}", outcome, **values)


# --- The journal -----------------------------------------------------------------------------


def test_a_trial_that_runs_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    """And one that has ended since the journal was written, as ended."""
    sweepdirs.write_trial(tmp_path / "0_a", ["a=1"], finished=False, steps=8)
    sweepdirs.write_trial(tmp_path / "1_b", ["a=2"], outcome="oom", cause="too large")
    sweepdirs.write_trial(tmp_path / "2_c", ["a=3"], outcome="oom", started=START_S - 500)
    entries = [
        sweepdirs.entry(i, [f"a={i + 1}"], run_dir=name, started=START_S)
        for i, name in enumerate(("0_a", "1_b", "2_c"))
    ]
    sweepdirs.journal(tmp_path, entries, ["a=1,2,3"], complete=False)
    first, second, third = load_sweep(tmp_path).trials
    assert (first.word, first.steps, first.total_steps) == ("running", 8, 20)
    assert (second.word, second.cause, second.failed) == ("oom", "too large", True)
    assert third.word == "running", "the result is of the start before this one"


# --- The best --------------------------------------------------------------------------------


def test_the_best_ended_ok_and_is_finite() -> None:
    trials = [
        trial(0, tokens_per_s=math.nan),
        trial(1, tokens_per_s=math.inf),
        trial(2, "oom", tokens_per_s=9e9),
        trial(3, tokens_per_s=5.0, memory_gib=4.0),
        trial(4, tokens_per_s=5.0, memory_gib=3.0),
        trial(5, tokens_per_s=5.0, memory_gib=3.0),
        trial(6, "same", same_as=4, tokens_per_s=5.0, memory_gib=1.0),
        trial(7, tokens_per_s=5.0),
    ]
    best = Sweep(HERE, trials, "tokens_per_s").best
    assert best is trials[4], "of those that are as fast, the one that takes less memory"
    for none, objective in ((trials[:3], "tokens_per_s"), ([], "eval/loss"), (trials, "eval/loss")):
        assert Sweep(HERE, none, objective).best is None
    losses = [trial(0, eval_loss=2.0), trial(1, eval_loss=1.0), trial(2, metrics={"f1/macro": 0.5})]
    assert Sweep(HERE, losses, "eval/loss").best is losses[1]
    assert losses[2].value("eval/f1/macro") == 0.5
    speeds = [trial(at, trained={"mfu": 0.1 * at}) for at in (1, 3, 2)]
    assert Sweep(HERE, speeds, "train/mfu").best is speeds[1], "more is better"


numbers = st.sampled_from([None, 0.0, math.nan, math.inf, -math.inf]) | st.floats(-1e30, 1e30)
some_trials = st.lists(
    st.builds(
        lambda index, outcome, a, b, speed, memory, state: Trial(
            index, tuple(w for w in (f"a={a}" if a else "", f"b={b}") if w), HERE / str(index),
            outcome if state == "ended" else "", "why <&",
            started=1.0 if state == "running" else None,
            tokens_per_s=speed, memory_gib=memory, eval_loss=speed,
            curve=[(2, memory or 0.0), (4, 1.0)],
        ),
        st.integers(0, 50),
        st.sampled_from(["ok", "oom", "pruned", "same", "crash", "planned", "refused", "new"]),
        st.sampled_from(["", "1", "2", "1e-3", "-0", "stage1", "x,y", "<b>", "\u202e", "null"]),
        st.sampled_from(["1", "10", "1e-3", "stage2_offload", "[1, 2]", "数"]),
        numbers, numbers,
        st.sampled_from(["ended", "ended", "running", "waiting"]),
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(some_trials, st.sampled_from(["tokens_per_s", "eval/loss", "memory_gib", "eval/none"]))
def test_odd_grids_are_shown(trials: list[Trial], objective: str) -> None:
    """Missing values, NaN and markup anywhere: every view is made, and the best is the best."""
    sweep = Sweep(HERE, trials, objective)
    if sweep.best is not None:
        finite = [
            v
            for t in trials
            if t.outcome == "ok" and (v := t.value(objective)) is not None and math.isfinite(v)
        ]
        assert sweep.best.value(objective) == (max if sweep.mode == "max" else min)(finite)
    html = document("sweep", sweep_page(sweep, link=lambda trial: ""))
    assert "=<b>" not in html, "no markup in the data"
    assert "\u202e" not in html
    rows = list(csv.reader(io.StringIO(to_csv(trials, directory=HERE))))
    assert len(rows) == len(trials) + 1
    assert len({len(row) for row in rows}) == 1
    to_markdown(trials)
    Snapshot(sweep, now=1.0).line()


# --- The table -------------------------------------------------------------------------------


def test_golden(tmp_path: Path, monkeypatch, golden, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    sweepdirs.grid(Path("grid"))
    assert run_here("report", ["grid", "--width", "100"]) == 0
    golden("report/sweep.csv", Path("grid/sweep.csv").read_text())
    golden("report/sweep.md", Path("grid/sweep.md").read_text())
    said = capsys.readouterr().out.replace(str(tmp_path), "/here")
    golden("report/sweep_100.txt", "\n".join(line.rstrip() for line in said.splitlines()) + "\n")


def row(index: int, outcome: str = "ok", **values: Any) -> Trial:
    words = ("experiment=demo", f"zero=stage{index}", "optim.lr=0.001")
    return trial(index, outcome, overrides=words, **values)


THREE = (
    row(1, loss=0.5, tokens_per_s=2000.0, memory_gib=4.0, seconds=61.0),
    row(2, loss=0.5, tokens_per_s=3000.0, memory_gib=3.0, seconds=50.0),
    row(3, "oom", cause="rank 0: out of memory", fix="batch.micro_batch=4", tokens_per_s=9e9),
)


def test_the_best_of_each_column_is_marked_and_a_tie_is_not() -> None:
    markdown = to_markdown(THREE)
    assert "| 1 | zero=stage1 | ok | 0.5000 | 2,000 | 4.00 | 1 min 1 s |" in markdown
    assert "| 2 | zero=stage2 | ok | 0.5000 | 3,000* | 3.00* | 50 s |" in markdown
    assert "| 3 | zero=stage3 | oom |" in markdown, "a failed trial is never the best"
    assert "optim.lr" not in markdown, "what all trials share is not repeated"
    markdown = to_markdown([row(1, loss=math.nan), row(2, loss=2.0), row(3, loss=1.0)])
    assert "| nan |" in markdown
    assert "| 1.000* |" in markdown
    alone = to_markdown([row(1)])
    assert "eval loss" not in alone
    assert "*" not in alone
    assert axes([row(1)]) == ["experiment", "zero", "optim.lr"]


def test_what_to_type_is_the_sweeps_own_best_where_it_has_one(tmp_path: Path, capsys) -> None:
    directory = sweepdirs.rates(tmp_path / "rates")
    nowhere = ["--out", str(directory / "sweep.json" / "out")]
    assert run_here("report", [str(directory), *nowhere]) == 0
    said = capsys.readouterr().out
    assert "not written" in said
    assert "best by eval loss: [3]" in said
    assert "to train with it: python -m llmx reproduce" in said
    write_text(directory / "best.yaml", "- seed=1\n")
    assert run_here("report", [str(directory)]) == 0
    assert re.search(r"python -m llmx \S*rates/best.yaml\n", capsys.readouterr().out)
    # best.yaml is by the objective of the sweep.
    assert run_here("report", [str(directory), "--objective", "train/loss"]) == 0
    assert "reproduce" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("SWEEP --objective eval/exact", 'Did you mean "eval/exact_match"?'),
        ("RUN --out SWEEP", "--out is for sweeps"),
        ("SWEEP/nothing", "no such directory"),
    ],
)
def test_mistakes_of_the_command_line(tmp_path: Path, capsys, words: str, says: str) -> None:
    directory = str(sweepdirs.rates(tmp_path / "rates", ("1e-4",)))
    run = f"{directory}/0_optim.lr-1e-4"
    typed = words.replace("SWEEP", directory).replace("RUN", run).split()
    assert run_here("report", typed) != 0
    assert says.replace("RUN", run) in capsys.readouterr().err


# --- The page --------------------------------------------------------------------------------


def test_the_page_has_the_trials_in_order_with_their_objective(tmp_path: Path) -> None:
    directory = sweepdirs.grid(tmp_path / "grid")
    sweep = load_sweep(directory)
    same = sweep.trials[12]
    assert (same.word, same.tokens_per_s) == ("same as 4", sweep.trials[4].tokens_per_s)
    sections = sweep_page(sweep, link=lambda trial: f"#{trial.index}")["sections"]
    title, charts = sections["Objective"]
    assert title == {"text": "tokens/s, more is better"}
    assert [chart["title"] for chart in charts["charts"]] == ["over zero", "over batch.micro_batch"]
    names = [series["name"] for chart in charts["charts"] for series in chart["series"]]
    assert {"zero=stage2", "batch.micro_batch=4"} <= {*names}
    table = sections["Trials"][0]["table"]
    assert table["heads"][:2] == ["#", "run"], "a wide table is clipped at its right end"
    assert table["best"] == 0
    assert table["rows"][0][1] == {"text": "6_zero-stage2_batch.micro_batch-4", "href": "#6"}
    assert "oom" in json.dumps(sections["Failed and left out"])


def test_a_title_says_what_was_swept_and_equal_curves_are_one_line() -> None:
    fall, other = [(1, 3.0), (2, 2.0)], [(1, 3.0), (2, 1.0)]
    curves = {"stage1": fall, "stage2": [(1, 3.0), (2, 2.0001)], "stage3": other}
    trials = [
        trial(at, overrides=(f"zero={name}",), curve=curve)
        for at, (name, curve) in enumerate(curves.items())
    ]
    where = Path("/outputs/2030-01-01/12-00-00")
    content = sweep_page(Sweep(where, trials, "eval/loss"), link=lambda trial: "")
    assert content["title"].startswith("Sweep over zero")
    assert list(content["curves"]) == ["[0] zero=stage1 = [1] zero=stage2", "[2] zero=stage3"]


# --- While it runs ---------------------------------------------------------------------------


def running(count: int, *, done: int, at_once: int, took: float = 100.0) -> list[Trial]:
    """``done`` trials have ended, ``at_once`` run since 40 s; now is 1000."""
    trials = []
    for index in range(count):
        if index < done:
            values = {"started": 1.0, "ended": 1.0 + took, "tokens_per_s": 10.0 + index}
        elif index < done + at_once:
            values = {"started": 960.0, "steps": 8, "total_steps": 20}
        else:
            values = {}
        trials.append(trial(index, "ok" if index < done else "", **values))
    return trials


@pytest.mark.parametrize(
    ("count", "done", "at_once", "left_s"),
    [(10, 2, 1, 60 + 7 * 100), (10, 3, 2, 60 + 300), (3, 3, 0, 0.0), (4, 0, 1, None),
     (4, 2, 2, 60)],
)  # fmt: skip
def test_the_time_that_is_left(count: int, done: int, at_once: int, left_s: float | None) -> None:
    trials = running(count, done=done, at_once=at_once)
    seen = Snapshot(Sweep(HERE, trials, "tokens_per_s"), now=1000.0)
    assert seen.left_s == (None if left_s is None else pytest.approx(left_s))
    assert (seen.done, len(seen.running), seen.waiting) == (done, at_once, count - done - at_once)


def test_pruned_trials_take_no_time_and_say_nothing_of_the_others() -> None:
    trials = [*running(4, done=1, at_once=1), trial(4, "pruned"), trial(5, "same", same_as=0)]
    seen = Snapshot(Sweep(HERE, trials, "tokens_per_s"), now=1000.0)
    assert seen.left_s == pytest.approx(60 + 200)
    odd = [trial(0, started=5.0, ended=4.0, seconds=10.0), trial(1, "")]  # another host's clock
    assert Snapshot(Sweep(HERE, odd, "tokens_per_s"), now=1000.0).left_s == 10.0
    assert {"1 pruned", "1 the same as another"} <= {*seen.counts().split(", ")}
    assert seen.done == 3


def shown(trials: list[Trial], *, plain: bool = False) -> str:
    stream = io.StringIO()
    snapshot = Snapshot(Sweep(HERE, trials, "tokens_per_s"), now=1000.0)
    Console(file=stream, width=100).print(snapshot.panel(plain))
    return stream.getvalue()


def test_the_live_table(golden) -> None:
    trials = [
        *running(8, done=3, at_once=2),
        trial(8, "oom", cause="rank 0: out of memory", overrides=("zero=stage8",), ended=900.0),
        trial(9, "pruned", cause="larger than trial 8"),
    ]
    text = shown(trials)
    for words in (
        "5 of 10 trials", "3 done, 2 running, 1 failed, 1 pruned, 3 left", "to go (done ",
        "[3]", "zero=stage3", "step 8/20", "40 s", "[8] oom: rank 0: out of memory",
        "best by tokens/s: [2] zero=stage2  (12 tokens/s)",
    ):  # fmt: skip
        assert words in text, f"{words}\n{text}"
    assert "#" in shown(trials, plain=True)
    assert "no trial yet" in shown([])
    assert max(len(line) for line in text.splitlines()) <= 100


def live(directory: Path, **values: Any) -> Path:
    """A sweep of which one trial has ended, one runs in this process, and one waits."""
    now = time.time()
    first = sweepdirs.write_trial(directory / "0_a", ["a=1"], started=now - 60)
    sweepdirs.write_trial(directory / "1_b", ["a=2"], started=now - 20, finished=False, steps=6)
    entries = [
        sweepdirs.ended(0, ["a=1"], first, started=now - 60, ended=now - 20),
        sweepdirs.entry(1, ["a=2"], run_dir="1_b", started=now - 20),
        sweepdirs.entry(2, ["a=3"]),
    ]
    sweepdirs.journal(directory, entries, ["a=1,2,3"], complete=False, **values)
    return directory


def test_status_of_a_sweep_that_runs(tmp_path: Path, capsys) -> None:
    directory = live(tmp_path / "one", pid=os.getpid(), host=os.uname().nodename)
    assert main(["status", str(directory)]) == 0
    said = capsys.readouterr().out
    assert "1 done, 1 running, 1 left" in said
    assert "step 6/20" in said
    assert main(["status", str(directory), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["over"], facts["best"], len(facts["trials"])) == (False, 0, 3)
    assert facts["trials"][1]["state"] == "running"


def test_status_of_a_sweep_that_was_killed(tmp_path: Path, capsys) -> None:
    """Its process is gone: nothing is shown as running, and the command that goes on is named."""
    directory = live(tmp_path / "one", pid=2**22 + 5, host=os.uname().nodename)
    assert main(["status", str(directory)]) == 1
    said = capsys.readouterr().out
    assert "The process of this sweep has ended" in said
    assert "sweep resume" in said
    assert "interrupted: the sweep's process ended unexpectedly" in said
    assert "running" not in said
    # Without a process its files tell.
    directory = live(tmp_path / "two")
    assert main(["status", str(directory)]) == 0, "the journal has just been written"
    old = time.time() - 1000
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (old, old))
    assert main(["status", str(directory)]) == 1
    assert "last update 16 min" in capsys.readouterr().out


def test_watch_ends_with_the_sweep(tmp_path: Path, capsys) -> None:
    directory = sweepdirs.rates(tmp_path / "rates")
    assert main(["watch", str(directory)]) == 0
    said = capsys.readouterr().out
    assert "6/6 trials  6 done" in said
    assert "best by eval loss: [3] optim.lr=3e-3  (eval loss 0.4000, 4.00 GiB)" in said
    grid = sweepdirs.grid(tmp_path / "grid")
    assert main(["watch", str(grid)]) == 1, "trials failed"
