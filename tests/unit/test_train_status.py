"""Status files as docs/development/contracts.md has them."""

from __future__ import annotations

import errno
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.errors import ConfigError, DataError
from llmx.failures.diagnose import diagnose
from llmx.run.rundir import RunDir, read_json
from llmx.train import status as status_module
from llmx.train.status import RankStatus, category, describe
from llmx.train.stopping import NonFiniteLoss


class Status(RankStatus):
    """Of a rank of this directory."""

    def __init__(self, place: Path, rank: int = 0) -> None:
        self.run = RunDir(place)
        super().__init__(self.run, rank=rank)

    def on_disk(self, rank: int = 0) -> dict[str, Any]:
        return read_json(self.run.rank_status(rank))

    def cannot_write(self) -> None:
        self.run.ranks.rename(self.run.root / "away")
        self.run.ranks.touch()


def test_status_file_has_the_keys_of_the_contract_from_the_first_moment(tmp_path: Path) -> None:
    before = time.time()
    status = Status(tmp_path, rank=7)
    found = status.on_disk(7)
    assert status.run.rank_status(7).name == "rank-007.json"
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
    status = Status(tmp_path)
    for state in ("loading", "training", "saving", "finished"):
        status.at_step(3)
        status.enter(state)
        assert status.on_disk()["state"] == status.state == state
    assert status.on_disk()["step"] == 3
    status.enter("interrupted")
    status.fail(RuntimeError("too late"))
    assert status.on_disk()["state"] == "finished"
    assert status.on_disk()["error"] is None


def test_failure_is_written_with_type_message_traceback_and_category(tmp_path: Path) -> None:
    status = Status(tmp_path)
    try:
        raise ConfigError("data.seq_len=9 is over 8")
    except ConfigError as error:
        status.fail(error)
    assert status.on_disk()["state"] == "failed"
    found = status.on_disk()["error"]
    assert found["type"] == "ConfigError"
    assert found["message"] == "data.seq_len=9 is over 8"
    assert found["category"] == "config"
    assert Path(__file__).name in found["traceback"]
    assert set(found) == {"type", "message", "traceback", "category", "step", "time"}


def test_heartbeat_brings_the_step_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "HEARTBEAT_S", 0.01)
    status = Status(tmp_path)
    written = status.on_disk()["time"]
    status.start_heartbeat()
    status.at_step(41)
    deadline = time.monotonic() + 20
    while status.on_disk()["step"] != 41:
        assert time.monotonic() < deadline, "the heartbeat wrote nothing"
    assert status.on_disk()["time"] > written
    status.stop_heartbeat()
    assert status._thread is not None
    status._thread.join(20)
    assert not status._thread.is_alive()


def test_a_disk_that_takes_no_status_ends_no_rank_that_has_work_to_do(tmp_path: Path) -> None:
    busy, failing = Status(tmp_path / "busy"), Status(tmp_path / "failing")
    busy.cannot_write()
    busy.enter("saving")
    assert busy.state == "saving"
    with pytest.raises(OSError, match="rank"):
        busy.enter("finished")
    failing.cannot_write()
    failing.fail(RuntimeError("the reason, which the log has"))
    assert failing.state == "failed"


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (MemoryError(), "oom"),
        (NonFiniteLoss("The loss of step 3 is nan", step=3), "nan"),
        (DataError("row 4 of a.jsonl has no messages"), "data"),
        (ConfigError("zero.stage=4 is not 0..3"), "config"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (OSError(errno.EROFS, "Read-only file system", "/runs/x/metrics.jsonl"), "disk_full"),
        (OSError(errno.EROFS, "Read-only file system", "/.cache/huggingface"), "config"),
        (OSError(errno.EROFS, "Read-only file system", "/runs/xy/vocab.json"), "config"),
        (OSError(errno.EIO, "Input/output error"), "disk_full"),
        (OSError(errno.ESTALE, "Stale file handle", "/data/train.jsonl"), "disk_full"),
        (_caused(DataError("The disk is full."), OSError(errno.ENOSPC, "No space")), "disk_full"),
        (_caused(DataError("Row 4 is wrong."), ValueError("a")), "data"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk_full"),
        (torch.distributed.DistBackendError("NCCL error"), "comm"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), "comm"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "config"),
        (KeyError("x"), "crash"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "config"),
    ],
)
def test_outcomes(error: BaseException, wanted: str) -> None:
    """The type of an error says it, or the catalogue of failures finds it in what is written."""
    assert category(error, Path("/runs/x")) in ("", wanted)
    values = describe(error, Path("/runs/x"))
    values["error_type"] = values.pop("type")
    names = ("error_type", "message", "traceback", "category")
    assert diagnose(**{name: values[name] for name in names}).kind == wanted


def test_nothing_is_collected_while_stacks_are_taken(monkeypatch, capfd) -> None:
    """Before Python 3.12 a collection within this call may wait for a lock that the call holds."""
    collects, current_frames = [], sys._current_frames

    def frames() -> Any:
        collects.append(gc.isenabled())
        return current_frames()

    monkeypatch.setattr(sys, "_current_frames", frames)
    status_module.write_stacks()
    assert collects == [False]
    assert gc.isenabled()
    assert "test_nothing_is_collected_while_stacks_are_taken" in capfd.readouterr().err
