"""Processes that another program starts: one of several never trains a model of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmx import external as external_start
from llmx.cli.main import main
from llmx.config import HardwareConfig
from llmx.errors import ConfigError
from llmx.external import Meeting, complete_place
from llmx.hardware import external
from llmx.hardware.external import PLACES, Processes, hardware_of_processes, refuse_several
from llmx.launch.environment import TOKEN
from llmx.run.rundir import RunDir
from llmx.run.snapshot import run_id, run_token


def test_one_of_several_processes_is_refused() -> None:
    for rank, world in PLACES:
        with pytest.raises(ConfigError, match=f"{rank}=1 {world}=4: .* started 4 of these"):
            refuse_several({rank: "1", world: "4"})
    # A batch script of Slurm is one process, whatever the job's tasks are.
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    one = {"RANK": "0", "WORLD_SIZE": "1"}
    for environ in ({}, one, {"WORLD_SIZE": "4"}, job, {**job, "SLURM_STEP_NUM_TASKS": "1"}):
        refuse_several(environ)
        with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
            refuse_several({**environ, "RANK": "0", "WORLD_SIZE": "2"})


def test_commands_that_start_ranks_are_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in (["task.steps=3"], ["resume", "x"], ["sweep", "x"], ["tune"]):
        assert main(command) == 2
        assert "RANK=1 WORLD_SIZE=2" in capsys.readouterr().err


def test_the_place_of_a_process_is_read_from_its_starter() -> None:
    for environ, local_rank in (
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "PMI_RANK": "0"}, "1"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "0"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, "1"),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}, "1"),
    ):
        with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT not set"):
            complete_place(dict(environ))
        environ |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
        complete_place(environ)
        place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": local_rank}
        assert place.items() <= environ.items()


def hosts_of(
    monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int]
) -> list[tuple[str, int, str]]:
    """The hosts of processes with these host names and local ranks."""
    facts: list[dict[str, Any]] = [
        {"host": host, "local_rank": local_rank, "gpu": None} for host, local_rank in places
    ]
    never: Any = None  # nothing is started
    monkeypatch.setattr(external, "STARTED", [Processes(facts, never)])
    hardware = hardware_of_processes(HardwareConfig(), environ={"MASTER_ADDR": "10.0.0.1"})
    assert hardware.master_addr == "10.0.0.1"
    return [(host.name, host.slots, host.device) for host in hardware.hosts]


def test_hosts_are_those_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no other program started this process"):
        hardware_of_processes(HardwareConfig(), environ={})
    hosts = hosts_of(monkeypatch, ("node-b", 0), ("node-b", 1), ("node-a", 0))
    assert hosts == [("node-b", 2, "cpu"), ("node-a", 1, "cpu")]
    # Not in blocks; two machines of one name.
    with pytest.raises(ConfigError, match="rank 2 is on node-a, and so are earlier ranks"):
        hosts_of(monkeypatch, ("node-a", 0), ("node-b", 0), ("node-a", 1))
    with pytest.raises(ConfigError, match="rank 1 on trainer has LOCAL_RANK=0, expected 1"):
        hosts_of(monkeypatch, ("trainer", 0), ("trainer", 0))


def test_the_token_of_the_run_is_not_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who reaches the port may read it."""
    run, stored = RunDir(tmp_path), {}

    class Read(Meeting):
        def close(self) -> None:
            stored.update(self.get("run", timeout_s=1))
            super().close()

    def start(words: list[str]) -> int:
        environment = {TOKEN: run_token(run), "OMP_NUM_THREADS": "1"}
        external_start.STARTED[-1].release(str(run.root), environment)
        return 0

    monkeypatch.setattr(external_start, "Meeting", Read)
    monkeypatch.setattr(external_start, "STARTED", [])
    monkeypatch.setattr(external_start, "_run", start)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert external_start.main([]) == 0
    assert stored["run_id"] == run_id(run)
    assert stored["env"] == {"OMP_NUM_THREADS": "1"}
    assert run_token(run) not in json.dumps(stored)
