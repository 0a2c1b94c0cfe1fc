"""Runs that are left on the cluster without a terminal, and wait for each other."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from llmx.run.rundir import RunDir, read_mapping
from tests.cluster.launching import REPOSITORY, SMALL, hardware_of
from tests.cluster.netns import Cluster, wait_until


def test_a_run_that_is_left_on_the_cluster_and_one_that_waits_for_it(
    make_cluster: Callable[..., Cluster], need: Callable[..., None], tmp_path: Path
) -> None:
    """The first host is a laptop, which does not see the disk of the other one."""
    need("rsync")
    work = tmp_path / "work"
    work.mkdir()
    cluster = make_cluster(private_paths=[work])
    laptop, far = cluster.hosts
    conf = tmp_path / "conf" / "hardware"
    conf.mkdir(parents=True)
    (conf / "far.yaml").write_text(yaml.safe_dump(hardware_of(cluster, (0, 1))))
    run = RunDir(work / "one")
    llmx = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "llmx"]
    start = [*llmx, *SMALL, "hardware=far", f"--config-dir={conf.parent}"]
    words = [*start, f"run_dir={run.root}", "task.steps=100000", "launch.detach=true"]
    ssh = ["ssh", "-F", str(cluster.ssh_config), "node-b"]
    started = laptop.run([*ssh, shlex.join(words)], check=False)
    assert started.returncode == 0, started.stdout + started.stderr
    there = RunDir(far.path(run.root))
    wait_until(lambda: there.metrics.exists(), timeout_s=120, what="its metrics")

    # The same words from here, once more: it waits for the first one.
    out = tmp_path / "out"
    words = [*start, f"run_dir={work}/two", "task.steps=3", "launch=rsync", "launch.queue=true"]
    with out.open("w") as stream:
        waiting = laptop.popen(words, cwd=str(tmp_path), stdout=stream, stderr=stream)
    text = f"waiting for its turn (launch.queue=true): node-b: is busy with 1 rank of {run.root}"
    wait_until(lambda: text in out.read_text(), timeout_s=60, what=text)
    location = [f"node-b:{run.root}", "--ssh-config", str(cluster.ssh_config)]
    stopped = laptop.run([*llmx, "stop", *location], check=False)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert read_mapping(there.result)["outcome"] == "interrupted"
    assert waiting.wait(timeout=120) == 0, out.read_text()
    assert (laptop.path(work / "two") / "model").is_dir()
