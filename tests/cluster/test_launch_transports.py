"""Every transport starts the planned ranks on the planned hosts, and ends clean.

``pytest tests/cluster/test_launch_transports.py``
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.launching import LlmxRun, nothing_left, rank_pids, start_llmx
from tests.cluster.netns import Cluster
from tests.cluster.slurm import start_slurm

SECRET = "hf_thisMustNeverBeWrittenAnywhere0123"


def check_good(run: LlmxRun, cluster: Cluster, hosts: list[str]) -> None:
    """The run ended well, each rank where the plan has it, and nothing is left."""
    assert run.wait(timeout_s=180) == 0, run.output()
    result = run.result()
    assert result["outcome"] == "ok"
    assert result["steps"] == 10
    assert result["final_loss"] < 6.5
    assert Path(result["model"]).is_dir()
    for rank, host in enumerate(hosts):
        status = json.loads(run.path(run.dir.rank_status(rank)).read_text())
        assert (status["host"], status["state"]) == (host, "finished")
        assert run.path(run.dir.rank_log(rank)).is_file()
    nothing_left(cluster, timeout_s=5)


@pytest.mark.parametrize("transport", ["pdsh", "openmpi"])
def test_unequal_slots(
    transport: str, cluster: Cluster, tmp_path: Path, need: Callable[..., None]
) -> None:
    need(transport)
    secrets = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "MY_SECRET": SECRET}
    overrides = [f"launch.transport={transport}", "task.steps=10", "zero=stage2"]
    run = start_llmx(cluster, tmp_path, slots=(2, 1), overrides=overrides, env=secrets)
    run.until_step(1)
    for host in cluster.hosts:
        for pid, argv in host.processes().items():
            assert SECRET not in " ".join(argv)
            environ = host.path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            if "RANK=" in environ:
                assert SECRET not in environ
    check_good(run, cluster, ["node-a", "node-a", "node-b"])
    for path in run.dir.root.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_interfaces_are_found(cluster: Cluster, tmp_path: Path, need: Callable[..., None]) -> None:
    need("pdsh")
    overrides = ["launch.transport=pdsh", "task.steps=10"]
    run = start_llmx(cluster, tmp_path, overrides=overrides, interface=None)
    check_good(run, cluster, ["node-a", "node-b"])
    assert "GLOO_SOCKET_IFNAME=lan0\n" in run.dir.ds_env.read_text()


def test_interfaces_that_differ(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    need("pdsh")
    cluster = make_cluster()
    for change in (["down"], ["name", "ib7"], ["up"]):
        device = "lan0" if change[-1] != "up" else "ib7"
        cluster["node-b"].run(["ip", "link", "set", device, *change])
    overrides = ["launch.transport=pdsh", "task.steps=10"]
    run = start_llmx(cluster, tmp_path, overrides=overrides, interface=None)
    check_good(run, cluster, ["node-a", "node-b"])
    assert "LLMX_INTERFACES=lan0,ib7\n" in run.dir.ds_env.read_text()


def test_values_arrive_as_they_are(
    cluster: Cluster, tmp_path: Path, need: Callable[..., None]
) -> None:
    """Spaces, quotes, dollars and per cents go through pdsh and two shells unchanged."""
    need("pdsh")
    value = "two words $HOME `id` \"quoted\" 'single' 50%n back\\slash;&|"
    overrides = ["launch.transport=pdsh", "task.steps=100000"]
    run = start_llmx(cluster, tmp_path, overrides=overrides, rank_env={"ODD": value})
    run.until_step(1)
    seen = set()
    for host in cluster.hosts:
        for pid in rank_pids(host):
            environ = host.path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            assert f"ODD={value}" in environ
            seen.add(host.name)
    assert seen == {"node-a", "node-b"}
    run.signal(15)
    assert run.wait(timeout_s=60) == 130, run.output()
    nothing_left(cluster, timeout_s=5)


def test_slurm_keeps_the_order_of_the_plan(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    """Slurm sorts its nodes by name; rank 0 must be on the first host of the plan all the same."""
    need("slurm")
    cluster = make_cluster(hosts=["node-b", "node-a"])
    start_slurm(cluster)
    overrides = ["launch.transport=slurm", "task.steps=10"]
    run = start_llmx(cluster, tmp_path, slots=(2, 2), overrides=overrides)
    check_good(run, cluster, ["node-b", "node-b", "node-a", "node-a"])
