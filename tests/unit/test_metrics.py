"""``metrics.jsonl``: what a task may declare, names and tail of its lines, and that a metric by
whatever name reaches everything that looks at a run."""

from __future__ import annotations

import csv
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from llmx.config import Experiment, TaskConfig
from llmx.config.tasks import shipped_tasks
from llmx.data import EvalPrompt
from llmx.errors import ConfigError
from llmx.launch.supervision.console import Console
from llmx.launch.supervision.outcome import Result
from llmx.launch.supervision.progress import Progress
from llmx.observe.compare import outcome_rows
from llmx.observe.page.run import run_page
from llmx.observe.report import wording
from llmx.observe.report.sweep_data import measure
from llmx.observe.report.sweep_table import to_csv, to_markdown
from llmx.observe.run import Run, load_run
from llmx.observe.status.show import evaluated, panel, shown_metrics
from llmx.run.metrics import Metric, declared_in, declared_of, measured, metric_of
from llmx.run.metrics.declared import check_checkpoint_metric, check_declared, loss_title
from llmx.run.metrics.equality import compare
from llmx.run.metrics.lines import (
    MetricsTail,
    event_scalars,
    read_metrics,
    scalars,
    step_of,
    summary,
)
from llmx.run.rundir import RunDir, write_json, write_text
from llmx.run.sweepdir import Trial
from llmx.tasks import task_class
from tests import tracked_run
from tests.small_tokenizers import byte_tokenizer

# --- What is declared ------------------------------------------------------------------------

F1 = Metric("macro F1", "percent", higher_is_better=True)
ACCURACY = Metric("accuracy", "percent", higher_is_better=True, kinds=("train", "eval"))
LENGTH = Metric("completion length", "integer")
DECLARED = {"f1/macro": F1, "accuracy": ACCURACY, "length": LENGTH}


def start_line(declared: dict[str, Metric]) -> dict[str, Any]:
    """As rank 0 writes it."""
    return {"kind": "start", "metrics": {name: each.to_dict() for name, each in declared.items()}}


def test_a_declaration_survives_the_file_and_the_newest_counts() -> None:
    read = json.loads(json.dumps(start_line(DECLARED)))
    assert declared_in(read) == DECLARED
    assert declared_in(start_line({})) == {}
    resumed = {**start_line({"f1/macro": F1}), "kind": "event", "event": "resumed", "step": 2}
    plain = {"kind": "event", "event": "resumed", "step": 4}
    assert declared_of([read, resumed, plain]) == {"f1/macro": F1}


def test_a_torn_declaration_ends_no_reader() -> None:
    torn = [
        None,
        [],
        "f1",
        {"f1": None},
        {"f1": {}},
        {"f1": {"kinds": 3, "title": 7, "format": []}},
    ]
    for metrics in torn:
        declared = declared_in({"kind": "start", "metrics": metrics})
        assert metric_of("f1", declared).shown(0.5)


def test_an_eval_line_has_every_number_and_a_train_line_what_is_declared() -> None:
    line = {"step": 3, "time": 1.0, "loss": 1.0, "target_tokens": 9, "accuracy": 0.5, "weight": 8}
    line |= {"other": 7, "f1/macro": None, "flag": True, "note": "x", "nonfinite": True}
    assert measured({**line, "kind": "eval"}, DECLARED) == {"accuracy": 0.5, "other": 7.0}
    assert measured({**line, "kind": "train", "mfu": 0.3}, DECLARED) == {"accuracy": 0.5}
    # A metric that is the loss once more is not shown; accuracy equals it by chance.
    line = {"kind": "eval", "loss": 0.5, "accuracy": 0.5, "plain_loss": 0.5000000001}
    assert measured(line, DECLARED).keys() == {"accuracy", "plain_loss"}
    assert measured(line, DECLARED, shown=True) == {"accuracy": 0.5}


def test_values_are_shown_in_their_format() -> None:
    assert [F1.shown(value) for value in (0.96875, math.inf)] == ["96.9 %", "inf"]
    assert F1.shown(0.97, decimals=1) == "97.0 %"
    assert LENGTH.shown(1234.4) == "1,234"
    shown = [Metric("reward").shown(value) for value in (-0.12345, 123456.0, math.nan)]
    assert shown == ["-0.1235", "123,456", "nan"]


@pytest.mark.parametrize(
    ("wanted", "mode", "best"),
    [
        ("eval/loss", "auto", "min"),
        ("eval/loss", "max", "max"),
        ("eval/f1/macro", "auto", "max"),
        ("train/accuracy", "auto", "max"),
        ("train/tokens_per_s", "auto", "max"),
        ("eval/length", "max", "max"),
    ],
)
def test_the_direction_of_best_is_the_declared_one(wanted: str, mode: str, best: str) -> None:
    assert check_checkpoint_metric(wanted, mode, DECLARED, task="rank") == best


def test_the_unit_of_the_loss_is_that_of_all_runs() -> None:
    nats, none = ([{"kind": "start", "loss_unit": unit}] for unit in ("nats per target token", ""))
    assert loss_title([nats, nats]) == "loss (nats per target token)"
    assert loss_title([none]) == loss_title([nats, none]) == loss_title([[]]) == "loss"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("eval/f1", "checkpoint.metric=eval/f1: task rank does not measure it here. It measures "
         "eval/accuracy, eval/f1/macro, eval/length, eval/loss, train/accuracy, train/loss."),
        ("train/f1/macro", "does not measure it"),
        ("eval/mfu", "does not measure it"),
        ("eval/weight", "does not measure it"),
        ("eval/length", "Set checkpoint.mode=min or checkpoint.mode=max."),
    ],
)  # fmt: skip
def test_a_metric_that_is_not_measured_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.metric") as caught:
        check_checkpoint_metric(wanted, "auto", DECLARED, task="rank")
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="does not measure it here"):
        check_checkpoint_metric("eval/loss", "auto", {}, task="grpo", evaluates_loss=False)


@pytest.mark.parametrize(
    ("name", "metric", "rule"),
    [
        ("loss", F1, "reserved; choose another, e.g. task_loss"),
        ("f1_before", F1, "reserved"),
        ("f 1", F1, "the name must begin with a letter"),
        ("f1", Metric("F1", "percentage"), "the format must be one of percent, number, integer"),
        ("f1", Metric("F1", kinds=("test",)), "kinds must be of train, eval, not test"),
        ("f1", Metric("F1", kinds=()), "not none"),
    ],
)
def test_a_declaration_that_readers_could_not_show_is_refused(name, metric, rule) -> None:
    check_declared(DECLARED, task="mine")
    with pytest.raises(ConfigError) as caught:
        check_declared({name: metric}, task="mine")
    assert rule in str(caught.value)


@pytest.mark.parametrize("kind", shipped_tasks())
def test_every_task_declares_what_it_scores(kind: str) -> None:
    options = {"teacher": "owner/name"} if kind == "distill" else {}  # it has no default
    exp = Experiment(task=TaskConfig(kind=kind, eval_generate=2, options=options))
    # Rewards read texts.
    task = task_class(kind)(exp, byte_tokenizer() if kind in ("grpo", "ppo") else None)
    check_declared(task.metrics, task=kind)
    prompts = [EvalPrompt((1, 2), "?", expected, 2) for expected in "ab"]
    scored = set(task.score(prompts, ["a", "c"]))
    assert scored <= set(task.metrics)
    exp.task.eval_generate = 0
    assert not [name for name in scored & set(task.metrics) if "eval" in task.metrics[name].kinds]


# --- The lines -------------------------------------------------------------------------------


def test_names_of_the_values_of_a_line() -> None:
    values = scalars(tracked_run.train_line(10))
    assert values["train/loss"] == tracked_run.train_line(10)["loss"]
    assert (values["train/lr"], values["perf/tokens_per_s"]) == (1e-3, 15_610.0)
    assert (values["perf/memory_gib_max"], values["perf/memory_gib/rank_0"]) == (0.43, 0.41)
    # The peak of a CPU is not known: no number rather than a wrong one.
    assert "perf/mfu" not in values
    assert not any(name.endswith(("/kind", "/step", "/time")) for name in values)
    evaluated = scalars(tracked_run.evaluation(4, 0.5, None))
    assert evaluated == {"eval/loss": 0.5, "eval/target_tokens": 999.0}
    start, *_, end = tracked_run.lines()
    assert scalars(start) == scalars(end) == {}
    assert step_of(start) == 0
    assert step_of({**start, "resumed_from": 30}) == 30


@given(st.lists(st.integers(0, 400), max_size=12))
def test_tail_gives_every_line_once_however_it_is_written(cuts: list[int]) -> None:
    """Lines cut at any place, read after every part, come out whole and in order."""
    records = [{"kind": "train", "step": i, "note": "文" * (i % 4)} for i in range(12)]
    data = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        tail = MetricsTail(path)
        found = tail.read()
        last = 0
        for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            with path.open("ab") as stream:
                stream.write(data[last:cut])
            last = cut
            found += tail.read()
    assert found == records
    assert tail.bad_lines == 0


def steps(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in records]


def test_broken_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n\xff\n[1]\n{"kind": "train", "step": 2}\n')
    tail = MetricsTail(path)
    assert (steps(tail.read()), tail.bad_lines) == ([1, 2], 2)
    for torn, whole in ((b'{"kind": "train", "step": 3}', [1, 2, 3]), (b'{"kind": "tr', [1, 2])):
        former = path.read_bytes()
        path.write_bytes(former + torn)
        assert steps(read_metrics(path)) == whole
        path.write_bytes(former)


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "cut in place"])
def test_tail_over_a_restart(tmp_path: Path, replaced: bool) -> None:
    """A resume at step 5 takes the later lines back; they come again, the others do not."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, 9)]
    write_text(path, lines[0])
    tail = MetricsTail(path)
    assert steps(tail.read()) == [1]
    whole = "".join(lines) + '{"kind": "tr'
    path.write_text(whole) if not replaced else write_text(path, whole)  # takes nothing back
    assert (steps(tail.read()), tail.cut_to) == ([*range(2, 9)], None)
    rewrite = (lambda text: write_text(path, text)) if replaced else path.write_text
    kept = "".join(lines[:5])
    rewrite(kept)
    assert (tail.read(), tail.cut_to) == ([], 5)
    resumed = {"kind": "event", "event": "resumed", "step": 5, "attempt": 2}
    with path.open("a") as stream:
        stream.write(json.dumps(resumed) + "\n" + "".join(lines[5:7]))
    assert (steps(tail.read()), tail.cut_to) == ([5, 6, 7], None)
    if not replaced:
        return  # cut in place and grown again between two looks: nothing tells
    # Again, and this time the new lines are there before the next look. The event stays.
    again = kept + json.dumps(resumed) + "\n" + json.dumps({**resumed, "attempt": 3}) + "\n"
    rewrite(again + lines[5])
    assert [(r["step"], r.get("attempt")) for r in tail.read()] == [(5, 3), (6, None)]
    assert tail.cut_to == 5
    assert steps(read_metrics(path)) == [1, 2, 3, 4, 5, 5, 5, 6]


# --- The summary -----------------------------------------------------------------------------


def test_events() -> None:
    saved = {"kind": "event", "event": "saved", "time": 5.0, "step": 40, "bytes": 7, "why": "time"}
    assert event_scalars(saved) == {"saved/step": 40.0, "saved/bytes": 7.0}
    assert scalars(saved) == event_scalars(tracked_run.train_line(2)) == {}
    resumed = {**saved, "event": "resumed", "attempt": 2, "total_steps": 90}
    start = {"kind": "start", "total_steps": 80}
    values = summary([start, saved, resumed, {**saved, "step": 60}])
    assert (values["restarts"], values["resumed_from"]) == (1, 40)
    assert (values["checkpoints"], values["last_checkpoint"]) == (2, 60)
    assert values["total_steps"] == 90, "it was made longer"


def test_summary_of_a_whole_run() -> None:
    values = summary(tracked_run.lines(40), tracked_run.result())
    expected = {
        "first_loss": tracked_run.train_line(2)["loss"], "steps": 40, "outcome": "ok",
        "final_loss": tracked_run.train_line(40)["loss"], "first_eval_loss": 5.5,
        "final_eval_loss": 0.4, "best_eval_loss": 0.4, "best_eval_step": 40,
        "exact_match_before": 0.0, "exact_match": 0.96875, "memory_gib_max": 0.43,
        "tokens_per_s": 15_622.0, "train_time_s": 40,
    }  # fmt: skip
    last = {**tracked_run.train_line(4), "loss": None, "nonfinite": True}
    assert math.isnan(summary([tracked_run.train_line(2), last])["final_loss"])
    # The speed is the median of steps 4, 6, ... 40.
    assert {name: values[name] for name in expected} == expected
    assert not {"mfu", "cause"} & set(values)


# --- Who shows them: a task with metrics of its own ------------------------------------------

METRICS = {
    "accuracy": ACCURACY,
    "margin": Metric("reward margin", "number", higher_is_better=True),
    "f1/macro": F1,
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
    start, *others = tracked_run.lines()
    found = [start | start_line(METRICS), evaluation(0)]
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of this task, for tests that only read it."""
    found = tracked_run.write_start(tmp_path_factory.mktemp("runs") / "run")
    tracked_run.append(found, lines())
    write_json(found.result, {**tracked_run.result(), **SCORES[40]})
    return found


def test_the_console_and_result_json_have_them() -> None:
    stream = io.StringIO()
    console, progress, result = Console(stream), Progress(earlier=lines()[:3]), Result()
    for at, line in enumerate(lines()):
        console.record(line)
        if at >= 3:
            progress.take_record(line)
    said = stream.getvalue()
    assert "loss 5.5000  accuracy 50.0 %  reward margin 0.000  macro F1 12.5 %" in said
    assert "macro F1 62.5 %  perplexity 15.00  undeclared 7.000\n" in said
    assert "accuracy 70.0 %  lr" in said
    progress.fill(result)
    values = result.to_dict()
    assert {name: values[name] for name in SCORES[40]} == SCORES[40]
    assert "metrics" not in values


def test_status_shows_them(run: RunDir) -> None:
    for brief in (False, True):
        view = Run(run.root, is_brief=brief)
        assert "macro F1 62.5 %" in evaluated(view)
        assert shown_metrics(view, view.last) == ["accuracy 90 %"]
    stream = io.StringIO()
    RichConsole(file=stream, width=200).print(panel(Run(run.root)))
    text = stream.getvalue()
    assert "12.5 % → 62.5 %   (best 75 % at step 20)" in text
    assert ["metrics", "accuracy", "90", "%"] in [line.split() for line in text.splitlines()]


def test_summary_page_and_comparison_have_the_best_on_the_way(run: RunDir, tmp_path: Path) -> None:
    (columns,) = run_page(load_run(run.root))["curves"].values()
    titles = {entry["title"] for entry in columns["charts"]}
    assert titles >= {"Accuracy (%)", "Accuracy, evaluation (%)", "Macro F1 (%)", "Reward margin"}
    assert columns["eval"]["f1/macro"] == [12.5, 75.0, None, 62.5]
    rows = dict(wording.summary_rows(load_run(run.root)))
    assert rows["accuracy"] == "50 % → 80 %   (best 90 % at step 30)"
    assert rows["reward margin"] == "0.000 → 2.000"
    assert rows["macro F1"] == "12.5 % → 62.5 %   (best 75 % at step 20)"
    assert rows["perplexity"] == "320.0 → 15.00   (best 11.00 at step 30)"
    assert rows["undeclared"] == "7.000"
    assert not any("exact" in name for name in rows)
    other = load_run(tracked_run.write_start(tmp_path / "other").root)
    compared = {name: values for name, *values in outcome_rows(load_run(run.root), other)}
    assert compared["macro F1"] == [rows["macro F1"], "-"]


def test_a_sweep_has_a_column_for_each(run: RunDir, tmp_path: Path) -> None:
    worse = tracked_run.write_start(tmp_path / "worse")
    changed = lines()
    for line in changed[-3:]:
        line.update({"accuracy": 0.25, "perplexity": 9.0})
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
    assert [(row["accuracy"], row["f1/macro"]) for row in rows] == [
        ("0.8", "0.625"),
        ("0.25", "0.625"),
    ]


def test_reproduce_compares_them() -> None:
    assert compare(lines(), lines()).identical
    for at, name, value, said in (
        (-2, "f1/macro", 0.5, "eval f1/macro 0.625 then, 0.5 now"),
        (2, "accuracy", 0.0, "accuracy 0.52 then, 0 now"),
    ):
        other = lines()
        other[at][name] = value
        assert said in compare(lines(), other).summary()
