"""Where a rank finds its place, whoever started it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmx import worker
from llmx.errors import ConfigError
from llmx.plan import make_plan
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json
from tests.rundirs import experiment, rank_environment

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def two_hosts(tmp_path: Path) -> Plan:
    """Two ranks on the first host, one on the second."""
    hosts = [
        {"name": "one", "slots": 2, "device": "cpu"},
        {"name": "two", "slots": 1, "device": "cpu"},
    ]
    return make_plan(experiment(tmp_path, hardware={"hosts": hosts}, launch={"transport": "pdsh"}))


@pytest.mark.parametrize(
    "given",
    [
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"},
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
    ],
)
def test_the_place_comes_from_the_transport(given: dict[str, str]) -> None:
    environment = {**given, **MASTER}
    worker.complete_environment(environment)
    assert [environment[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "4", "1"]


def test_what_the_launcher_set_wins_over_the_transport() -> None:
    """deepspeed inside a Slurm allocation: SLURM_PROCID there is the launcher's own."""
    environment = {
        **MASTER,
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
    }
    before = dict(environment)
    worker.complete_environment(environment)
    assert environment == before


def test_a_process_that_is_no_rank_says_so() -> None:
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        worker.complete_environment({})
    with pytest.raises(ConfigError, match="^MASTER_PORT not set.*python -m llmx"):
        worker.complete_environment(
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}
        )


def test_the_number_of_ranks_must_be_the_planned_one(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path)
    for rank in range(3):
        worker.check_place(plan, {"RANK": str(rank), "WORLD_SIZE": "3"})
    for rank, world in ((0, 1), (0, 4), (3, 3), (-1, 3)):
        with pytest.raises(ConfigError, match=f"rank {rank} of {world}, the plan has 3"):
            worker.check_place(plan, {"RANK": str(rank), "WORLD_SIZE": str(world)})


def test_each_host_takes_its_own_interface(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for rank, wanted in ((0, "eth0"), (1, "eth0"), (2, "ib0")):
        environment = {"RANK": str(rank), "LLMX_INTERFACES": "eth0,ib0"}
        worker.choose_interface(plan, environment)
        assert [environment[name] for name in names] == [wanted, wanted]
    environment = {"RANK": "2", "LLMX_INTERFACES": "eth0,ib0", "GLOO_SOCKET_IFNAME": "mine"}
    worker.choose_interface(plan, environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "mine"
    for absent in ("", "eth0", "eth0,"):
        environment = {"RANK": "2", "LLMX_INTERFACES": absent}
        worker.choose_interface(plan, environment)
        assert not set(names) & set(environment)


@pytest.mark.parametrize(
    ("gpus", "rank", "visible"),
    [
        ("2,3:GPU-a1", 0, "2,3"),
        ("2,3:GPU-a1", 2, "GPU-a1"),
        ("MIG-a,MIG-b:0", 1, "MIG-b"),  # CUDA shows a process one slice
        ("", 0, None),  # a scheduler chooses
    ],
)
def test_the_gpus_of_this_host(gpus: str, rank: int, visible: str | None, tmp_path: Path) -> None:
    plan = dataclasses.replace(two_hosts(tmp_path), accelerator="cuda")
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "LLMX_GPUS": gpus}
    worker.choose_gpus(plan, environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, "16"),
        ({"LLMX_RANKS_PER_HOST": "8"}, "4"),
        ({"LLMX_RANKS_PER_HOST": "many"}, "16"),
        ({"OMP_NUM_THREADS": "3"}, "3"),
        ({"SLURM_CPUS_PER_TASK": "6"}, "6"),
    ],
)
def test_threads_are_the_share_of_the_cores_of_this_host(
    environment: dict[str, str], threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(32)))
    environment["LOCAL_SIZE"] = "2"
    worker.choose_threads(experiment(tmp_path), two_hosts(tmp_path), environment)
    assert environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("torch", "environment", "values"),
    [
        ("2.13.0+cu130", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("2.8.0", {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("2.13.0", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {}),
        ("2.13.0", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {}),
    ],
)
def test_segments_of_the_allocator_are_expandable(
    torch: str, environment: dict[str, str], values: dict[str, str], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: torch)
    plan = two_hosts(tmp_path)
    given = dict(environment)
    worker.choose_allocator(plan, environment)
    assert environment == given, "nothing on CPUs"
    worker.choose_allocator(dataclasses.replace(plan, accelerator="cuda"), environment)
    assert environment == given | values


def start(run_dir: Path, *code: str, **environment: str) -> subprocess.Popen[str]:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **MASTER, **environment}
    return subprocess.Popen(
        [sys.executable, *code, str(run_dir)],
        env=rank_environment(**place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_failed_start_is_in_the_status_file_and_the_log(tmp_path: Path) -> None:
    """No config.yaml: the rank says what it missed, in its own log, and exits with 1."""
    process = start(tmp_path, "-m", "llmx.worker")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert printed == ""
    run_dir = RunDir(tmp_path)
    found = read_json(run_dir.rank_status(0))
    assert (found["state"], found["pid"]) == ("failed", process.pid)
    assert found["error"]["type"] == "FileNotFoundError"
    assert "config.yaml" in found["error"]["message"]
    assert "Traceback" in run_dir.rank_log(0).read_text()


SIT = """
import os, sys, threading
from pathlib import Path
from llmx import worker
from llmx.run.rundir import RunDir
from llmx.train.status import RankStatus

run_dir = RunDir(Path(sys.argv[1]))
worker.redirect_output(run_dir, rank=0)
status = RankStatus(run_dir, rank=0)
worker.handle_signals(status)
os.write(1, b"written by C\\n")
status.enter("training")
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.mark.parametrize(("number", "disk"), [(signal.SIGTERM, "good"), (signal.SIGINT, "bad")])
def test_a_signal_ends_a_rank_wherever_it_sits(
    tmp_path: Path, number: signal.Signals, disk: str
) -> None:
    process = start(tmp_path, "-c", SIT)
    run_dir = RunDir(tmp_path)
    deadline = time.monotonic() + 60
    while not run_dir.rank_status(0).is_file() or (
        read_json(run_dir.rank_status(0))["state"] != "training"
    ):
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
    if disk == "bad":
        run_dir.ranks.rename(tmp_path / "away")
        run_dir.ranks.touch()  # nothing can be written there
    os.kill(process.pid, number)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    if disk == "good":
        assert read_json(run_dir.rank_status(0))["state"] == "interrupted"
    assert "written by C" in run_dir.rank_log(0).read_text()
    assert process.stdout is not None
    process.stdout.close()


def test_stacks_of_a_rank_whose_interpreter_is_held(tmp_path: Path) -> None:
    """No thread of its own can write them: faulthandler does, on SIGQUIT."""
    held = SIT.replace('os.write(1, b"written by C\\n")', "")
    held = f"import ctypes\n{held}".replace(
        "lock = threading.Lock()",
        "libc = ctypes.PyDLL(None)\nlibc.puts(b'held')\nlibc.fflush(None)\nlibc.sleep(600)",
    )
    process = start(tmp_path, "-c", held)
    log = RunDir(tmp_path).rank_log(0)
    for number, text in ((0, "held"), (signal.SIGQUIT, "most recent call first")):
        os.kill(process.pid, number)
        deadline = time.monotonic() + 60
        while not (log.is_file() and text in log.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
    process.kill()
    process.communicate()


SPIN = """
def spin():
    os.write(1, b"working")
    while True:
        pass
spin()
"""
READ = """
import ctypes
def read_forever():
    libc, pipe, buffer = ctypes.CDLL(None), os.pipe()[0], ctypes.create_string_buffer(1)
    os.write(1, b"working")
    # As a collective waits: the lock is given away, and a signal does not end the call.
    libc.read(pipe, buffer, 1)
read_forever()
"""


@pytest.mark.parametrize(
    ("work", "innermost"), [(SPIN, "spin"), (READ, "read_forever")], ids=["Python", "C"]
)
def test_stacks_of_a_rank_that_is_asked(work: str, innermost: str, tmp_path: Path) -> None:
    """Also where the main thread runs no Python, and twice. Its stack ends where it was."""
    process = start(tmp_path, "-c", SIT.partition("lock =")[0] + work)
    log = RunDir(tmp_path).rank_log(0)

    def until(text: str, count: int) -> None:
        deadline = time.monotonic() + 60
        while not log.is_file() or log.read_text().count(text) < count:
            assert process.poll() is None
            assert time.monotonic() < deadline, log.read_text()

    until("working", 1)
    for times in (1, 2):
        os.kill(process.pid, signal.SIGUSR2)
        until(f" in {innermost}\n", times)
    process.kill()
    process.communicate()
    stacks = log.read_text().split("(most recent call first):\n")
    first = next(stack for stack in stacks if f" in {innermost}\n" in stack)
    assert re.match(rf".* in {innermost}\n.* in <module>\n\n", first), log.read_text()


def test_the_worker_starts_without_torch_or_hydra() -> None:
    code = (
        "import sys, llmx.worker; "
        "print([m for m in ('torch', 'deepspeed', 'hydra', 'omegaconf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
