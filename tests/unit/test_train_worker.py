"""Where a rank finds its place, whoever started it; and how it ends and says where it is."""

from __future__ import annotations

import dataclasses
import errno
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx import worker
from llmx.errors import ConfigError, DataError
from llmx.failures.diagnose import diagnose
from llmx.plan import make_plan
from llmx.plan.types import Plan
from llmx.rollout.server import choose_allocator
from llmx.run.rundir import RunDir, read_json
from llmx.train import status as status_module
from llmx.train.status import RankStatus, category, describe
from llmx.train.stopping import NonFiniteLoss
from tests.rundirs import experiment, rank_environment

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@functools.cache
def two_hosts(accelerator: str = "cpu") -> Plan:
    """Two ranks on the first host, one on the second."""
    hosts = [{"name": name, "slots": n, "device": "cpu"} for name, n in (("one", 2), ("two", 1))]
    launch = {"transport": "pdsh"}
    plan = make_plan(experiment(Path("run"), hardware={"hosts": hosts}, launch=launch))
    return dataclasses.replace(plan, accelerator=accelerator)


@pytest.mark.parametrize(
    "given",
    [
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
         "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"},
        # deepspeed inside a Slurm allocation: SLURM_PROCID there is the launcher's own.
        {**PLACE, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"},
    ],
)  # fmt: skip
def test_the_place_comes_from_the_launcher_else_from_the_transport(given: dict[str, str]) -> None:
    environment = {**given, **MASTER}
    worker.complete_environment(environment)
    assert environment == {**given, **MASTER, **PLACE}


def test_a_process_that_is_no_rank_says_so() -> None:
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        worker.complete_environment({})
    with pytest.raises(ConfigError, match="^MASTER_PORT not set.*python -m llmx"):
        worker.complete_environment({**PLACE, "MASTER_ADDR": "a"})


def test_the_number_of_ranks_must_be_the_planned_one() -> None:
    for rank in range(3):
        worker.check_place(two_hosts(), {"RANK": str(rank), "WORLD_SIZE": "3"})
    for rank, world in ((0, 1), (0, 4), (3, 3), (-1, 3)):
        with pytest.raises(ConfigError, match=f"rank {rank} of {world}, the plan has 3"):
            worker.check_place(two_hosts(), {"RANK": str(rank), "WORLD_SIZE": str(world)})


@pytest.mark.parametrize(
    ("rank", "given", "gloo", "nccl"),
    [
        (0, {"LLMX_INTERFACES": "eth0,ib0"}, "eth0", "eth0"),
        (2, {"LLMX_INTERFACES": "eth0,ib0"}, "ib0", "ib0"),
        (2, {"LLMX_INTERFACES": "eth0,ib0", "GLOO_SOCKET_IFNAME": "mine"}, "mine", "ib0"),
        *((2, {"LLMX_INTERFACES": absent}, None, None) for absent in ("", "eth0", "eth0,")),
    ],
)
def test_each_host_takes_its_own_interface(rank, given, gloo, nccl) -> None:
    environment = {"RANK": str(rank), **given}
    worker.choose_interface(two_hosts(), environment)
    assert environment.get("GLOO_SOCKET_IFNAME") == gloo
    assert environment.get("NCCL_SOCKET_IFNAME") == nccl


@pytest.mark.parametrize(
    ("gpus", "rank", "visible"),
    [
        ("2,3:GPU-a1", 0, "2,3"),
        ("2,3:GPU-a1", 2, "GPU-a1"),
        ("MIG-a,MIG-b:0", 1, "MIG-b"),  # CUDA shows a process one slice
        ("", 0, None),  # a scheduler chooses
    ],
)
def test_the_gpus_of_this_host(gpus, rank, visible) -> None:
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "LLMX_GPUS": gpus}
    worker.choose_gpus(two_hosts("cuda"), environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, "16"),
        ({"LLMX_RANKS_PER_HOST": "8"}, "4"),
        ({"OMP_NUM_THREADS": "3"}, "3"),
        ({"SLURM_CPUS_PER_TASK": "6"}, "6"),
    ],
)
def test_threads_are_the_share_of_the_cores_of_this_host(
    environment, threads, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(32)))
    found = {**environment, "LOCAL_SIZE": "2"}
    worker.choose_threads(experiment(tmp_path), two_hosts(), found)
    assert found["OMP_NUM_THREADS"] == threads


def test_segments_of_the_allocator_are_expandable_unless_another_was_chosen() -> None:
    chosen = ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "a:b"})
    ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for given, wanted in (({}, ours), *((one, one) for one in chosen)):
        environment = dict(given)
        choose_allocator(environment)
        assert environment == wanted


class Rank:
    """A process in the place of the only rank of a run."""

    def __init__(self, place: Path, *code: str) -> None:
        self.run = RunDir(place)
        environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **MASTER}
        self.process = subprocess.Popen(
            [sys.executable, *code, str(place)],
            env=rank_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def log(self) -> str:
        path = self.run.rank_log(0)
        return path.read_text() if path.is_file() else ""

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def test_a_failed_start_is_in_the_status_file_and_the_log(tmp_path: Path) -> None:
    """No config.yaml: the rank says what it missed, in its own log, and exits with 1."""
    rank = Rank(tmp_path, "-m", "llmx.worker")
    printed, _ = rank.process.communicate(timeout=60)
    assert (rank.process.returncode, printed) == (1, "")
    found = read_json(rank.run.rank_status(0))
    assert (found["state"], found["pid"]) == ("failed", rank.process.pid)
    assert found["error"]["type"] == "FileNotFoundError"
    assert "config.yaml" in found["error"]["message"]
    assert "Traceback" in rank.log()


BEGIN = """
import ctypes, os, sys
from pathlib import Path
from llmx import worker
from llmx.run.rundir import RunDir
from llmx.train.status import RankStatus

run_dir = RunDir(Path(sys.argv[1]))
worker.redirect_output(run_dir, rank=0)
status = RankStatus(run_dir, rank=0)
worker.handle_signals(status)
status.enter("training")
"""
HOLD = """
libc = ctypes.PyDLL(None)
libc.puts(b"held")
libc.fflush(None)
libc.sleep(600)
"""
SPIN = """
def spin():
    os.write(1, b"working")
    while True:
        pass
spin()
"""
READ = """
def read_forever():
    libc, pipe, buffer = ctypes.CDLL(None), os.pipe()[0], ctypes.create_string_buffer(1)
    os.write(1, b"working")
    while True:  # as a collective waits: the lock is given away, and SIGUSR2 does not end the call
        libc.read(pipe, buffer, 1)
read_forever()
"""


def test_stacks_of_a_rank_whose_interpreter_is_held(tmp_path: Path) -> None:
    """No thread of its own can write them: faulthandler does, on SIGQUIT."""
    rank = Rank(tmp_path, "-c", BEGIN + HOLD)
    rank.until(lambda: "held" in rank.log())
    rank.signal(signal.SIGQUIT)
    rank.until(lambda: "most recent call first" in rank.log())
    rank.process.kill()
    rank.process.communicate()


@pytest.mark.parametrize(
    ("work", "innermost", "number", "disk"),
    [(SPIN, "spin", signal.SIGTERM, "good"), (READ, "read_forever", signal.SIGINT, "bad")],
    ids=["Python", "C"],
)
def test_a_rank_shows_its_stacks_and_ends_wherever_it_sits(
    work, innermost, number, disk, tmp_path
) -> None:
    """Also where the main thread runs no Python, and twice. Its stack ends where it was."""
    rank = Rank(tmp_path, "-c", BEGIN + work)
    rank.until(lambda: "working" in rank.log())
    for times in (1, 2):
        rank.signal(signal.SIGUSR2)
        rank.until(lambda times=times: rank.log().count(f" in {innermost}\n") >= times)
    assert read_json(rank.run.rank_status(0))["state"] == "training"
    if disk == "bad":
        rank.run.ranks.rename(tmp_path / "away")
        rank.run.ranks.touch()  # nothing can be written there
    rank.signal(number)
    rank.process.communicate(timeout=20)
    assert rank.process.returncode == 128 + signal.SIGTERM
    if disk == "good":
        assert read_json(rank.run.rank_status(0))["state"] == "interrupted"
    stacks = rank.log().split("(most recent call first):\n")
    first = next(stack for stack in stacks if f" in {innermost}\n" in stack)
    assert re.match(rf".* in {innermost}\n.* in <module>\n\n", first), rank.log()


def test_the_worker_starts_without_torch_or_hydra() -> None:
    heavy = "{'torch', 'deepspeed', 'hydra', 'omegaconf'}"
    code = f"import sys, llmx.worker; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Status files as docs/development/contracts.md has them ---------------------------------------


def test_status_file_has_the_keys_of_the_contract_from_the_first_moment(tmp_path: Path) -> None:
    before, run = time.time(), RunDir(tmp_path)
    status = RankStatus(run, rank=7)
    path = run.rank_status(7)
    found = read_json(path)
    assert path.name == "rank-007.json"
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
    for state in ("loading", "training", "saving"):
        status.at_step(3)
        status.enter(state)
        assert read_json(path)["state"] == status.state == state
    assert read_json(path)["step"] == 3
    try:
        raise ConfigError("data.seq_len=9 is over 8")
    except ConfigError as error:
        status.fail(error)
    ended = RankStatus(run, rank=8)
    ended.enter("finished")
    for final in (status, ended):  # a final state is never left
        final.enter("interrupted")
        final.fail(RuntimeError("too late"))
    found = read_json(run.rank_status(8))
    assert (found["state"], found["error"]) == ("finished", None)
    assert read_json(path)["state"] == "failed"
    found = read_json(path)["error"]
    assert found["type"] == "ConfigError"
    assert found["message"] == "data.seq_len=9 is over 8"
    assert found["category"] == "config"
    assert Path(__file__).name in found["traceback"]
    assert set(found) == {"type", "message", "traceback", "category", "step", "time"}


def test_heartbeat_brings_the_step_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "HEARTBEAT_S", 0.01)
    status, path = RankStatus(RunDir(tmp_path), rank=0), RunDir(tmp_path).rank_status(0)
    written = read_json(path)["time"]
    status.start_heartbeat()
    status.at_step(41)
    deadline = time.monotonic() + 20
    while read_json(path)["step"] != 41:
        assert time.monotonic() < deadline, "the heartbeat wrote nothing"
    assert read_json(path)["time"] > written
    status.stop_heartbeat()
    assert status._thread is not None
    status._thread.join(20)
    assert not status._thread.is_alive()


def test_a_disk_that_takes_no_status_ends_no_rank_that_has_work_to_do(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    busy, failing = RankStatus(run, rank=0), RankStatus(run, rank=1)
    run.ranks.rename(run.root / "away")
    run.ranks.touch()
    busy.enter("saving")
    assert busy.state == "saving"
    with pytest.raises(OSError, match="rank"):
        busy.enter("finished")
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
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (OSError(errno.EROFS, "Read-only file system", "/runs/x/metrics.jsonl"), "disk_full"),
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
