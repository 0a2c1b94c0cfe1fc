"""Ranks of unequal speed, for real: the gradient of the even split, other counts of micro steps,
a resume that repeats the split bit for bit, speeds that are measured at the start, and a rank that
gets slower while it trains."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from llmx.plan import make_plan
from llmx.run.rundir import RunDir, read_json, write_json
from tests.command_runs import lines
from tests.forked_ranks import Server
from tests.resumed_runs import events, measurements
from tests.rundirs import EXPERT_MODELS, experiment, write_run

pytestmark = pytest.mark.deepspeed
STEPS = 4


def run_of(
    place: Path, *, stage: int, balance: str, model: dict[str, Any] | None = None, **task: Any
) -> RunDir:
    """Chats of all lengths, each in a row of its own."""
    exp = experiment(
        place,
        model=model or {},
        data={"seq_len": 64, "max_rows": 60, "packing": "none"},
        task={"steps": STEPS, **task},
        zero={"stage": stage},
        batch={"global_batch": 12, "micro_batch": 4, "accumulation": None, "balance": balance},
        checkpoint={"at_end": True},
    )
    return write_run(exp, plan=make_plan(exp))


def with_speeds(run: RunDir, *, same_steps: bool) -> RunDir:
    """As if rank 1 had been measured four times as slow."""
    speeds = [
        {"fixed_fs": 10**12, "token_fs": factor * 10**10, "square_fs": factor * 10**6}
        for factor in (1, 4)
    ]
    of = {"devices": ["cpu", "cpu"], "seq_len": 64, "precision": "fp32", "limits": [4, 4]}
    write_json(run.balance, {"format": 1, **of, "same_steps": same_steps, "speeds": speeds})
    return run


def trained(run: RunDir) -> list[dict[str, Any]]:
    return lines(run.root, "train")


def numbers(run: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in trained(run)]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_unequal_ranks_train_the_same_and_resume_bitwise(
    stage: int, tmp_path: Path, ranks: Server
) -> None:
    even = ranks.start(run_of(tmp_path / "even", stage=stage, balance="even")).finish()
    whole = with_speeds(
        run_of(tmp_path / "whole", stage=stage, balance="measured"), same_steps=stage == 3
    )
    ranks.start(whole).finish()
    for ours, theirs in zip(numbers(whole), numbers(even), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
    plan = read_json(whole.plan)
    assert plan["balance"]["pending"] is False
    sizes = plan["batch"]["sizes"]
    assert sum(map(sum, sizes)) == 12
    assert sum(sizes[0]) > 2 * sum(sizes[1])
    assert (len(sizes[0]) == len(sizes[1])) == (stage == 3)
    stopped = run_of(tmp_path / "stopped", stage=stage, balance="measured", stop_at_step=2)
    ranks.start(with_speeds(stopped, same_steps=stage == 3)).finish()
    # What the control process writes on resume does not know the speeds.
    again = run_of(tmp_path / "stopped", stage=stage, balance="measured")
    ranks.start(again).finish()
    assert numbers(again) == numbers(whole)
    for line in trained(whole):
        assert ("idle_share" in line) == (stage < 3)
        assert stage == 3 or (0 <= line["idle_share"] < 1 and len(line["forward_s"]) == 2)
    # Where forward passes wait, each rank's own speed is looked at, seldom.
    assert ["probe_s" in line for line in trained(whole)] == [stage == 3, False, False, False]
    ends = [lines(run.root, "end")[-1]["weights_hash"] for run in (again, whole)]
    assert ends[0] == ends[1]


def test_ranks_measure_themselves(tmp_path: Path, ranks: Server) -> None:
    run = run_of(tmp_path / "run", stage=0, balance="measured")
    log = ranks.start(run).finish().rank_log(0).read_text()
    assert "balance: measured in" in log
    assert " tokens/s, " in log.split("balance: ")[-1].splitlines()[0]
    speeds = read_json(run.balance)["speeds"]
    # Alike, on one host; a millisecond to a minute for a row of 64 tokens.
    assert speeds[0] == speeds[1]
    assert 10**12 < speeds[0]["token_fs"] * 64 + speeds[0]["fixed_fs"] < 6 * 10**16


def test_ranks_without_room_for_the_whole_model_multiply_matrices(
    tmp_path: Path, ranks: Server
) -> None:
    run = run_of(
        tmp_path / "run",
        stage=3,
        balance="measured",
        kind="tests.programs.no_room:NoRoom",
        code_path=str(Path(__file__).parent.parent.parent),
    )
    log = ranks.start(run).finish().rank_log(0).read_text()
    assert "balance: measured by matrix products (the whole model with its gradients" in log
    speeds = read_json(run.balance)["speeds"]
    assert speeds[0] == speeds[1]
    assert 10**11 < speeds[0]["token_fs"] * 64 < 10**16
    assert len(numbers(run)) == STEPS


def test_experts_are_measured_at_zero_3(tmp_path: Path, ranks: Server) -> None:
    """DeepSpeed hands over the gradients of experts from a hook that every backward pass calls:
    measured with it, the run failed at its first step."""
    MixtralConfig(vocab_size=1024, **EXPERT_MODELS["mixtral"]).save_pretrained(tmp_path / "model")
    model = {"kind": "hf", "path": str(tmp_path / "model"), "config": {}}
    run = run_of(tmp_path / "run", stage=3, balance="measured", model=model)
    log = ranks.start(run).finish().rank_log(0).read_text()
    assert "balance: measured in" in log
    assert len(numbers(run)) == STEPS


DRIFTING = 12
"""Steps of a run in which a rank gets slower."""


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_drift_is_corrected_and_resume_repeats_it(
    stage: int, tmp_path: Path, ranks: Server
) -> None:
    exp = experiment(
        tmp_path / "run",
        data={"seq_len": 64, "max_rows": 60, "packing": "none"},
        task={
            "kind": "tests.programs.drifting:Drifting",
            "code_path": str(Path(__file__).parent.parent.parent),
            "steps": DRIFTING,
        },
        zero={"stage": stage},
        batch={"global_batch": 12, "micro_batch": 12, "accumulation": None, "rebalance": True},
        checkpoint={"every_steps": 2, "keep": {"last": 10}},
    )
    run = write_run(exp, plan=make_plan(exp))
    ranks.start(run).finish()
    whole, (event, *later) = measurements(run), events(run, "rebalanced")
    assert later == []
    assert 4 < event["step"] < DRIFTING - 2
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
