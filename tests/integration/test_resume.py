"""A run that was killed, asked to end or found its checkpoint damaged goes on bit for bit as if
nothing had happened: every logged number, and the hash of the weights.

``pytest -m deepspeed tests/integration/test_resume.py``
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from llmx.checkpoint.selection import list_steps, verify
from llmx.launch.supervision.hang import main_stack
from llmx.run.rundir import RunDir, read_json, write_json
from tests.forked_ranks import Server
from tests.resumed_runs import (
    EVERY,
    STEPS,
    assert_planned_sizes,
    events,
    has_saved,
    measurements,
    saving_run,
)
from tests.rundirs import logs

pytestmark = pytest.mark.deepspeed

KINDS = {
    "stage2-fp32": {"zero": {"stage": 2}, "precision": "fp32"},
    "stage3-bf16": {"zero": {"stage": 3}, "precision": "bf16"},
}


@pytest.fixture(scope="module")
def undisturbed(ranks: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """One whole run of each kind."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return {
        name: ranks.start(saving_run(directory / name, **kind)).finish()
        for name, kind in KINDS.items()
    }


def assert_same_run(run: RunDir, reference: RunDir) -> None:
    found, wanted = measurements(run), measurements(reference)
    assert [(line["kind"], line.get("step")) for line in found] == [
        (line["kind"], line.get("step")) for line in wanted
    ]
    assert found == wanted
    assert found[-1]["weights_hash"]


def test_an_undisturbed_run_saves_what_it_should(undisturbed: dict[str, RunDir]) -> None:
    run = undisturbed["stage2-fp32"]
    steps = list(range(EVERY, STEPS + 1, EVERY))
    assert [event["step"] for event in events(run, "saved")] == steps
    assert list_steps(run.checkpoints) == steps[-2:]
    assert all(not verify(run.checkpoint(step)) for step in steps[-2:])
    assert (run.checkpoints / "latest").read_text() == f"{run.checkpoint(STEPS).name}\n"
    state = read_json(run.checkpoint(STEPS) / "state.json")
    last = measurements(run)[-1]
    assert (state["step"], state["weights_hash"]) == (STEPS, last["weights_hash"])
    trained = [line for line in measurements(run) if line["kind"] == "train"][-1]
    assert state["tokens_seen"] == trained["tokens"]
    assert state["samples"] == trained["samples"] > state["num_samples"]
    evaluated = [line for line in measurements(run) if line["kind"] == "eval"][-1]
    assert state["metric"] == {"name": "eval/loss", "value": evaluated["loss"]}
    assert {path.name for path in (run.checkpoint(STEPS) / "model").iterdir()} >= {
        "config.json",
        "tokenizer_config.json",
    }
    assert read_json(run.rank_status(1))["saved_step"] == STEPS
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_checkpoint_is_as_large_as_the_plan_says(
    kind: str, undisturbed: dict[str, RunDir]
) -> None:
    assert_planned_sizes(undisturbed[kind])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_killed_rank_costs_nothing(
    kind: str, ranks: Server, undisturbed: dict[str, RunDir], tmp_path: Path
) -> None:
    run = saving_run(tmp_path / "run", **KINDS[kind])
    first = ranks.start(run)
    first.until(lambda: has_saved(run, 2 * EVERY))
    first.signal(1, signal.SIGKILL)
    first.signal(0, signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL] * 2
    with run.metrics.open("a") as stream:
        stream.write('{"kind": "train", "step": 9')  # torn, as a power cut leaves it
    saved = max(list_steps(run.checkpoints))
    assert STEPS > saved >= 2 * EVERY, "killed too late to prove anything"

    ranks.start(run).finish()
    assert_same_run(run, undisturbed[kind])
    (resumed,) = events(run, "resumed")
    assert resumed["step"] in (saved, saved + EVERY)
    assert f"resuming from step {resumed['step']} of {STEPS}" in logs(run)
    assert not list(run.checkpoints.glob(".*"))


def test_signals_save_and_a_damaged_checkpoint_is_passed_over(
    ranks: Server, undisturbed: dict[str, RunDir], tmp_path: Path
) -> None:
    run = saving_run(tmp_path / "run", **KINDS["stage2-fp32"])
    first = ranks.start(run)
    first.until(lambda: has_saved(run, EVERY))
    first.signal(1, signal.SIGUSR2)
    first.signal(1, signal.SIGUSR1)
    assert first.wait() == [143, 143], logs(run)
    statuses = [first.status(rank) for rank in range(2)]
    assert [status["state"] for status in statuses] == ["interrupted"] * 2
    stopped = statuses[0]["step"]
    assert EVERY < stopped < STEPS, "asked too late to prove anything"
    assert [status["saved_step"] for status in statuses] == [stopped] * 2
    assert events(run, "saved")[-1]["step"] == stopped
    assert read_json(run.checkpoint(stopped) / "state.json")["reason"] in ("signal", "interval")
    assert (
        f"exiting at step {stopped}, newest checkpoint: step {stopped}"
        in run.rank_log(0).read_text()
    )
    assert "Thread 0x" in run.rank_log(1).read_text(), "SIGUSR2 writes stacks"

    second = ranks.start(run)
    second.until(lambda: any(line.get("step", 0) > stopped for line in measurements(run)))
    assert [event["step"] for event in events(run, "resumed")] == [stopped]
    second.signal(0, signal.SIGTERM)
    assert second.wait() == [143, 143], logs(run)
    newest = second.status(1)["saved_step"]
    assert newest > stopped

    # One bit of the newest: it is named, left alone, and the one before it is taken.
    victim = run.checkpoint(newest) / "rank-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    write_json(run.resume, {"step": None, "skip_steps": [], "attempt": 3})
    before = sorted(list_steps(run.checkpoints))[-2]
    ranks.start(run).finish()
    assert_same_run(run, undisturbed["stage2-fp32"])
    (damaged,) = events(run, "damaged")
    assert (damaged["checkpoint"], damaged["step"]) == (newest, before)
    assert "rank-00001.safetensors: damaged" in damaged["reason"]
    assert (
        f"the checkpoint of step {newest} is damaged and is not used" in run.rank_log(0).read_text()
    )
    # Left alone, but where the run itself came by and saved that step again.
    assert victim.exists() == bool(newest % EVERY)
    assert events(run, "resumed")[-1] | {"time": 0} == {
        "kind": "event",
        "event": "resumed",
        "time": 0,
        "step": before,
        "attempt": 3,
        "world_size": 2,
        "total_steps": STEPS,
        "metrics": {},  # the task of these runs measures nothing beside the loss
    }


def test_what_may_not_be_resumed_and_what_is_skipped(ranks: Server, tmp_path: Path) -> None:
    """A short run is made longer; some steps of it are passed over; another seed is refused."""
    early = {"task": {"stop_at_step": 10}, "checkpoint": {"every_steps": None, "at_end": True}}
    run = saving_run(tmp_path / "run", **early)
    ranks.start(run).finish()
    lines = measurements(run)
    assert [lines[-2]["step"], lines[-1]] == [10, {"kind": "end", "step": 10} | lines[-1]]
    assert lines[-2]["extra"] is True
    assert list_steps(run.checkpoints) == [10]

    text = run.config.read_text()
    config = yaml.safe_load(text)
    config["seed"] = 5
    run.config.write_text(yaml.safe_dump(config))
    refused = ranks.start(run)
    assert refused.wait() == [1, 1]
    error = refused.status(1)["error"]
    assert (error["type"], error["category"]) == ("ConfigError", "config")
    assert "seed is 0 in the checkpoint and 5 in this run" in error["message"]

    config = yaml.safe_load(text)
    config["task"]["stop_at_step"] = 16
    run.config.write_text(yaml.safe_dump(config))
    write_json(run.resume, {"step": 10, "skip_steps": [12, 13], "attempt": 2})
    ranks.start(run).finish()
    steps = [line["step"] for line in measurements(run) if line["kind"] == "train"]
    assert steps == [1, 3, 6, 9, 15, 16], "12 was to be logged, and is passed over"
    assert [event["step"] for event in events(run, "skipped")] == [12, 13]
    state = read_json(run.checkpoint(16) / "state.json")
    assert (state["step"], state["samples"]) == (16, 16 * state["global_batch"])
    assert state["optimizer"]["scalars"]["step"] == 14

    write_json(run.resume, {"step": 11})
    refused = ranks.start(run)
    assert refused.wait() == [1, 1]
    assert "resume.json requests the checkpoint of step 11" in refused.status(0)["error"]["message"]
    assert json.loads(run.metrics.read_text().splitlines()[-1])["kind"] == "end", "untouched"


def test_fewer_ranks_go_on_with_the_same_samples(
    ranks: Server, undisturbed: dict[str, RunDir], tmp_path: Path
) -> None:
    """From two ranks to one, and from ZeRO stage 3 in bf16 to stage 1: the same global batch."""
    reference = undisturbed["stage3-bf16"]
    run = RunDir(tmp_path / "run")
    shutil.copytree(reference.root, run.root)
    shutil.rmtree(run.checkpoint(STEPS))
    saving_run(
        run.root,
        ranks=1,
        zero={"stage": 1},
        precision="bf16",
        data={"cache_dir": str(reference.root.parent.parent / "cache")},
        batch={"micro_batch": 8, "accumulation": 1},
    )
    ranks.start(run, ranks=1).finish()
    assert events(run, "resumed")[0]["step"] == STEPS - EVERY
    found, wanted = measurements(run), measurements(reference)
    for ours, theirs in zip(found[:-1], wanted[:-1], strict=True):
        assert ours == {
            key: pytest.approx(value, rel=2e-2) if isinstance(value, float) else value
            for key, value in theirs.items()
        }
    assert read_json(run.checkpoint(STEPS) / "state.json")["world_size"] == 1


def test_saved_by_the_clock_and_in_the_middle_of_an_evaluation(
    ranks: Server, tmp_path: Path
) -> None:
    """An evaluation does not hold up the end: it is given up, and made when the run goes on."""
    settings = {
        "task": {"steps": 4, "eval_every_steps": 2, "log_every_steps": 1},
        "data": {"eval_samples": 100},
        "batch": {"micro_batch": 1},
        "checkpoint": {"every_steps": None, "every_minutes": 1e-6},
    }
    reference = ranks.start(saving_run(tmp_path / "whole", ranks=1, **settings), ranks=1).finish()
    assert {event["reason"] for event in events(reference, "saved")} == {"time"}

    run = saving_run(tmp_path / "run", ranks=1, **settings)
    first = ranks.start(run, ranks=1)
    first.until(lambda: len(measurements(run)) == 4)  # start, evaluation, two steps
    first.until(lambda: first.status(0)["state"] == "evaluating")
    first.signal(0, signal.SIGTERM)
    assert first.wait() == [143], logs(run)
    assert first.status(0)["saved_step"] == 2
    assert [line["step"] for line in measurements(run) if line["kind"] == "eval"] == [0]
    ranks.start(run, ranks=1).finish()
    assert_same_run(run, reference)


def test_a_rank_that_is_asked_for_its_stacks_a_thousand_times_trains_on(
    ranks: Server, tmp_path: Path
) -> None:
    run = saving_run(tmp_path / "run", task={"steps": 10**6}, **KINDS["stage2-fp32"])
    training = ranks.start(run)
    training.until(lambda: has_saved(run, EVERY))
    log = run.rank_log(1)
    for _ in range(1000):
        size = log.stat().st_size
        training.signal(1, signal.SIGUSR2)
        training.until(lambda size=size: log.stat().st_size > size, timeout_s=60)
    assert "llmx/train/loop.py" in main_stack(log.read_text())
    step = training.status(1)["step"]
    training.until(lambda: training.status(1)["step"] > step)
    training.signal(1, signal.SIGTERM)
    assert training.wait() == [143, 143], logs(run)
