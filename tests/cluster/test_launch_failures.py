"""What a user is told when something is wrong, and that it is told in time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster.launching import hardware_of, nothing_left, rank_pids, start_llmx
from tests.cluster.netns import Cluster
from tests.cluster.setups import SETUPS, Setup, try_setup

Make = Callable[..., Cluster]
Need = Callable[..., None]
LONG = "task.steps=100000"
ONCE = "launch.max_restarts=0"


def test_a_small_disk_of_one_host(make_cluster: Make, tmp_path: Path, need: Need) -> None:
    """Each host has a disk of its own: half of a checkpoint must fit on it, twice."""
    need("rsync")
    cluster = make_cluster()
    runs = tmp_path / "runs"
    runs.mkdir()
    cluster["node-b"].add_disk(runs, size_mib=6)
    overrides = ["launch.transport=ssh", "launch.sync=rsync", f"run_dir={runs}/x"]
    overrides += ["model.config.hidden_size=256", "model.config.intermediate_size=1024"]
    overrides += ["model.config.num_hidden_layers=4", "checkpoint.every_steps=2"]
    env = {"LLMX_TRACES": "on", "LLMX_CACHE": str(tmp_path / "traces")}
    run = start_llmx(cluster, tmp_path, overrides=overrides, env=env)
    assert run.wait(timeout_s=120) == 2, run.output()
    said = run.out.read_text()
    assert f"config: node-b: {runs}/x has " in said
    assert "the first one is removed only when the second is complete" in said
    nothing_left(cluster, timeout_s=5)


def test_a_doctor_of_healthy_hosts(cluster: Cluster, tmp_path: Path) -> None:
    conf = tmp_path / "conf" / "hardware"
    conf.mkdir(parents=True)
    (conf / "pair.yaml").write_text(yaml.safe_dump(hardware_of(cluster, (1, 1))))
    words = ["doctor", "hardware=pair", f"--config-dir={conf.parent}", "--bandwidth"]
    done = cluster.first.run([sys.executable, "-m", "llmx", *words], cwd=str(tmp_path), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  ssh            node-a, node-b answer\n" in done.stdout
    assert "  network        lan0 (MTU 1500)\n" in done.stdout
    assert "  connections    2 of 2 work" in done.stdout
    assert "  all-reduce     2 ranks met in " in done.stdout
    assert "ith hardware.network_gbit_per_s=" in done.stdout
    assert "✓ 2 hosts in" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]
    nothing_left(cluster, timeout_s=5)


def test_hosts_that_do_not_reach_each_other(make_cluster: Make, tmp_path: Path) -> None:
    """ssh works, and so does the rendezvous; the ranks would wait for hours in a broadcast."""
    cluster = make_cluster(hosts=3)
    _, near, far = cluster.hosts

    def refused(name: str) -> str:
        how = {"slots": (0, 1, 1), "overrides": ["launch.transport=ssh"], "name": name}
        run = start_llmx(cluster, tmp_path, **how)
        assert run.wait(timeout_s=60) == 4, run.output()
        assert not rank_pids(near)
        return run.out.read_text()

    far.block_high_ports()
    text = refused("firewall")
    assert f"node-b -> node-c at {far.address} (lan0, port " in text
    assert "no connection (no answer)" in text
    assert "The port of the rendezvous is open there, this one is not." in text
    assert "allow all TCP between the hosts" in text
    far.unblock_high_ports()
    for host in (near, far):
        host.set_mtu(9000)
    text = refused("mtu")
    assert "one byte passes both ways, but 64 KiB sent there do not arrive" in text
    assert "ip link set dev lan0 mtu 1500" in text
    nothing_left(cluster, timeout_s=5)


def test_ranks_that_never_start(cluster: Cluster, tmp_path: Path) -> None:
    """A start time-out names the ranks and their hosts. One host has a Python that hangs."""
    python = tmp_path / "python-b"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *llmx.worker*) exec sleep infinity;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    run = start_llmx(
        cluster,
        tmp_path,
        overrides=["launch.start_timeout_s=1", LONG, ONCE],
        by_host={"node-b": {"python": str(python)}},
    )
    assert run.wait(timeout_s=60) == 1, run.output()
    result = run.result()
    assert "did not start within 1 s" in result["cause"]
    assert "node-b" in result["cause"]
    nothing_left(cluster, timeout_s=5)


def test_sigterm_from_outside(cluster: Cluster, tmp_path: Path) -> None:
    """A rank that somebody else ends is not called a crash."""
    run = start_llmx(cluster, tmp_path, overrides=["launch.transport=ssh", LONG])
    run.until_step(5)
    far = cluster["node-b"]
    (rank,) = rank_pids(far)
    far.run(["kill", "-TERM", str(rank)])
    assert run.wait(timeout_s=60) != 0, run.output()
    result = run.result()
    assert result["outcome"] == "interrupted", run.output()
    assert "received SIGTERM or SIGUSR1 from outside" in result["cause"]
    nothing_left(cluster, timeout_s=5)


# --- The set-ups that are refused: each before a rank starts, with the fix, in time ---


# Not in CI: those that train, need a run, wait for a time-out, or are refused by the config alone;
# and those of test_launch_failures and test_launch_stop.
ELSEWHERE = ("busy", "tunnel", "before ssh", "MPICH", "one address", "localhost beside")
ELSEWHERE += ("a firewall", "MTU 9000", "allocation that has ended")
REFUSED = [
    setup for setup in SETUPS if setup.refused and not any(w in setup.name for w in ELSEWHERE)
]


@pytest.mark.parametrize("setup", REFUSED, ids=lambda setup: setup.name)
def test_it_is_refused(setup: Setup, tmp_path: Path) -> None:
    assert try_setup(setup, tmp_path).problem == ""
