"""A run that was killed, asked to end or found its checkpoint damaged goes on bit for bit as if
nothing had happened: every logged number, and the hash of the weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.checkpoint.selection import list_steps, verify
from llmx.run.rundir import RunDir, read_json, write_json
from tests.checkpoint_saves import flip_bit
from tests.data_rows import CHATML, write_rows
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
from tests.small_tokenizers import byte_tokenizer

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
    found = measurements(run)
    assert found == measurements(reference)
    assert found[-1]["weights_hash"]


def test_an_undisturbed_run_saves_what_it_should(undisturbed: dict[str, RunDir]) -> None:
    for made in undisturbed.values():
        assert_planned_sizes(made)
    run = undisturbed["stage2-fp32"]
    steps = list(range(EVERY, STEPS + 1, EVERY))
    assert [event["step"] for event in events(run, "saved")] == steps
    assert list_steps(run.checkpoints) == steps[-2:]
    assert all(not verify(run.checkpoint(step)) for step in steps[-2:])
    assert (run.checkpoints / "latest").read_text() == f"{run.checkpoint(STEPS).name}\n"
    state = read_json(run.checkpoint(STEPS) / "state.json")
    last = measurements(run)[-1]
    assert (state["step"], state["weights_hash"]) == (STEPS, last["weights_hash"])
    trained = lines_of(run, "train")[-1]
    assert state["tokens_seen"] == trained["tokens"]
    assert state["samples"] == trained["samples"] > state["num_samples"]
    assert state["metric"] == {"name": "eval/loss", "value": lines_of(run, "eval")[-1]["loss"]}
    files = {path.name for path in (run.checkpoint(STEPS) / "model").iterdir()}
    assert files >= {"config.json", "tokenizer_config.json"}
    assert read_json(run.rank_status(1))["saved_step"] == STEPS
    assert not list(run.checkpoints.glob(".*"))


def lines_of(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [line for line in measurements(run) if line["kind"] == kind]


def edit_config(run: RunDir, **groups: Any) -> None:
    """By hand, as between two starts."""
    config = yaml.safe_load(run.config.read_text())
    for name, values in groups.items():
        config[name] = {**config[name], **values} if isinstance(values, dict) else values
    run.config.write_text(yaml.safe_dump(config))


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
    flip_bit(victim, -1)
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
        "kind": "event", "event": "resumed", "time": 0, "step": before, "attempt": 3,
        "world_size": 2, "total_steps": STEPS,
        "metrics": {},  # the task of these runs measures nothing beside the loss
    }  # fmt: skip


def test_what_may_not_be_resumed_and_what_is_skipped(ranks: Server, tmp_path: Path) -> None:
    """A short run is made longer; some steps of it are passed over; another seed is refused."""
    early = {"task": {"stop_at_step": 10}, "checkpoint": {"every_steps": None, "at_end": True}}
    run = saving_run(tmp_path / "run", **early)
    ranks.start(run).finish()
    lines = measurements(run)
    assert [lines[-2]["step"], lines[-1]] == [10, {"kind": "end", "step": 10} | lines[-1]]
    assert lines[-2]["extra"] is True
    assert list_steps(run.checkpoints) == [10]

    edit_config(run, seed=5)
    refused = ranks.start(run)
    assert refused.wait() == [1, 1]
    error = refused.status(1)["error"]
    assert (error["type"], error["category"]) == ("ConfigError", "config")
    assert "seed is 0 in the checkpoint and 5 in this run" in error["message"]

    edit_config(run, seed=0, task={"stop_at_step": 16})
    write_json(run.resume, {"step": 10, "skip_steps": [12, 13], "attempt": 2})
    ranks.start(run).finish()
    steps = [line["step"] for line in lines_of(run, "train")]
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


def test_a_template_writes_the_day_on_which_the_run_began(ranks: Server, tmp_path: Path) -> None:
    """A resume, here years later with an empty cache, prepares the same data."""
    jinja = (
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    byte_tokenizer(*CHATML, chat_template=jinja).save_pretrained(tmp_path / "tokenizer")
    chats = ({"prompt": f"q{i}", "response": f"a{i}"} for i in range(64))
    rows = write_rows(tmp_path / "rows.jsonl", chats)
    run = saving_run(
        tmp_path / "run",
        model={"tokenizer": str(tmp_path / "tokenizer")},
        data={"path": str(rows), "template": "auto", "eval_samples": 0},
        task={"steps": 2 * EVERY, "eval_every_steps": 0},
    )
    write_json(run.inputs, {"date": "2020-01-02"})
    ranks.start(run).finish()
    (store,) = (tmp_path / "cache" / "data").glob("*/meta.json")
    assert read_json(store)["identity"]["date"] == "2020-01-02"
    undisturbed = measurements(run)
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(run.checkpoint(2 * EVERY))
    ranks.start(run).finish()
    assert [event["step"] for event in events(run, "resumed")] == [EVERY]
    assert measurements(run) == undisturbed
    assert read_json(run.inputs)["date"] == "2020-01-02"


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
    assert [line["step"] for line in lines_of(run, "eval")] == [0]
    ranks.start(run, ranks=1).finish()
    assert_same_run(run, reference)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[RunDir]:
    """A run whose checkpoints have room for two and a half."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    run = saving_run(tmp_path / "run", checkpoint={"at_end": True})
    run.checkpoints.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "llmx-test", str(run.checkpoints)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    yield run
    subprocess.run(["umount", str(run.checkpoints)], check=True)


def test_a_full_disk_is_survived_until_the_end(
    small_disk: RunDir, ranks: Server, undisturbed: dict[str, RunDir]
) -> None:
    run = small_disk
    first = ranks.start(run)
    assert first.wait() == [1, 1]
    assert [event["step"] for event in events(run, "saved")] == [EVERY, 2 * EVERY]
    failed = events(run, "save_failed")
    assert [event["step"] for event in failed] == [3 * EVERY, 4 * EVERY, STEPS]
    assert all("No space left on device" in event["reason"] for event in failed)
    assert list_steps(run.checkpoints) == [EVERY, 2 * EVERY]
    assert all(not verify(run.checkpoint(step)) for step in (EVERY, 2 * EVERY))
    assert not list(run.checkpoints.glob(".step-*")), "what was begun gives its room back"
    for rank in range(2):
        error = first.status(rank)["error"]
        assert error["category"] == "disk_full"
        assert "writable, then resume with `python -m llmx resume RUN`" in error["message"]
    assert f"WARNING: the checkpoint of step {3 * EVERY} was not saved" in logs(run)

    subprocess.run(["mount", "-o", "remount,size=60m", str(run.checkpoints)], check=True)
    ranks.start(run).finish()
    assert_same_run(run, undisturbed["stage2-fp32"])
    assert list_steps(run.checkpoints) == [4 * EVERY, STEPS]


def test_hosts_without_a_shared_file_system(
    ranks: Server, undisturbed: dict[str, RunDir], tmp_path: Path
) -> None:
    """Each rank has a run directory of its own, as on two hosts with a disk each; both are killed
    in the middle of a training."""
    runs = [saving_run(tmp_path / name / "run") for name in ("a", "b")]
    first = ranks.start(*runs)
    first.until(lambda: has_saved(runs[0], 2 * EVERY))
    for rank in range(2):
        first.signal(rank, signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL] * 2
    with runs[0].metrics.open("a") as stream:
        stream.write('{"kind": "train", "step": 9')  # torn, as a power cut leaves it
    assert max(list_steps(runs[0].checkpoints)) < STEPS, "killed too late to prove anything"
    newest = max(set(list_steps(runs[0].checkpoints)) & set(list_steps(runs[1].checkpoints)))
    names = [sorted(path.name for path in run.checkpoint(newest).glob("rank-*")) for run in runs]
    assert names == [["rank-00000.safetensors"], ["rank-00001.safetensors"]]
    texts = {(run.checkpoint(newest) / "manifest.json").read_text() for run in runs}
    assert len(texts) == 1

    # One host loses its newest checkpoint: nobody takes it any more.
    newest = max(list_steps(runs[1].checkpoints))
    shutil.rmtree(runs[1].checkpoint(newest))
    second = ranks.start(*runs)
    second.until(lambda: events(runs[0], "resumed"))
    assert events(runs[0], "resumed")[0]["step"] < newest
    assert events(runs[0], "damaged")[0]["checkpoint"] == newest
    second.finish()
    assert_same_run(runs[0], undisturbed["stage2-fp32"])
    assert [run.checkpoint(STEPS).is_dir() for run in runs] == [True, True]

    # At another ZeRO stage every rank needs every part: what a host lacks is brought to it.
    for run in runs:
        edit_config(run, zero={"stage": 0})
        shutil.rmtree(run.checkpoint(STEPS))
        text = run.ds_config.read_text().replace('"stage": 2', '"stage": 0')
        run.ds_config.write_text(text)
    ranks.start(*runs).finish()
    last, wanted = measurements(runs[0])[-2:], measurements(undisturbed["stage2-fp32"])[-2:]
    assert last[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)
    before = STEPS - EVERY
    for run in runs:
        assert len(list(run.checkpoint(before).glob("rank-*"))) == 2
        assert not verify(run.checkpoint(before)), "complete now"


def test_a_copy_that_does_not_fit_and_a_loss_that_jumps(ranks: Server, tmp_path: Path) -> None:
    run = saving_run(
        tmp_path / "run",
        ranks=1,
        checkpoint={"every_steps": 4, "background": "never", "keep": {"best": 1, "every": 12}},
        optim={"lr": 3.0, "warmup_steps": 12},
        task={"log_every_steps": 1, "eval_every_steps": 4, "spike_factor": 1.5, "steps": 30},
    )
    first = ranks.start(run, ranks=1)
    assert first.wait() == [1]
    error = first.status(0)["error"]
    assert (error["category"], error["type"]) == ("nan", "LossSpike")
    assert measurements(run)[-1]["step"] == error["step"]
    saved = events(run, "saved")
    assert saved
    assert all(event["background_s"] == 0 < event["stall_s"] for event in saved)
    losses = {line["step"]: line["loss"] for line in lines_of(run, "eval")}
    steps = list_steps(run.checkpoints)
    best = min((loss, -step) for step, loss in losses.items() if step)[1]
    assert (run.checkpoints / "best").read_text() == f"{run.checkpoint(-best).name}\n"
    assert -best in steps
