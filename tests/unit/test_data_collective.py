"""Several hosts prepare one dataset: the same bytes as one host, whatever they share.

Hosts are processes here, in a real process group; a disk of its own is a cache of its own.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.config import Experiment
from llmx.data.distributed import prepare_together
from llmx.tasks import prepare, task_of
from tests import forks
from tests.bound_device import as_under_nccl
from tests.data_rows import chat_row, of_rows, of_text, row_tokenizer

pytestmark = pytest.mark.xdist_group("collective")  # one set of ranks

HOSTS = ["node-a", "node-b", "node-b", "node-c"]
"""The host of each rank."""
PLACES = [0, 1, 1, 2]


class Ranks:
    """Four ranks on three hosts, which do what they are told together."""

    def __init__(self) -> None:
        # It listens before the ranks start: nobody else can take its port.
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
        self.tasks = [forks.context.Queue() for _ in PLACES]
        self.results = [forks.context.Queue() for _ in PLACES]
        self._processes = [
            forks.process(_rank, rank, self._store.port, *queues)
            for rank, queues in enumerate(zip(self.tasks, self.results, strict=True))
        ]
        for process in self._processes:
            process.start()

    def prepare(self, experiments: list[Experiment]) -> list[Any]:
        """(sha256, meta) of the training store on every rank, or the error as text.
        ``experiments``: those of the hosts."""
        for queue, place in zip(self.tasks, PLACES, strict=True):
            queue.put(experiments[place])
        return [queue.get(timeout=240) for queue in self.results]

    def end(self) -> None:
        for queue in self.tasks:
            queue.put(None)
        for process in self._processes:
            process.join(1)
            process.kill()


def _rank(rank: int, port: int, tasks: Any, results: Any) -> None:
    dist = torch.distributed
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(PLACES))
    split = as_under_nccl()
    while (exp := tasks.get()) is not None:
        try:
            task = task_of(exp, row_tokenizer())
            (store,) = prepare_together(
                exp.data, exp.seed, task.tokenizer, task, ["train"], hosts=HOSTS
            )
            store.verify()
            assert split.calls == 0, "a rank outside of a group waits in ncclCommSplit"
            results.put((store.meta["sha256"], store.meta))
        except Exception:
            results.put(traceback.format_exc())
    dist.destroy_process_group()


def _with_cache(exp: Experiment, cache: Path) -> Experiment:
    own = copy.deepcopy(exp)
    own.data.cache_dir = str(cache)
    return own


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.end()


def texts(at: Path) -> Experiment:
    return of_text(at, [{"text": f"text {i} " * (i % 30)} for i in range(400)])


def chats_with_bad_rows(at: Path) -> Experiment:
    exp = of_rows(at, map(chat_row, range(300)), on_bad_row="skip", form="prompt_response")
    with Path(exp.data.path).open("a") as stream:
        stream.write("{torn\n")
    return exp


@pytest.mark.parametrize("source", [texts, chats_with_bad_rows])
def test_hosts_make_the_bytes_of_one(source: Any, ranks: Ranks, tmp_path: Path):
    (tmp_path / "source").mkdir()
    exp = source(tmp_path / "source")
    caches = [tmp_path / name for name in ("a", "b", "b")]  # two hosts share a disk
    alone = prepare(_with_cache(exp, tmp_path / "alone"), row_tokenizer())
    found = ranks.prepare([_with_cache(exp, cache) for cache in caches])
    assert not [result for result in found if isinstance(result, str)], found
    same = "rows_read truncated truncated_tokens dropped rejected fingerprint text_bytes".split()
    for digests, meta in found:
        assert digests == alone.meta["sha256"]
        assert [meta[key] for key in same] == [alone.meta[key] for key in same]
    assert found[0][1] == found[3][1]
    if alone.meta["rejected_file"]:
        lines = Path(alone.meta["rejected_file"]).read_bytes()
        assert Path(found[0][1]["rejected_file"]).read_bytes() == lines
        assert lines.count(b"\n") == sum(alone.meta["rejected"].values()) > 10
    for cache in caches:
        left = list((cache / "data").iterdir())
        assert {path.suffix for path in left if path.is_file()} <= {".lock", ".jsonl"}
        assert len([path for path in left if path.is_dir()]) == 1


def test_a_host_without_the_store_gets_it(ranks: Ranks, tmp_path: Path):
    exp, caches = texts(tmp_path), [tmp_path / name for name in "abc"]
    there = prepare(_with_cache(exp, caches[1]), row_tokenizer())
    found = ranks.prepare([_with_cache(exp, cache) for cache in caches])
    assert [meta for _, meta in found] == [there.meta] * 4


def test_hosts_with_other_data_are_refused_on_every_rank(ranks: Ranks, tmp_path: Path):
    one, two = texts(tmp_path), of_text(tmp_path, "a text")
    for error in ranks.prepare([one, one, two]):
        assert "node-c would train on other data than node-a: different there: sources" in error


def test_a_host_that_cannot_store_the_data_ends_every_rank(ranks: Ranks, tmp_path: Path):
    exp, caches = texts(tmp_path), [tmp_path / name for name in "abc"]
    name = prepare(_with_cache(exp, caches[0]), row_tokenizer()).path.name
    blocked = caches[2] / "data" / f"{name}.tmp-received"
    blocked.parent.mkdir(parents=True)
    blocked.touch()
    for error in ranks.prepare([_with_cache(exp, cache) for cache in caches]):
        assert f"The prepared data {name} cannot be stored on the host of rank 3: " in error
