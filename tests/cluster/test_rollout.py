"""One host trains, others draw its samples, ahead of it. What of it must not change a bit, whatever
happens to the servers, is tried by ``pytest -m chaos``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.launching import nothing_left, start_llmx
from tests.cluster.netns import Cluster, Host, wait_until

GRPO = (
    "task=grpo", "data.seq_len=64", "task.options.rewards=[length]", "task.options.group_size=4",
    "task.options.max_new_tokens=12", "batch.global_batch=4", "task.log_every_steps=1",
    "task.steps=10000", "optim.lr=1e-3", "checkpoint=none",
)  # fmt: skip
TIMEOUT_S = 300.0


def servers_on(host: Host) -> list[int]:
    return [pid for pid, argv in host.processes().items() if "llmx.rollout.server" in argv]


def test_drawing_ahead_without_a_shared_file_system(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """A rollout host is lost, and comes back with an empty disk; meanwhile a server on another one
    dies. The supervisor is killed in the end: the servers end with it."""
    work = tmp_path / "work"
    cluster = make_cluster(hosts=3, private_paths=[work])
    node_b, node_c = cluster["node-b"], cluster["node-c"]
    words = [*GRPO, "launch=rsync", "rollout.hosts=[node-b,node-c]", "rollout.max_staleness=1"]
    words += [f"run_dir={work}/run", f"data.cache_dir={work}/cache"]
    run = start_llmx(cluster, tmp_path, slots=(1, 1, 1), overrides=words)
    run.until_step(4, timeout_s=TIMEOUT_S)
    lines = [r for r in run.records() if r["kind"] == "train"]
    assert run.records()[0]["world_size"] == 1
    assert lines[0]["staleness"] == 0
    assert all(0 <= line["staleness"] <= 1 for line in lines)
    assert any(line["staleness"] > 0 for line in lines)
    assert all(abs(line["sampler_kl"]) < 0.1 for line in lines)
    log = run.path(run.dir.logs / "rollout-001.log")
    wait_until(log.exists, timeout_s=20, what="the log of the server")
    assert log.read_text().startswith("rollout server on")
    assert "2 rollout servers: node-b (1), node-c (1)" in run.output()
    node_b.kill(silent=False)
    broke = "rollout host node-b: the connection broke"
    wait_until(lambda: broke in run.output(), timeout_s=TIMEOUT_S, what="the loss of node-b")
    (before,) = servers_on(node_c)
    node_c.run(["kill", "-9", str(before)])
    wait_until(
        lambda: servers_on(node_c) not in ([], [before]), timeout_s=TIMEOUT_S, what="a new server"
    )
    assert "is started again (1 of 20)" in run.output()
    ssh_log = run.path(run.dir.logs / "agent-node-b.log")
    wait_until(
        lambda: "ssh: connect to host" in ssh_log.read_text(), timeout_s=TIMEOUT_S, what="a try"
    )
    node_b.boot()
    # Not only that it runs: it must be left alone until it answers.
    wait_until(
        lambda: re.search(r"rollout server node-b:\d+ answers again", run.output()),
        timeout_s=TIMEOUT_S,
        what="a server on the empty host",
    )
    run.kill()
    nothing_left(cluster, timeout_s=60)
    wait_until(lambda: not servers_on(node_c), timeout_s=5, what="no server")


def test_vllm_draws(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """In an environment of its own (``LLMX_VLLM_PYTHON``), which the host that trains lacks."""
    if not (python := os.environ.get("LLMX_VLLM_PYTHON")):
        pytest.skip("LLMX_VLLM_PYTHON does not name the Python of an environment with vLLM")
    cluster = make_cluster()
    words = [*GRPO, "task.steps=8", "rollout.hosts=[node-b]", f"rollout.vllm_python={python}"]
    words += ["model.config.hidden_size=64", "model.config.num_attention_heads=1"]
    words += ["model.config.num_key_value_heads=1", "rollout.wait_s=60", "precision=fp32"]
    run = start_llmx(cluster, tmp_path, overrides=words)
    assert run.wait(timeout_s=1000) == 0, run.output()
    assert ": cpu, vLLM " in run.output()
    assert "the ranks draw" not in run.output()
    lines = [record for record in run.records() if record["kind"] == "train"]
    assert len({line["loss"] for line in lines}) > 1
    assert all(abs(line["sampler_kl"]) < 1e-4 for line in lines)
    assert all(line["importance_truncated"] == 0 for line in lines)
    nothing_left(cluster)
