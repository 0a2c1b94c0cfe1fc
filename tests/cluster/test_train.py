"""The main job on a real cluster: one training, however its ranks are started and sharded.

A run of one process gives the curve and the model; every transport, ZeRO stage and split of the
same global batch must give them again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmx.run.rundir import read_json
from tests.cluster.launching import (
    SMALL,
    LlmxRun,
    nothing_left,
    rank_pids,
    start_llmx,
    start_program,
)
from tests.cluster.netns import Cluster, wait_until
from tests.cluster.slurm import start_slurm

Make = Callable[..., Cluster]
Need = Callable[..., None]
STEPS = 8
CURVE = (f"task.steps={STEPS}", "task.log_every_steps=1", "optim.lr=1e-3")
TIMEOUT_S = 240.0
SECRET = "hf_thisMustNeverBeWrittenAnywhere0123"
ODD = "two words $HOME `id` \"quoted\" 'single' 50%n back\\slash;&|"
"""Must go through pdsh and two shells unchanged."""


@dataclass(frozen=True)
class Trained:
    """What a run leaves that must not depend on where it ran."""

    losses: list[float]
    grad_norms: list[float]
    model: Path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """The same training in one process."""
    with Cluster(hosts=1) as single:
        run = start_llmx(single, tmp_path_factory.mktemp("alone"), slots=[1], overrides=CURVE)
        yield _trained(run)


@pytest.mark.parametrize(
    ("transport", "zero", "slots"),
    [("pdsh", "stage3", (2, 1)), ("openmpi", "stage2", (1, 2)), ("slurm", "stage3", (2, 2))],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_one_training(
    transport: str,
    zero: str,
    slots: tuple[int, ...],
    alone: Trained,
    make_cluster: Make,
    need: Need,
    tmp_path: Path,
) -> None:
    """The ranks are where the plan has them, with the environment they were given, no secret in
    it; what they train is what one process trains."""
    need(transport)
    # Slurm sorts its nodes by name; rank 0 must be on the first host of the plan all the same.
    cluster = make_cluster(hosts=["node-c", "node-b", "node-a"][-len(slots) :])
    if transport == "slurm":
        start_slurm(cluster)
    how = [f"launch.transport={transport}", f"zero={zero}"]
    secrets = dict.fromkeys(("HF_TOKEN", "MY_SECRET", "WANDB_API_KEY"), SECRET)
    odd = {"ODD": ODD} if transport == "pdsh" else {}
    run = start_llmx(
        cluster, tmp_path, slots=slots, overrides=[*CURVE, *how], env=secrets, rank_env=odd
    )
    _check_processes(run, cluster, slots, odd)
    trained = _trained(run)
    pairs = zip(cluster.hosts, slots, strict=True)
    expected = [host.name for host, count in pairs for _ in range(count)]
    statuses = [read_json(run.dir.rank_status(rank)) for rank in range(sum(slots))]
    assert [status["host"] for status in statuses] == expected
    assert {status["state"] for status in statuses} == {"finished"}
    for path in run.dir.root.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert run.records()[0]["world_size"] == sum(slots)
    # AdamW in fp32: near-zero gradients differ in their last bits with the order of a sum.
    assert trained.losses == pytest.approx(alone.losses, abs=2e-4)
    assert trained.grad_norms == pytest.approx(alone.grad_norms, rel=2e-3)
    _assert_same_model(trained.model, alone.model)
    nothing_left(cluster)


def _check_processes(
    run: LlmxRun, cluster: Cluster, slots: tuple[int, ...], wanted: dict[str, str]
) -> None:
    """While the ranks start: each host has its share, and nobody can read a secret of them."""

    def all_there() -> bool:
        assert run.process.poll() is None, run.output()
        return tuple(len(rank_pids(host)) for host in cluster.hosts) == slots

    wait_until(all_there, timeout_s=TIMEOUT_S, what="every rank is started")
    for host in cluster.hosts:
        ranks = rank_pids(host)
        for pid, argv in host.processes().items():
            assert SECRET not in " ".join(argv)
            environ = host.path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            if pid in ranks:
                assert SECRET not in environ
                values = environ.split("\0")
                assert all(f"{name}={value}" in values for name, value in wanted.items())


def test_hosts_that_differ(alone: Trained, make_cluster: Make, tmp_path: Path) -> None:
    """The ranks of one host run in a container, by another Python, where the directories of the
    launching machine have another path. Each host resolves its own name to a loopback address, as
    Debian sets it up: gloo would offer 127.0.1.1 to the others, and they would hang. The way to the
    other host goes through another interface on each, found by the agents."""
    cluster = make_cluster(loopback_names=True)
    for host in cluster.hosts:
        assert host.run(["getent", "ahostsv4", host.name]).stdout.startswith("127.0.1.1 ")
    for change in (["down"], ["name", "ib7"], ["up"]):
        device = "lan0" if change[-1] != "up" else "ib7"
        cluster["node-b"].run(["ip", "link", "set", device, *change])
    far, inside = cluster["node-b"], tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "python-b").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python-b").chmod(0o755)
    (tmp_path / "setup.sh").write_text("echo welcome\nexport FROM_SETUP='two $words'\n")
    mount = f"mount --bind {tmp_path} {inside} && exec sleep infinity"
    container = far.popen(["unshare", "-m", "sh", "-c", mount])

    def container_pid() -> int:
        return next((pid for pid, argv in far.processes().items() if argv[0] == "sleep"), 0)

    pid = wait_until(container_pid, timeout_s=20, what="the container")
    keys = {
        "enter": ["nsenter", "-t", str(pid), "-m", "--"],
        "root": str(inside),
        "python": str(inside / "python-b"),
        "setup": str(inside / "setup.sh"),
        "env": {"NCCL_IB_HCA": "mlx5_1"},
    }
    run = start_llmx(cluster, tmp_path, overrides=CURVE, interface=None, by_host={"node-b": keys})
    wanted = {"NCCL_IB_HCA": "mlx5_1", "FROM_SETUP": "two $words"}
    rank = wait_until(lambda: run.process.poll() or rank_pids(far), timeout_s=60, what="a rank")
    assert isinstance(rank, list), run.output()
    assert far.processes()[rank[0]][-1] == f"{inside}/run"
    values = far.path(f"/proc/{rank[0]}/environ").read_bytes().decode().split("\0")
    assert all(f"{name}={value}" in values for name, value in wanted.items())
    assert _trained(run).losses == pytest.approx(alone.losses, abs=2e-4)
    assert "LLMX_INTERFACES=lan0,ib7\n" in run.dir.ds_env.read_text()
    assert read_json(run.dir.rank_status(1))["state"] == "finished"
    container.kill()
    container.wait()
    nothing_left(cluster, timeout_s=5)


def _trained(run: LlmxRun) -> Trained:
    """Wait for a good end; what was logged, and where the model lies as seen from here."""
    assert run.wait(timeout_s=TIMEOUT_S) == 0, run.output()
    result = run.result()
    assert result["outcome"] == "ok", run.output()
    lines = [record for record in run.records() if record["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, result["steps"] + 1))
    return Trained(
        losses=[line["loss"] for line in lines],
        grad_norms=[line["grad_norm"] for line in lines],
        model=run.path(Path(result["model"])),
    )


def _assert_same_model(one: Path, other: Path) -> None:
    from safetensors.torch import load_file
    from torch.testing import assert_close

    ours, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_close(
            value, theirs[name], atol=2e-3, rtol=1e-2, msg=lambda text, n=name: f"{n}: {text}"
        )


# --- Ranks that ``torchrun`` starts on two hosts: one run, continued by the same command ---


TORCHRUN = str(Path(sys.executable).parent / "torchrun")


@pytest.mark.nightly
def test_torchrun_starts_the_ranks(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    """A rank is killed, and the same command continues from the checkpoint. Where the run
    directory is not shared, every process says so."""
    private, run = tmp_path / "private", tmp_path / "run"
    cluster = make_cluster(hosts=2, private_paths=[private])

    def start(run_dir: Path) -> list[subprocess.Popen[bytes]]:
        processes = []
        for rank, host in enumerate(cluster.hosts):
            argv = [
                *(TORCHRUN, "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"),
                *(f"--master-addr={cluster.first.address}", "--master-port=29511", "-m", "llmx"),
                *(*SMALL, "checkpoint.every_steps=20"),
                *("task.steps=200", f"data.cache_dir={tmp_path / 'cache'}"),
                *(f"run_dir={run_dir}", "launch=external"),
            ]
            processes.append(start_program(host, argv, tmp_path / f"{rank}.out"))
        return processes

    def output() -> str:
        return "".join((tmp_path / f"{rank}.out").read_text() for rank in (0, 1))

    def codes(processes: list[subprocess.Popen[bytes]]) -> list[int]:
        return [process.wait(timeout=120) for process in processes]

    first = start(run)
    wait_until(
        lambda: list(run.glob("checkpoints/step-*/manifest.json")),
        timeout_s=120,
        what="a checkpoint",
    )
    (pid,) = rank_pids(cluster.hosts[1])
    cluster.hosts[1].run(["kill", "-KILL", str(pid)])
    assert codes(first) == [1, 1], output()
    assert read_json(run / "result.json")["outcome"] != "ok"

    assert codes(start(run)) == [0, 0], output()
    result = read_json(run / "result.json")
    assert (result["outcome"], result["steps"], result["attempts"]) == ("ok", 200, 2)
    assert "resuming" in output()

    assert codes(start(private / "run")) == [1, 1]
    assert "rank 1 on node-b cannot see this run directory" in output()
    assert "rank 1: this machine does not see the run directory" in output()
    nothing_left(cluster)
