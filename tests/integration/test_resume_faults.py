"""Disks that are full, hosts that share none, training that diverges: with real ranks.

``pytest -m deepspeed tests/integration/test_resume_faults.py``
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from llmx.checkpoint.selection import list_steps, verify
from llmx.run.rundir import RunDir, write_json
from tests.forked_ranks import Server
from tests.resumed_runs import EVERY, STEPS, events, has_saved, measurements, saving_run
from tests.rundirs import logs

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def undisturbed(ranks: Server, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return ranks.start(saving_run(tmp_path_factory.mktemp("undisturbed") / "run")).finish()


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
    small_disk: RunDir, ranks: Server, undisturbed: RunDir
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
        assert "Free some space, then resume with `python -m llmx resume RUN`" in error["message"]
    assert f"WARNING: the checkpoint of step {3 * EVERY} was not saved" in logs(run)

    subprocess.run(["mount", "-o", "remount,size=60m", str(run.checkpoints)], check=True)
    ranks.start(run).finish()
    assert measurements(run) == measurements(undisturbed)
    assert list_steps(run.checkpoints) == [4 * EVERY, STEPS]


def test_hosts_without_a_shared_file_system(
    ranks: Server, undisturbed: RunDir, tmp_path: Path
) -> None:
    """Each rank has a run directory of its own, as on two hosts with a disk each."""
    runs = [saving_run(tmp_path / name / "run") for name in ("a", "b")]
    first = ranks.start(*runs)
    first.until(lambda: has_saved(runs[0], 2 * EVERY))
    for rank in range(2):
        first.signal(rank, signal.SIGKILL)
    first.wait()
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
    assert measurements(runs[0]) == measurements(undisturbed)
    assert [run.checkpoint(STEPS).is_dir() for run in runs] == [True, True]

    # At another ZeRO stage every rank needs every part: what a host lacks is brought to it.
    for run in runs:
        config = yaml.safe_load(run.config.read_text())
        config["zero"]["stage"] = 0
        run.config.write_text(yaml.safe_dump(config))
        shutil.rmtree(run.checkpoint(STEPS))
        text = run.ds_config.read_text().replace('"stage": 2', '"stage": 0')
        run.ds_config.write_text(text)
    ranks.start(*runs).finish()
    last, wanted = measurements(runs[0])[-2:], measurements(undisturbed)[-2:]
    assert last[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)
    before = STEPS - EVERY
    for run in runs:
        assert len(list(run.checkpoint(before).glob("rank-*"))) == 2
        assert not verify(run.checkpoint(before)), "complete now"


def test_divergence_names_its_step_and_saves_nothing_bad(ranks: Server, tmp_path: Path) -> None:
    run = saving_run(
        tmp_path / "run",
        ranks=1,
        # Each step multiplies the matrices by about 1e5.
        optim={"kind": "sgd", "lr": 1e3, "weight_decay": 1e2, "clip_norm": 0.0, "warmup_steps": 0},
        task={"log_every_steps": 1000, "eval_every_steps": 0},
        checkpoint={"every_steps": 1},
    )
    first = ranks.start(run, ranks=1)
    assert first.wait() == [1]
    error = first.status(0)["error"]
    assert (error["category"], error["type"]) == ("nan", "NonFiniteLoss")
    step = error["step"]
    assert 2 <= step <= 6
    assert f"of step {step} is not finite" in error["message"]
    assert all(saved < step for saved in list_steps(run.checkpoints))
    assert list_steps(run.checkpoints)

    # Again from there it is the same step; told to skip it and the next, it goes another way.
    write_json(run.resume, {"step": None, "skip_steps": [step], "attempt": 2})
    second = ranks.start(run, ranks=1)
    assert second.wait() == [1]
    assert second.status(0)["error"]["step"] > step


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
    losses = {line["step"]: line["loss"] for line in measurements(run) if line["kind"] == "eval"}
    steps = list_steps(run.checkpoints)
    best = min((loss, -step) for step, loss in losses.items() if step)[1]
    assert (run.checkpoints / "best").read_text() == f"{run.checkpoint(-best).name}\n"
    assert -best in steps
