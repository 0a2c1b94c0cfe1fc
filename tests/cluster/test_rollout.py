"""One host trains, another draws its samples: the same run as on one host, whatever happens to the
server.

``pytest -m cluster tests/cluster/test_rollout.py``
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmx.run.rundir import RunDir
from tests.cluster.launching import LlmxRun, nothing_left, start_llmx
from tests.cluster.netns import Cluster, Host, wait_until

STEPS = 8
GRPO = (
    "task=grpo", "data.seq_len=64", "task.options.rewards=[length]", "task.options.group_size=4",
    "task.options.max_new_tokens=12", "batch.global_batch=4", "task.log_every_steps=1",
    f"task.steps={STEPS}", "optim.lr=1e-3", "checkpoint=none", "launch.transport=ssh",
)  # fmt: skip
TIMEOUT_S = 300.0


def servers_on(host: Host) -> list[int]:
    return [pid for pid, argv in host.processes().items() if "llmx.rollout.server" in argv]


def trained(run: LlmxRun) -> tuple[list[Any], str]:
    """The losses and rewards of a run, and the hash of its last weights."""
    records = run.records()
    lines = [(r["loss"], r["reward"]) for r in records if r["kind"] == "train"]
    assert len(lines) == STEPS
    return lines, records[-1]["weights_hash"]


def test_the_server_is_killed_and_the_run_is_the_same(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster()
    node_b = cluster["node-b"]
    alone = start_llmx(cluster, tmp_path, slots=(1, 0), overrides=GRPO, name="alone")
    assert alone.wait(timeout_s=TIMEOUT_S) == 0, alone.output()
    words = [*GRPO, "rollout.hosts=[node-b]", "rollout.wait_s=1"]
    run = start_llmx(cluster, tmp_path, overrides=words)
    run.until_step(2, timeout_s=TIMEOUT_S)
    assert not servers_on(cluster["node-a"])
    (server,) = servers_on(node_b)
    node_b.run(["kill", "-9", str(server)])
    assert run.wait(timeout_s=TIMEOUT_S) == 0, run.output()
    assert trained(run) == trained(alone)
    output = run.output()
    assert "1 rollout server: node-b (1)" in output
    assert "is started again (1 of 20)" in output
    assert run.records()[0]["world_size"] == 1
    measures = [r for r in run.records() if r["kind"] == "train"]
    assert measures[0]["rollout_tokens_per_s"] > 0
    nothing_left(cluster)


def test_drawing_ahead_without_a_shared_file_system(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """The supervisor is killed in the end: the servers end with it."""
    work = tmp_path / "work"
    cluster = make_cluster(private_paths=[work])
    words = [*GRPO, "launch=rsync", "rollout.hosts=[node-b]", "rollout.max_staleness=1"]
    words[words.index(f"task.steps={STEPS}")] = "task.steps=10000"
    words += [f"run_dir={work}/run", f"data.cache_dir={work}/cache"]
    run = start_llmx(cluster, tmp_path, overrides=words)
    run.dir = RunDir(work / "run")
    run.until_step(4, timeout_s=TIMEOUT_S)
    lines = [r for r in run.records() if r["kind"] == "train"]
    assert lines[0]["staleness"] == 0
    assert all(0 <= line["staleness"] <= 1 for line in lines)
    assert any(line["staleness"] > 0 for line in lines)
    assert all(abs(line["sampler_kl"]) < 0.1 for line in lines)
    log = run.path(run.dir.logs / "rollout-001.log")
    wait_until(log.exists, timeout_s=20, what="the log of the server")
    assert log.read_text().startswith("rollout server on")
    run.kill()
    nothing_left(cluster, timeout_s=60)
    wait_until(lambda: not servers_on(cluster["node-b"]), timeout_s=5, what="no server")
