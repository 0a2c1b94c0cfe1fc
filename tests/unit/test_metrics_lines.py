"""Names, tail and summary of ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.run.metrics.lines import (
    MetricsTail,
    Summary,
    event_scalars,
    read_metrics,
    scalars,
    step_of,
)
from llmx.run.rundir import write_text
from tests import tracked_run


def test_names_of_a_train_line() -> None:
    values = scalars(tracked_run.train_line(10))
    assert values["train/loss"] == tracked_run.train_line(10)["loss"]
    assert values["train/lr"] == 1e-3
    assert values["perf/tokens_per_s"] == 15_610.0
    assert values["perf/memory_gib_max"] == 0.43
    assert values["perf/memory_gib/rank_0"] == 0.41
    # The peak of a CPU is not known: no number rather than a wrong one.
    assert "perf/mfu" not in values
    assert not any(name.endswith(("/kind", "/step", "/time")) for name in values)


def test_names_of_an_eval_line() -> None:
    line = tracked_run.evaluation(4, 0.5, None)
    assert scalars(line) == {"eval/loss": 0.5, "eval/target_tokens": 999.0}


def test_other_lines_have_no_scalars() -> None:
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


def test_tail_counts_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\nnot json\n[1]\n{"kind": "train", "step": 2}\n')
    tail = MetricsTail(path)
    assert [record["step"] for record in tail.read()] == [1, 2]
    assert tail.bad_lines == 2


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "cut in place"])
def test_tail_over_a_restart(tmp_path: Path, replaced: bool) -> None:
    """A resume at step 5 takes the later lines back; they come again, the others do not."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, 9)]
    path.write_text("".join(lines) + '{"kind": "tr')
    tail = MetricsTail(path)
    assert [record["step"] for record in tail.read()] == list(range(1, 9))
    assert tail.cut_to is None

    def rewrite(text: str) -> None:
        if replaced:
            write_text(path, text)
        else:
            path.write_text(text)

    kept = "".join(lines[:5])
    rewrite(kept)
    assert (tail.read(), tail.cut_to) == ([], 5)
    resumed = {"kind": "event", "event": "resumed", "step": 5, "attempt": 2}
    with path.open("a") as stream:
        stream.write(json.dumps(resumed) + "\n" + "".join(lines[5:7]))
    assert [record["step"] for record in tail.read()] == [5, 6, 7]
    assert tail.cut_to is None
    if not replaced:
        return  # cut in place and grown again between two looks: nothing tells
    # Again, and this time the new lines are there before the next look. The event stays.
    again = kept + json.dumps(resumed) + "\n" + json.dumps({**resumed, "attempt": 3}) + "\n"
    rewrite(again + lines[5])
    assert [(r["step"], r.get("attempt")) for r in tail.read()] == [(5, 3), (6, None)]
    assert tail.cut_to == 5
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 5, 5, 6]


def test_a_restart_that_took_nothing_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_text(path, '{"kind": "train", "step": 1}\n')
    tail = MetricsTail(path)
    tail.read()
    write_text(path, '{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n')
    assert [record["step"] for record in tail.read()] == [2]
    assert tail.cut_to is None


def test_events() -> None:
    saved = {"kind": "event", "event": "saved", "time": 5.0, "step": 40, "bytes": 7, "why": "time"}
    assert event_scalars(saved) == {"saved/step": 40.0, "saved/bytes": 7.0}
    assert scalars(saved) == {}
    assert event_scalars(tracked_run.train_line(2)) == {}
    summary = Summary()
    for record in (saved, {**saved, "event": "resumed", "attempt": 2}, {**saved, "step": 60}):
        summary.add(record)
    values = summary.values()
    assert (values["restarts"], values["resumed_from"]) == (1, 40)
    assert (values["checkpoints"], values["last_checkpoint"]) == (2, 60)


def test_summary_of_a_whole_run() -> None:
    summary = Summary()
    for record in tracked_run.lines(40):
        summary.add(record)
    values = summary.values(tracked_run.result())
    assert values["first_loss"] == tracked_run.train_line(2)["loss"]
    assert values["final_loss"] == tracked_run.train_line(40)["loss"]
    assert values["steps"] == 40
    assert (values["first_eval_loss"], values["final_eval_loss"]) == (5.5, 0.4)
    assert (values["best_eval_loss"], values["best_eval_step"]) == (0.4, 40)
    assert (values["exact_match_before"], values["exact_match"]) == (0.0, 0.96875)
    assert values["tokens_per_s"] == 15_622.0  # the median of steps 4, 6, ... 40
    assert values["memory_gib_max"] == 0.43
    assert values["train_time_s"] == 40
    assert values["outcome"] == "ok"
    assert "mfu" not in values
    assert "cause" not in values


def test_summary_of_a_run_that_ended_in_nan() -> None:
    summary = Summary()
    summary.add(tracked_run.train_line(2))
    summary.add({**tracked_run.train_line(4), "loss": None, "nonfinite": True})
    assert math.isnan(summary.values()["final_loss"])


def test_a_run_that_was_made_longer_has_its_new_total() -> None:
    summary = Summary()
    summary.add({"kind": "start", "total_steps": 20})
    summary.add({"kind": "event", "event": "resumed", "step": 8, "total_steps": 30})
    assert summary.values()["total_steps"] == 30


def test_a_torn_last_line_is_left_out_and_a_whole_one_without_an_end_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n\xff\n[1]\n{"kind": "train", "step": 2}')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "train", "st')
    assert [line["step"] for line in read_metrics(path)] == [1]
