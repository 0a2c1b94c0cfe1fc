"""Runs that are supervised on the cluster, and wait for each other.

``pytest -m cluster tests/cluster/test_detached.py``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from llmx.run.rundir import RunDir, read_mapping
from tests.cluster.launching import REPOSITORY, SMALL, hardware_of
from tests.cluster.netns import Cluster, wait_until


def test_a_supervisor_on_the_cluster_and_a_run_that_waits_for_it(
    make_cluster: Callable[..., Cluster], need: Callable[..., None], tmp_path: Path
) -> None:
    """The first host is a laptop: it sees neither the disk nor the checkout of the others."""
    need("pdsh", "rsync")
    work = tmp_path / "work"
    work.mkdir()
    cluster = make_cluster(private_paths=[work], hidden={"node-b": [REPOSITORY]})
    laptop, far = cluster.hosts
    conf = tmp_path / "conf" / "hardware"
    conf.mkdir(parents=True)
    (conf / "far.yaml").write_text(yaml.safe_dump(hardware_of(cluster, (0, 1))))
    run = RunDir(work / "one")

    def llmx(*words: str, **options: Any) -> Any:
        options = {"env": {"PYTHONPATH": str(REPOSITORY)}, "cwd": str(tmp_path), **options}
        return laptop.run([sys.executable, "-m", "llmx", *words], check=False, **options)

    start = [*SMALL, "hardware=far", f"--config-dir={conf.parent}", "launch=rsync"]
    started = llmx(*start, f"run_dir={run.root}", "task.steps=100000", "launch.supervisor=first")
    assert started.returncode == 0, started.stdout + started.stderr
    assert f"python -m llmx attach node-b:{run.root} --ssh-config" in started.stdout
    assert [path.name for path in laptop.path(run.root).iterdir()] == ["ssh_config"]
    there = RunDir(far.path(run.root))
    wait_until(lambda: there.metrics.exists(), timeout_s=120, what="its metrics")

    # The same words from here, once more: it waits for the first one.
    (tmp_path / "queue").write_text(
        f"{' '.join(start)} run_dir={work}/two task.steps=3 \nhelp launch.queue"
    )
    out = tmp_path / "out"
    with out.open("w") as stream:
        words = [sys.executable, "-m", "llmx", "queue", "queue"]
        waiting = laptop.popen(
            words, cwd=str(tmp_path), env={"PYTHONPATH": str(REPOSITORY)},
            stdout=stream, stderr=stream,
        )  # fmt: skip
    text = f"waiting for its turn (launch.queue=true): node-b: is busy with 1 rank of {run.root}"
    wait_until(lambda: text in out.read_text(), timeout_s=60, what=text)
    location = [f"node-b:{run.root}", "--ssh-config", str(run.ssh_config)]
    stopped = llmx("stop", *location)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert read_mapping(there.result)["outcome"] == "interrupted"
    assert waiting.wait(timeout=120) == 0, out.read_text()
    *_, first, second = out.read_text().splitlines()
    assert first.startswith("1  ok "), out.read_text()
    assert second.startswith("2  ok "), out.read_text()
    assert (laptop.path(work / "two") / "model").is_dir()
