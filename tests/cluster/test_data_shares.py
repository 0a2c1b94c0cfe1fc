"""Two hosts with disks of their own prepare one data set, and train on it as one host does.

``pytest -m cluster tests/cluster/test_data_shares.py``
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmx.config import Experiment
from llmx.data import SampleStore
from llmx.tasks import prepare, tokenizer_of
from tests.cluster.launching import nothing_left, start_llmx
from tests.cluster.netns import Cluster

DOCUMENTS, FILES = 12_000, 10
WORDS = (
    "the red map lies in a small garden behind Anna and Ben went to the kite museum ü 春".split()
)


def corpus(directory: Path) -> Path:
    """About 12 MiB of sentences in several files."""
    directory.mkdir()
    draw = random.Random(0)
    for number in range(FILES):
        with (directory / f"{number}.jsonl").open("w", encoding="utf-8") as stream:
            for _ in range(DOCUMENTS // FILES):
                text = " ".join(draw.choices(WORDS, k=draw.randint(20, 380)))
                stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return directory


def test_private_disks_get_the_store(
    make_cluster: Callable[..., Cluster], tmp_path: Path, need: Callable[..., None]
) -> None:
    need("pdsh", "rsync")
    source, work = corpus(tmp_path / "corpus"), tmp_path / "work"
    work.mkdir()
    cluster = make_cluster(private_paths=[work])
    near, far = cluster.hosts
    overrides = [
        "data=text", f"data.path={source}", "data.seq_len=128", "task=pretrain", "task.steps=2",
        "task.save_model=false", "model=tiny", "launch.transport=pdsh", "launch.sync=rsync",
        f"run_dir={work}/run", f"data.cache_dir={work}/cache", "data.max_rows=null",
    ]  # fmt: skip
    run = start_llmx(cluster, tmp_path, slots=(1, 2), overrides=overrides)
    run.dir = type(run.dir)(work / "run")
    assert run.wait(timeout_s=300) == 0, run.output()

    stores = [_only_store(host.path(work / "cache/data")) for host in (near, far)]
    assert stores[0].meta == stores[1].meta
    for store in stores:
        store.verify()
    exp = _experiment(source, tmp_path / "alone")
    alone = prepare(exp, tokenizer_of(exp))
    assert alone.meta["identity"] == stores[0].meta["identity"]
    assert alone.meta["sha256"] == stores[0].meta["sha256"]
    assert alone.meta["rows_read"] == DOCUMENTS

    logs = [run.path(run.dir.rank_log(rank)).read_text() for rank in range(3)]
    assert re.search(r"Sent text-train-\S+ \([\d.]+ MiB\) to the other hosts", logs[0])
    pieces = f"{DOCUMENTS:,} rows, cut into {alone.num_sequences:,} pieces"
    assert f"Data (train): {pieces}, in {len(alone):,} samples" in logs[0]
    assert "Data (" not in logs[1] + logs[2]
    assert "Sent" not in logs[1] + logs[2]
    nothing_left(cluster, timeout_s=5)


def _only_store(directory: Path) -> SampleStore:
    """The store there; nothing else may be left."""
    (found,) = [path for path in directory.iterdir() if path.is_dir()]
    assert {path.suffix for path in directory.iterdir() if path.is_file()} <= {".lock"}
    return SampleStore.open(found)


def _experiment(source: Path, cache: Path) -> Experiment:
    exp = Experiment()
    exp.task.kind, exp.model.tokenizer = "pretrain", "demo"
    values: dict[str, Any] = {"form": "text", "packing": "concat", "seq_len": 128}
    values |= {"name": "text", "path": str(source), "cache_dir": str(cache)}
    for name, value in values.items():
        setattr(exp.data, name, value)
    return exp
