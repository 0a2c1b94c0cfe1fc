"""What Slurm says of an allocation, and the hosts that follow from it.

``pytest tests/unit/test_hardware_slurm.py``. ``tests/cluster/test_launch_stop.py`` has a real one.
"""

from __future__ import annotations

import os

import pytest

from llmx.config import HardwareConfig
from llmx.errors import ConfigError
from llmx.hardware.slurm import Allocation, hardware_of_allocation, parse_allocation

ALLOCATION = """\
JobId=12 JobName=interactive
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   StartTime=2026-11-25T21:18:08 EndTime=2026-11-25T22:18:08 Deadline=N/A
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=gpu[01-03]
   NumNodes=3 NumCPUs=96 NumTasks=12 CPUs/Task=8 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:a100:10
     Nodes=gpu[01-02] CPU_IDs=0-31 Mem=0 GRES=gpu:a100:4(IDX:0-3)
     Nodes=gpu03 CPU_IDs=0-31 Mem=0 GRES=gpu:a100:2(IDX:0-1),shard:0
   Command=(null)
"""


def test_scontrol_is_read() -> None:
    allocation = parse_allocation("12", ALLOCATION)
    assert dict(allocation.gpus) == {"gpu[01-02]": 4, "gpu03": 2}
    assert (allocation.state, allocation.user_id, allocation.tasks) == ("RUNNING", 1000, 12)
    unlimited = parse_allocation("12", ALLOCATION.replace("2026-11-25T22:18:08", "Unknown"))
    assert allocation.ends_at is not None
    assert unlimited.ends_at is None


@pytest.mark.parametrize(
    ("state", "user_id", "words"),
    [
        ("RUNNING", os.getuid(), ""),
        ("RUNNING", os.getuid() + 1, "of another user"),
        ("PENDING", os.getuid(), "still waits for its nodes"),
        ("COMPLETED", os.getuid(), "has ended (its state is COMPLETED)"),
        ("UNKNOWN", None, "has ended (Slurm does not know it any more)"),
    ],
)
def test_an_allocation_that_cannot_be_used_is_named(
    state: str, user_id: int | None, words: str
) -> None:
    problem = Allocation("12", state, user_id=user_id).problem()
    assert words in problem
    assert bool(problem) == bool(words)


def test_outside_an_allocation_the_request_is_planned() -> None:
    with pytest.raises(ConfigError, match="not set: nodes, device"):
        hardware_of_allocation(HardwareConfig(kind="slurm", slots=4), environ={})
    hardware = HardwareConfig(kind="slurm", nodes=2, slots=4, device="a100_80g")
    hosts = hardware_of_allocation(hardware, environ={}).hosts
    assert [(host.name, host.slots, host.device) for host in hosts] == [
        ("node-1", 4, "a100_80g"),
        ("node-2", 4, "a100_80g"),
    ]
