"""Processes that another program starts: one of several never trains a model of its own.

``pytest tests/unit/test_launch_external.py``
"""

from __future__ import annotations

import pytest

from llmx.cli.main import main
from llmx.errors import ConfigError
from llmx.launch.external import PLACES, refuse_several


@pytest.mark.parametrize(("rank", "world"), PLACES)
def test_one_of_several_processes_is_refused(rank: str, world: str) -> None:
    with pytest.raises(ConfigError, match=f"{rank}=1 {world}=4: .* started 4 of these processes"):
        refuse_several({rank: "1", world: "4"})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        # A batch script of Slurm is one process, whatever the job's tasks are.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_single_process_is_not_refused(environ: dict[str, str]) -> None:
    refuse_several(environ)


@pytest.mark.parametrize("command", [["task.steps=3"], ["resume", "x"], ["sweep", "x"], ["tune"]])
def test_commands_that_start_ranks_are_refused_before_anything_else(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 2
    assert "RANK=1 WORLD_SIZE=2" in capsys.readouterr().err
