"""The table at the end of a sweep: failed trials are in it, the best of each column is marked."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from llmx.observe.report.sweep_data import axes, measure
from llmx.observe.report.sweep_table import print_sweep, to_csv, to_markdown, write_sweep
from llmx.run.rundir import RunDir, write_json, write_text
from llmx.run.sweepdir import Trial

HERE = Path("/sweeps/one")


def trial(index: int, outcome: str = "ok", **values) -> Trial:
    words = ("experiment=demo", f"zero=stage{index}", "optim.lr=0.001")
    return Trial(index, words, HERE / f"{index}", outcome, **values)


THREE = (
    trial(1, loss=0.5, tokens_per_s=2000.0, memory_gib=4.0, seconds=61.0),
    trial(2, loss=0.5, tokens_per_s=3000.0, memory_gib=3.0, seconds=50.0),
    trial(3, "oom", cause="rank 0: out of memory", fix="batch.micro_batch=4", tokens_per_s=9e9),
)


def printed(trials) -> str:
    stream = io.StringIO()
    print_sweep(trials, directory=HERE, stream=stream)
    return stream.getvalue()


def test_the_best_of_each_column_is_marked_and_a_tie_is_not() -> None:
    markdown = to_markdown(THREE)
    assert "| 1 | zero=stage1 | ok | 0.5000 | 2,000 | 4.00 | 1 min 1 s |" in markdown
    assert "| 2 | zero=stage2 | ok | 0.5000 | 3,000* | 3.00* | 50 s |" in markdown
    assert "| 3 | zero=stage3 | oom |" in markdown, "a failed trial is never the best"


def test_failed_trials_say_why() -> None:
    text = printed(THREE)
    assert "Sweep: 2 of 3 trials succeeded" in text
    assert "[3] oom: rank 0: out of memory; batch.micro_batch=4" in text
    assert text.count("zero=stage") == 3
    assert "optim.lr" not in text, "what all trials share is not repeated"


def test_one_trial_and_columns_without_numbers() -> None:
    text = printed([trial(1)])
    assert "eval loss" not in text
    assert "*" not in text
    assert axes([trial(1)]) == ["experiment", "zero", "optim.lr"]


def test_csv_keeps_every_digit() -> None:
    rows = list(csv.DictReader(to_csv(THREE, directory=HERE).splitlines()))
    assert [row["zero"] for row in rows] == ["stage1", "stage2", "stage3"]
    assert rows[1]["tokens_per_s"] == "3000.0"
    assert rows[2]["fix"] == "batch.micro_batch=4"
    assert rows[2]["loss"] == ""


def test_a_trial_is_read_from_its_run_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "0")
    run.root.mkdir()
    write_text(run.config, "name: x\n")
    write_text(
        run.metrics,
        '{"kind": "start", "time": 1.0, "total_steps": 4, "metrics": {"exact_match": '
        '{"format": "percent", "higher_is_better": true}}}\n'
        '{"kind": "train", "step": 2, "time": 2.0, "loss": 3.0, "tokens_per_s": 10.0, '
        '"memory_gib": [1.0, 2.0]}\n'
        '{"kind": "train", "step": 4, "time": 3.0, "loss": 2.0, "tokens_per_s": 20.0, '
        '"memory_gib": [1.5, 2.5]}\n'
        '{"kind": "eval", "step": 4, "time": 3.5, "loss": 2.2, "exact_match": 0.5}\n',
    )
    found = Trial(0, ["zero=stage1"], run.root, started=10.0)
    measure(found)
    assert (found.outcome, found.steps, found.seconds) == ("", 4, None)
    write_json(run.result, {"outcome": "ok", "started": 0.0, "ended": 9.0})
    measure(found)
    assert found.outcome == "", "the result is of an earlier start"
    measure(found, has_ended=True)
    assert (found.outcome, found.steps, found.loss, found.eval_loss) == ("ok", 4, 2.0, 2.2)
    assert (found.tokens_per_s, found.memory_gib, found.seconds) == (20.0, 2.5, 9.0)


def test_a_trial_that_was_refused_has_no_directory(tmp_path: Path) -> None:
    found = Trial(1, ["optim.lr=-1"], tmp_path / "none", "refused", "optim.lr=-1: no")
    measure(found)
    write_sweep([found], directory=tmp_path)
    assert "refused" in (tmp_path / "sweep.csv").read_text()
    assert "optim.lr=-1: no" in (tmp_path / "sweep.md").read_text()


def test_a_loss_that_is_not_finite_is_shown_and_never_the_best() -> None:
    text = to_markdown([trial(1, loss=float("nan")), trial(2, loss=2.0), trial(3, loss=1.0)])
    assert "| nan |" in text
    assert "| 1.000* |" in text
