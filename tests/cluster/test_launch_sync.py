"""Without a shared file system: code and data out, train, outputs back."""

from __future__ import annotations

import filecmp
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from llmx.config import experiment_from_dict
from llmx.data import SampleStore
from llmx.tasks import prepare, tokenizer_of
from tests.cluster.launching import REPOSITORY, LlmxRun, nothing_left, start_llmx
from tests.cluster.netns import Cluster
from tests.published_configs import published_model

DOCUMENTS = 1200
SIZES = (
    "model.config.num_hidden_layers=2", "model.config.hidden_size=32",
    "model.config.intermediate_size=48", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
)  # fmt: skip
"""Those of the published model, which the demo has otherwise."""
WORDS = "the red map lies in a small garden behind Anna and Ben went to the museum ü 春".split()


def test_private_disks_and_no_checkout(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    """The directory of the model is on the first host, too: all build it from the snapshot."""
    need("rsync")
    work, code = tmp_path / "work", tmp_path / "code"
    work.mkdir()
    code.mkdir()
    model = published_model(tmp_path / "published", "llama3.1")
    cluster = make_cluster(private_paths=[work, code], hidden={"node-b": [REPOSITORY, model]})
    near, far = cluster.hosts
    assert not far.path(REPOSITORY / "llmx").exists()
    assert not far.path(model / "config.json").exists()
    # A checkout of its own, on node-a alone: what is edited meanwhile does not matter.
    for part in ("llmx", "conf", "sweeps", "launchers"):
        shutil.copytree(REPOSITORY / part, near.path(code / part))
    planted = [code / ".env", code / "llmx/.env", code / "private/rows", work / "cache/data/other"]
    for path in planted:
        near.path(path).parent.mkdir(parents=True, exist_ok=True)
        near.path(path).write_text("DB_PASS=hunter2\n")
    source = tmp_path / "corpus.jsonl"
    write_documents(source)
    overrides = [
        "launch.transport=ssh", "launch.sync=rsync", "task.steps=10", f"run_dir={work}/run",
        f"data.cache_dir={work}/cache", "data=text", f"data.path={source}", "data.seq_len=128",
        "data.max_rows=null", "task=pretrain", "task.epochs=null", "zero=stage3", "model=hf",
        f"model.path={model}", "model.config.rope_theta=1e4", *SIZES,
    ]  # fmt: skip
    env = {"PYTHONPATH": str(code)}
    run = start_llmx(cluster, tmp_path, slots=(1, 2), overrides=overrides, env=env)
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
    check_stores(run, cluster, work, source)
    rope = json.loads((run.path(run.dir.final_model) / "config.json").read_text())[
        "rope_parameters"
    ]
    assert (rope["rope_theta"], rope["rope_type"]) == (1e4, "llama3")
    nothing_left(cluster, timeout_s=5)

    # A second run sends only its own run directory, and notices a damaged file. Its rank 0 is on
    # the far host, so all that it writes comes back here.
    victim = far.path(code / "llmx/run/rundir.py")
    victim.write_text("broken = True\n")
    stale = far.path(code / "llmx/stale.py")
    stale.write_text("removed here, still there\n")
    more = [*overrides, f"run_dir={work}/again", "batch.balance=measured"]
    again = start_llmx(cluster, tmp_path, slots=(1, 1), overrides=more, env=env, reverse=True)
    assert again.wait(timeout_s=240) == 0, again.output()
    sent = re.search(r"sync: node-b: (\d+) files? sent", again.out.read_text())
    assert sent is not None
    assert int(sent[1]) < 20
    assert filecmp.cmp(near.path(code / "llmx/run/rundir.py"), victim, shallow=False)
    assert not stale.exists()
    assert far.path(again.dir.final_model).is_dir()
    for path in far.path(again.dir.final_model).iterdir():
        assert filecmp.cmp(path, again.path(again.dir.final_model) / path.name, shallow=False)
    written = (again.dir.metrics, again.dir.data, again.dir.balance, again.dir.plan)
    for path in written:
        assert far.path(path).read_bytes() == again.path(path).read_bytes(), path
    assert json.loads(again.path(again.dir.plan).read_text())["balance"]
    assert again.result()["model"] == str(again.dir.final_model)
    nothing_left(cluster, timeout_s=5)


def write_documents(path: Path) -> None:
    """About 1 MiB of sentences."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(DOCUMENTS):
            text = " ".join(draw.choices(WORDS, k=draw.randint(20, 380)))
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def check_stores(run: LlmxRun, cluster: Cluster, work: Path, source: Path) -> None:
    """The first host prepared the data and sent it: both disks have what one host prepares."""
    stores = [only_store(host.path(work / "cache/data")) for host in cluster.hosts]
    assert stores[0].meta == stores[1].meta
    for store in stores:
        store.verify()
    exp = experiment_from_dict(yaml.safe_load(run.path(run.dir.config).read_text()))
    exp.data.cache_dir = str(source.parent / "alone")
    alone = prepare(exp, tokenizer_of(exp))
    assert alone.meta["identity"] == stores[0].meta["identity"]
    assert alone.meta["sha256"] == stores[0].meta["sha256"]
    assert alone.meta["rows_read"] == DOCUMENTS
    logs = [run.path(run.dir.rank_log(rank)).read_text() for rank in range(3)]
    assert re.search(r"Sent text-train-\S+ \([\d.]+ MiB\) to the other hosts", logs[0])
    pieces = f"{DOCUMENTS:,} read; cut into {alone.num_sequences:,} pieces"
    (line,) = (line for line in logs[0].splitlines() if "Data (train): " in line)
    assert f"; rows: {pieces}; " in line
    assert f"; samples: {len(alone):,}, each of " in line
    assert "Data (" not in logs[1] + logs[2]


def only_store(directory: Path) -> SampleStore:
    """The store there; nothing else may be left beside the file of another project."""
    (store,) = [path for path in directory.iterdir() if path.is_dir()]
    files = [path for path in directory.iterdir() if path.is_file() and path.name != "other"]
    assert {path.suffix for path in files} <= {".lock"}
    return SampleStore.open(store)
