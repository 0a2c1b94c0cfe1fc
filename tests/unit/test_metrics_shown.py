"""A task's metrics, by whatever name, reach everything that looks at a run.

The task of these lines declares three metrics; a run of an earlier version declares none.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from llmx.launch.supervision.console import Console
from llmx.launch.supervision.hang import AttemptProgress
from llmx.launch.supervision.outcome import Result
from llmx.observe.compare import outcome_rows
from llmx.observe.page.run import run_page
from llmx.observe.report import wording
from llmx.observe.report.run_data import load_run
from llmx.observe.report.sweep_data import measure
from llmx.observe.report.sweep_table import to_csv, to_markdown
from llmx.observe.status.observer import Observer
from llmx.observe.status.show import panel
from llmx.observe.status.view import interpret
from llmx.run.metrics import Metric
from llmx.run.metrics.equality import compare
from llmx.run.rundir import RunDir, write_json
from llmx.run.sweepdir import Trial
from tests import tracked_run

METRICS = {
    "accuracy": Metric("accuracy", "percent", higher_is_better=True, kinds=("train", "eval")),
    "margin": Metric("reward margin", "number", higher_is_better=True),
    "f1/macro": Metric("macro F1", "percent", higher_is_better=True),
    "perplexity": Metric("perplexity", "number", higher_is_better=False),
}
TITLES = ["accuracy", "reward margin", "macro F1", "perplexity"]
SCORES = {
    0: {"accuracy": 0.5, "margin": 0.0, "f1/macro": 0.125, "perplexity": 320.0},
    20: {"accuracy": 0.875, "margin": 1.25, "f1/macro": 0.75, "perplexity": 12.5},
    30: {"accuracy": 0.9, "margin": 1.5, "f1/macro": None, "perplexity": 11.0},
    40: {"accuracy": 0.8, "margin": 2.0, "f1/macro": 0.625, "perplexity": 15.0, "undeclared": 7},
}


def lines() -> list[dict[str, Any]]:
    """A run of 40 steps with four evaluations."""
    declared = {name: metric.to_dict() for name, metric in METRICS.items()}
    start, *others = tracked_run.lines()
    found = [{**start, "metrics": declared}, evaluation(0)]
    for line in others:
        if line["kind"] == "train":
            found.append({**line, "accuracy": 0.5 + line["step"] / 100})
            if line["step"] in SCORES:
                found.append(evaluation(line["step"]))
    return [*found, others[-1]]


def evaluation(step: int) -> dict[str, Any]:
    line = tracked_run.evaluation(step, 5.5 - step / 10, None)
    del line["exact_match"]
    return {**line, **SCORES[step]}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = tracked_run.write_start(tmp_path / "run")
    tracked_run.append(found, lines())
    write_json(found.result, {**tracked_run.result(), **SCORES[40]})
    return found


def test_the_console_shows_them() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for line in lines():
        console.record(line)
    text = stream.getvalue()
    assert (
        "eval at step 0:  loss 5.5000  accuracy 50.0 %  reward margin 0.000  macro F1 12.5 %"
        in text
    )
    assert "macro F1 62.5 %  perplexity 15.00  undeclared 7.000\n" in text
    assert "step 20/40  loss" in text
    assert "accuracy 70.0 %  lr" in text


def test_result_json_has_them_as_flat_keys() -> None:
    progress, result = AttemptProgress(hang_timeout_s=None, earlier=lines()[:3]), Result()
    for line in lines()[3:]:
        progress.take_record(line)
    progress.fill(result)
    values = result.to_dict()
    assert {name: values[name] for name in SCORES[40]} == SCORES[40]
    assert "metrics" not in values


def test_status_shows_them(run: RunDir) -> None:
    from rich.console import Console as RichConsole

    for brief in (False, True):
        view = interpret(Observer(str(run.root), brief=brief).facts())
        assert dict(view.eval_metrics)["macro F1"] == "62.5 %"
        assert view.train_metrics == [("accuracy", "90 %")]
    console = RichConsole(file=io.StringIO(), width=200)
    console.print(panel(view))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "loss 1.500, accuracy 80 %, reward margin 2.000, macro F1 62.5 %" in text
    assert ["metrics", "accuracy", "90", "%"] in [line.split() for line in text.splitlines()]


def test_the_summary_shows_before_after_and_the_best_on_the_way(run: RunDir) -> None:
    rows = dict(wording.summary_rows(load_run(run.root)))
    assert rows["accuracy"] == "50 % → 80 %   (best 90 % at step 30)"
    assert rows["reward margin"] == "0.000 → 2.000"
    assert rows["macro F1"] == "12.5 % → 62.5 %   (best 75 % at step 20)"
    assert rows["perplexity"] == "320.0 → 15.00   (best 11.00 at step 30)"
    assert rows["undeclared"] == "7.000"
    assert not any("exact" in name for name in rows)


def test_the_page_draws_them(run: RunDir) -> None:
    (columns,) = run_page(load_run(run.root))["curves"].values()
    titles = [entry["title"] for entry in columns["charts"]]
    for title in ("Accuracy (%)", "Accuracy, evaluation (%)", "Macro F1 (%)", "Reward margin"):
        assert title in titles
    assert columns["eval"]["f1/macro"] == [12.5, 75.0, None, 62.5]


def test_two_runs_are_compared_by_them(run: RunDir, tmp_path: Path) -> None:
    other = tracked_run.write_start(tmp_path / "other")
    tracked_run.append(other, tracked_run.lines())
    rows = {
        name: values for name, *values in outcome_rows(load_run(run.root), load_run(other.root))
    }
    assert rows["macro F1"] == ["12.5 % → 62.5 %   (best 75 % at step 20)", "-"]
    assert rows["exact match"] == ["-", "0 % → 96.9 %"]


def test_a_sweep_has_a_column_for_each(run: RunDir, tmp_path: Path) -> None:
    worse = tracked_run.write_start(tmp_path / "worse")
    changed = [{**line, **({"accuracy": 0.25, "perplexity": 9.0} if line.get("step") == 40 else {})}
               for line in lines()]  # fmt: skip
    tracked_run.append(worse, changed)
    write_json(worse.result, tracked_run.result())
    trials = [Trial(n, [f"seed={n}"], each.root) for n, each in enumerate((run, worse))]
    for trial in trials:
        measure(trial, has_ended=True)
    head, _, one, two = to_markdown(trials).splitlines()[:4]
    columns = [cell.strip() for cell in head.split("|")]
    assert columns[columns.index("accuracy") :][:5] == [*TITLES, "undeclared"]
    assert "80 %*" in one
    assert "9.000*" in two
    rows = list(csv.DictReader(to_csv(trials, directory=tmp_path).splitlines()))
    assert [row["accuracy"] for row in rows] == ["0.8", "0.25"]
    assert [row["f1/macro"] for row in rows] == ["0.625", "0.625"]


def test_reproduce_compares_them() -> None:
    assert compare(lines(), lines()).identical
    other = lines()
    other[-2]["f1/macro"] = 0.5
    outcome = compare(lines(), other)
    assert outcome.first is not None
    assert str(outcome.first).startswith("eval f1/macro 0.625 then, 0.5 now")
    other = lines()
    other[2]["accuracy"] = 0.0
    outcome = compare(lines(), other)
    assert outcome.first is not None
    assert outcome.first.name == "accuracy"
