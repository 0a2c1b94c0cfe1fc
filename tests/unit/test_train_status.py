"""Status files and metrics lines as docs/development/contracts.md has them."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.errors import ConfigError, DataError
from llmx.failures.diagnose import Failure, diagnose
from llmx.run.rundir import RunDir, read_json
from llmx.train import status as status_module
from llmx.train.metrics import MetricsWriter
from llmx.train.status import RankStatus, category, describe
from llmx.train.stopping import NonFiniteLoss


def on_disk(run_dir: RunDir, rank: int = 0) -> dict[str, Any]:
    return read_json(run_dir.rank_status(rank))


def test_status_file_has_the_keys_of_the_contract_from_the_first_moment(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    before = time.time()
    RankStatus(run_dir, rank=7)
    found = on_disk(run_dir, 7)
    assert run_dir.rank_status(7).name == "rank-007.json"
    assert before <= found.pop("time") <= time.time()
    assert found.pop("host")
    assert found == {
        "rank": 7,
        "pid": os.getpid(),
        "state": "starting",
        "step": 0,
        "saved_step": None,
        "error": None,
    }


def test_states_reach_the_disk_at_once_and_a_final_one_is_never_left(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    status = RankStatus(run_dir, rank=0)
    for state in ("loading", "training", "saving", "finished"):
        status.at_step(3)
        status.enter(state)
        assert on_disk(run_dir)["state"] == status.state == state
    assert on_disk(run_dir)["step"] == 3
    status.enter("interrupted")
    status.fail(RuntimeError("too late"))
    assert on_disk(run_dir)["state"] == "finished"
    assert on_disk(run_dir)["error"] is None


def test_failure_is_written_with_type_message_traceback_and_category(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    status = RankStatus(run_dir, rank=0)
    try:
        raise ConfigError("data.seq_len=9 is over 8")
    except ConfigError as error:
        status.fail(error)
    found = on_disk(run_dir)
    assert found["state"] == "failed"
    error = found["error"]
    assert error["type"] == "ConfigError"
    assert error["message"] == "data.seq_len=9 is over 8"
    assert error["category"] == "config"
    assert "test_train_status.py" in error["traceback"]
    assert set(error) == {"type", "message", "traceback", "category", "step", "time"}


def test_heartbeat_brings_the_step_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "HEARTBEAT_S", 0.01)
    run_dir = RunDir(tmp_path)
    status = RankStatus(run_dir, rank=0)
    written = on_disk(run_dir)["time"]
    status.start_heartbeat()
    status.at_step(41)
    deadline = time.monotonic() + 20
    while on_disk(run_dir)["step"] != 41:
        assert time.monotonic() < deadline, "the heartbeat wrote nothing"
    assert on_disk(run_dir)["time"] > written
    status.stop_heartbeat()
    assert not [t for t in threading.enumerate() if t.name == "heartbeat" and t.is_alive()]


def test_a_disk_that_takes_no_status_ends_no_rank_that_has_work_to_do(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    status = RankStatus(run_dir, rank=0)
    run_dir.ranks.rename(tmp_path / "away")
    run_dir.ranks.touch()
    status.enter("saving")
    assert status.state == "saving"
    with pytest.raises(OSError, match="rank"):
        status.enter("finished")
    status = RankStatus(RunDir(tmp_path / "other"), rank=0)
    (tmp_path / "other/ranks").rename(tmp_path / "other/away")
    (tmp_path / "other/ranks").touch()
    status.fail(RuntimeError("the reason, which the log has"))
    assert status.state == "failed"


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"), "oom"),
        (NonFiniteLoss("The loss of step 3 is nan", step=3), "nan"),
        (DataError("row 4 of a.jsonl has no messages"), "data"),
        (ConfigError("zero.stage=4 is not 0..3"), "config"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (_caused(DataError("The disk is full."), OSError(errno.ENOSPC, "No space")), "disk_full"),
        (_caused(DataError("Row 4 is wrong."), ValueError("a")), "data"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk_full"),
        (torch.distributed.DistBackendError("NCCL error"), "comm"),
        (torch.distributed.DistNetworkError("The client socket has timed out"), "comm"),
        (
            RuntimeError("[../third_party/gloo/transport/tcp/pair.cc] Connection closed by peer"),
            "comm",
        ),
        (RuntimeError("Timed out after 60 seconds waiting for clients"), "comm"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "config"),
        (KeyError("x"), "crash"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "config"),
    ],
)
def test_outcomes(error: BaseException, wanted: str) -> None:
    """The type of an error says it, or the catalogue of failures finds it in what is written."""
    assert category(error) in ("", wanted)
    values = describe(error)
    failure = Failure(values["type"], values["message"], values["traceback"], values["category"])
    assert diagnose(failure).outcome == wanted


def test_what_is_synced_are_the_lines_and_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has replaced the file: after a power cut the old one must not be back."""
    path, synced = tmp_path / "metrics.jsonl", []
    writer = MetricsWriter(path, enabled=True)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    writer.sync()
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]


def test_metrics_are_one_json_object_a_line_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, enabled=True)
    writer.write("start", total_steps=3)
    writer.write("train", step=1, loss=float("nan"), grad_norm=float("inf"), lr=1e-3, mfu=None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "train"]
    assert all(line.pop("time") > 0 for line in lines)
    assert lines[0] == {"kind": "start", "total_steps": 3}
    assert lines[1] == {
        "kind": "train",
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lr": 1e-3,
        "mfu": None,
        "nonfinite": True,
    }
    writer.close()
    again = MetricsWriter(path, enabled=True)
    again.write("end", step=3)
    again.close()
    assert len(path.read_text().splitlines()) == 3


def test_only_rank_0_writes_metrics(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", enabled=False)
    writer.write("start", total_steps=3)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_nothing_is_collected_while_stacks_are_taken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before Python 3.12 a collection within this call may wait for a lock that the call holds."""
    collects = []
    current_frames = sys._current_frames

    def frames() -> Any:
        collects.append(gc.isenabled())
        return current_frames()

    monkeypatch.setattr(sys, "_current_frames", frames)
    status_module.write_stacks()
    assert collects == [False]
    assert gc.isenabled()
    assert "test_nothing_is_collected_while_stacks_are_taken" in capfd.readouterr().err
