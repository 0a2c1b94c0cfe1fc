"""Without a shared file system: rsync out, train, outputs back.

``pytest tests/cluster/test_launch_sync.py``
"""

from __future__ import annotations

import filecmp
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.cluster.launching import nothing_left, start_llmx
from tests.cluster.netns import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]


def test_private_disks_and_no_checkout(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    need("pdsh", "rsync")
    work, code = tmp_path / "work", tmp_path / "code"
    work.mkdir()
    code.mkdir()
    cluster = make_cluster(private_paths=[work, code], hidden={"node-b": [REPOSITORY]})
    near, far = cluster.hosts
    assert not far.path(REPOSITORY / "llmx").exists()
    # A checkout of its own, on node-a alone: what is edited meanwhile does not matter.
    for part in ("llmx", "conf", "sweeps", "launchers"):
        shutil.copytree(REPOSITORY / part, near.path(code / part))
    planted = [code / ".env", code / "llmx/.env", code / "private/rows", work / "cache/data/other"]
    for path in planted:
        near.path(path).parent.mkdir(parents=True, exist_ok=True)
        near.path(path).write_text("DB_PASS=hunter2\n")
    overrides = [
        "launch.transport=pdsh", "launch.sync=rsync", "task.steps=10", f"run_dir={work}/run",
        f"data.cache_dir={work}/cache",
    ]  # fmt: skip
    env = {"PYTHONPATH": str(code)}
    run = start_llmx(cluster, tmp_path, slots=(1, 2), overrides=overrides, env=env)
    run.dir = type(run.dir)(work / "run")
    assert run.wait(timeout_s=240) == 0, run.output()
    said = run.out.read_text()
    assert "node-b: code" in said
    sent = re.search(r"sync: node-b: (\d+) files? sent", said)
    assert sent is not None
    assert int(sent[1]) > 50

    # The code there is the code here; the ranks there wrote on their own disk only.
    modules = [path.relative_to(near.path(code)) for path in near.path(code / "llmx").rglob("*.py")]
    assert len(modules) > 50
    for module in modules:
        assert filecmp.cmp(near.path(code) / module, far.path(code) / module, shallow=False)
    for path in planted:
        assert near.path(path).exists()
        assert not far.path(path).exists(), path
    for rank in (1, 2):
        status, log = run.dir.rank_status(rank), run.dir.rank_log(rank)
        for path in (status, log):
            assert far.path(path).read_bytes() == run.path(path).read_bytes(), path
    assert not far.path(run.dir.rank_log(0)).exists()
    assert run.result()["outcome"] == "ok"
    assert len([r for r in run.records() if r["kind"] == "train"]) >= 2
    nothing_left(cluster, timeout_s=5)

    # A second run sends only its own run directory, and notices a damaged file.
    victim = far.path(code / "llmx/run/rundir.py")
    victim.write_text("broken = True\n")
    stale = far.path(code / "llmx/stale.py")
    stale.write_text("removed here, still there\n")
    more = [*overrides[:3], f"run_dir={work}/again"]
    again = start_llmx(cluster, tmp_path, slots=(1, 2), overrides=more, env=env)
    again.dir = type(again.dir)(work / "again")
    assert again.wait(timeout_s=240) == 0, again.output()
    sent = re.search(r"sync: node-b: (\d+) files? sent", again.out.read_text())
    assert sent is not None
    assert int(sent[1]) < 20
    assert filecmp.cmp(near.path(code / "llmx/run/rundir.py"), victim, shallow=False)
    assert not stale.exists()


def test_rank_0_on_the_far_host(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    """The model and the metrics are written there and come back here, live and at the end."""
    need("pdsh", "rsync")
    work = tmp_path / "work"
    work.mkdir()
    cluster = make_cluster(hosts=["node-a", "node-b"], private_paths=[work])
    far = cluster["node-b"]
    overrides = [
        "launch.transport=pdsh", "launch.sync=rsync", "task.steps=10", f"run_dir={work}/run",
        f"data.cache_dir={work}/cache",
    ]  # fmt: skip
    run = start_llmx(cluster, tmp_path, slots=(1, 1), overrides=overrides, reverse=True)
    run.dir = type(run.dir)(work / "run")
    assert run.wait(timeout_s=240) == 0, run.output()
    assert far.path(run.dir.final_model).is_dir()
    for path in far.path(run.dir.final_model).iterdir():
        assert filecmp.cmp(path, run.path(run.dir.final_model) / path.name, shallow=False)
    assert far.path(run.dir.metrics).read_bytes() == run.path(run.dir.metrics).read_bytes()
    assert run.result()["model"] == str(run.dir.final_model)
    nothing_left(cluster, timeout_s=5)
