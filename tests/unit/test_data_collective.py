"""Several hosts prepare one dataset: the same bytes as one host, whatever they share.

Hosts are processes here, in a real process group; a disk of its own is a cache of its own.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from llmx.config import Experiment
from llmx.data.distributed import prepare_together
from llmx.errors import DataError
from llmx.tasks import prepare, task_of
from tests import forks
from tests.bound_device import as_under_nccl
from tests.data_rows import chat_row, of_rows, of_text, row_tokenizer

HOSTS = ["node-a", "node-b", "node-b", "node-c"]
"""The host of each rank."""
PLACES = [0, 1, 1, 2]


def _prepare(rank: int, place: Path, experiments: list[Experiment]) -> None:
    exp, split = experiments[PLACES[rank]], as_under_nccl()
    task = task_of(exp, row_tokenizer())
    found: Any
    try:
        (store,) = prepare_together(
            exp.data, exp.seed, task.tokenizer, task, ["train"], hosts=HOSTS
        )
        store.verify()
        assert split.calls == 0, "a rank outside of a group waits in ncclCommSplit"
        found = store.meta
    except DataError as error:
        found = str(error)
    (place / f"rank-{rank}.json").write_text(json.dumps(found))


def prepared(place: Path, experiments: list[Experiment]) -> list[Any]:
    """What each rank says of its training store, or the error. ``experiments``: of the hosts."""
    forks.group(_prepare, place, experiments, world=len(HOSTS))
    return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(len(HOSTS))]


def _with_cache(exp: Experiment, cache: Path) -> Experiment:
    own = copy.deepcopy(exp)
    own.data.cache_dir = str(cache)
    return own


def texts(at: Path) -> Experiment:
    return of_text(at, [{"text": f"text {i} " * (i % 30)} for i in range(150)])


def chats_with_bad_rows(at: Path) -> Experiment:
    exp = of_rows(at, map(chat_row, range(300)), on_bad_row="skip", form="prompt_response")
    with Path(exp.data.path).open("a") as stream:
        stream.write("{torn\n")
    return exp


@pytest.mark.parametrize("source", [texts, chats_with_bad_rows])
def test_hosts_make_the_bytes_of_one(source: Any, tmp_path: Path):
    (tmp_path / "source").mkdir()
    exp = source(tmp_path / "source")
    caches = [tmp_path / name for name in ("a", "b", "b")]  # two hosts share a disk
    alone = prepare(_with_cache(exp, tmp_path / "alone"), row_tokenizer())
    found = prepared(tmp_path, [_with_cache(exp, cache) for cache in caches])
    same = "sha256 rows_read truncated truncated_tokens dropped rejected fingerprint text_bytes"
    for meta in found:
        assert [meta[key] for key in same.split()] == [alone.meta[key] for key in same.split()]
    assert found[0] == found[3]
    if alone.meta["rejected_file"]:
        lines = Path(alone.meta["rejected_file"]).read_bytes()
        assert Path(found[0]["rejected_file"]).read_bytes() == lines
        assert lines.count(b"\n") == sum(alone.meta["rejected"].values()) > 10
    for cache in caches:
        left = list((cache / "data").iterdir())
        assert {path.suffix for path in left if path.is_file()} <= {".lock", ".jsonl"}
        assert len([path for path in left if path.is_dir()]) == 1


def test_a_host_without_the_store_gets_it(tmp_path: Path):
    exp, caches = texts(tmp_path), [tmp_path / name for name in "abc"]
    there = prepare(_with_cache(exp, caches[1]), row_tokenizer())
    assert prepared(tmp_path, [_with_cache(exp, each) for each in caches]) == [there.meta] * 4


def test_hosts_with_other_data_are_refused_on_every_rank(tmp_path: Path):
    one, two = texts(tmp_path), of_text(tmp_path, "a text")
    for error in prepared(tmp_path, [one, one, two]):
        assert "node-c would train on other data than node-a: different there: sources" in error


def test_a_host_that_cannot_store_the_data_ends_every_rank(tmp_path: Path):
    exp, caches = texts(tmp_path), [tmp_path / name for name in "abc"]
    name = prepare(_with_cache(exp, caches[0]), row_tokenizer()).path.name
    blocked = caches[2] / "data" / f"{name}.tmp-received"
    blocked.parent.mkdir(parents=True)
    blocked.touch()
    for error in prepared(tmp_path, [_with_cache(exp, cache) for cache in caches]):
        assert f"The prepared data {name} cannot be stored on the host of rank 3: " in error
