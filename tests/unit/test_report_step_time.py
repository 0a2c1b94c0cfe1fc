"""The timeline of a step by rank: what is computing, what is waiting, who is idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmx.observe.page.run import run_page
from llmx.observe.report.run_data import RunData, load_run
from llmx.observe.report.step_time import MAX_RANKS, steps_by_rank
from llmx.observe.report.wording import events, summary_rows
from tests import tracked_run


def finished(root: Path, **last: Any) -> RunData:
    run = tracked_run.write_start(root)
    lines = tracked_run.lines()
    lines[-3].update(last)
    tracked_run.append(run, lines)
    return load_run(run.root)


TIMES = {
    "forward_s": [0.05, 0.02],
    "backward_s": [0.10, 0.16],
    "update_s": [0.03, 0.03],
    "step_time_s": 0.22,
}


def test_waiting_is_what_a_backward_pass_has_beyond_its_proportion(tmp_path: Path) -> None:
    data = finished(tmp_path, **TIMES)
    steps = steps_by_rank(data)
    assert steps is not None
    slow, fast = steps.ranks
    assert (slow.backward, slow.waits) == (pytest.approx(0.10), pytest.approx(0.0))
    assert (fast.backward, fast.waits) == (pytest.approx(0.04), pytest.approx(0.12))
    assert (slow.idle, fast.idle) == (0.0, pytest.approx(0.6))
    assert slow.rest == pytest.approx(0.04)
    assert ("idle", "30 % of the ranks' computing time, most on rank 1 (localhost): 60 %") in (
        summary_rows(data)
    )
    _, bars, table = run_page(data)["sections"]["One step by rank"]
    assert bars["bars"]["rows"][1] == ["rank 1", 20.0, 40.0, 120.0, 30.0, 10.0]
    assert table["table"]["rows"][1][5] == "120.0"
    assert table["table"]["rows"][1][-1] == "0.43"


def test_a_run_that_measured_nothing_has_no_timeline(tmp_path: Path) -> None:
    for number, values in enumerate(
        (
            {},
            {"forward_s": [0.1, 0.1]},
            {**TIMES, "update_s": [0.1]},
            {**TIMES, "forward_s": [0, 0]},
        )
    ):
        data = finished(tmp_path / str(number), **values)
        assert steps_by_rank(data) is None
        assert "One step by rank" not in run_page(data)["order"]
        assert "idle" not in dict(summary_rows(data))


def test_of_many_ranks_the_extremes_are_shown(tmp_path: Path) -> None:
    forward = [0.1 - 0.0001 * rank for rank in range(300)]
    times = {"forward_s": forward, "backward_s": [0.2] * 300, "update_s": [0.01] * 300}
    text, _, table = run_page(finished(tmp_path, **times))["sections"]["One step by rank"]
    assert f"{300 - MAX_RANKS} ranks between them are left out" in text["text"]
    ranks = [row[0] for row in table["table"]["rows"]]
    assert (ranks[0], ranks[-1], len(ranks)) == ("0", "299", MAX_RANKS)


def test_events_of_the_split_are_told(tmp_path: Path) -> None:
    run = tracked_run.write_start(tmp_path)
    event = {"kind": "event", "time": tracked_run.START_S, "step": 8}
    straggler = {"event": "straggler", "rank": 1, "host": "node-b", "factor": 2.1}
    changed = {"event": "rebalanced", "sizes": [[6, 6], [4]], "time_factor": 0.6}
    tracked_run.append(run, [{**event, **straggler}, {**event, **changed}])
    told = events(load_run(run.root))
    assert told == [
        "Rank 1 (node-b) computed 2.1 times as long as the others for its share, at step 8.",
        "Samples were redistributed after step 8 (batch.rebalance), by rank: 12, 4.",
    ]
