"""A rank that gets slower while it trains, for real: the split follows, and a run that goes on from
before or after the change repeats it bit for bit.

``python -m pytest -m deepspeed tests/integration/test_train_rebalance.py``
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from llmx.plan import make_plan
from llmx.run.rundir import RunDir, read_json, write_json
from tests.forked_ranks import Server
from tests.resumed_runs import events, measurements
from tests.rundirs import experiment, write_run

pytestmark = pytest.mark.deepspeed
STEPS = 12


@pytest.mark.parametrize("stage", [1, 2])
def test_a_drift_is_corrected_and_resume_repeats_it(
    stage: int, tmp_path: Path, ranks: Server
) -> None:
    exp = experiment(
        tmp_path / "run",
        data={"seq_len": 64, "max_rows": 60, "packing": "none"},
        task={
            "kind": "tests.programs.drifting:Drifting",
            "code_path": str(Path(__file__).parent.parent.parent),
            "steps": STEPS,
        },
        zero={"stage": stage},
        batch={"global_batch": 12, "micro_batch": 12, "accumulation": None, "rebalance": True},
        checkpoint={"every_steps": 2, "keep": {"last": 10}},
    )
    run = write_run(exp, plan=make_plan(exp))
    ranks.start(run).finish()
    whole, (event, *later) = measurements(run), events(run, "rebalanced")
    assert later == []
    assert 4 < event["step"] < STEPS - 2
    sizes = event["sizes"]
    assert sum(map(sum, sizes)) == 12
    assert sum(sizes[0]) >= 2 * sum(sizes[1])
    assert stage == 1 or len(sizes[0]) == len(sizes[1])
    assert "rebalance: a step should take" in run.rank_log(0).read_text()
    assert read_json(run.plan)["balance"]["method"] == "even"
    idle = [line["idle_share"] for line in trained(run)]
    # Of the three lines that decided, and after it: a pause of the machine is in one line.
    before, after = idle[event["step"] - 3 : event["step"]], idle[event["step"] :]
    assert statistics.median(before) > max(0.15, statistics.median(after))
    assert all(len(line["backward_s"]) == len(line["update_s"]) == 2 for line in trained(run))
    # From a checkpoint after the change, then from one before it.
    for step, again in ((event["step"] // 2 * 2 + 2, []), (2, [event])):
        write_run(exp, plan=make_plan(exp))  # what the control process writes on resume
        write_json(run.root / "resume.json", {"step": step, "skip_steps": [], "attempt": 2})
        ranks.start(run).finish()
        assert measurements(run) == whole
        found = [line for line in events(run, "rebalanced") if line["step"] > step]
        assert [(one["step"], one["sizes"]) for one in found] == [
            (one["step"], one["sizes"]) for one in again
        ]
        assert len(read_json(run.balance)["changes"]) == 1


def trained(run: RunDir) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]
