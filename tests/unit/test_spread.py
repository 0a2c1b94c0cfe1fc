"""Ranks find out who shares a directory, and files go between those that do not."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from llmx import spread
from llmx.checkpoint.commit import committed_dir, recover
from llmx.checkpoint.distributed import transfer_missing
from llmx.checkpoint.manifest import CheckpointError
from llmx.checkpoint.selection import Assessment, verify
from llmx.spread import StorageTopology, find_topology
from tests import forks
from tests.checkpoint_saves import assessment, flip_bit, save, tree

STATE = {"world_size": 9}
"""``state.json`` of other ranks: each rank now needs every file."""


def _find(rank: int, place: Path) -> None:
    topology = find_topology(place / "aaba"[rank], create=True, group=None)
    assert topology.leaders == (0, 0, 2, 0)
    assert (topology.storage, topology.leads) == ((2, True) if rank == 2 else (0, rank == 0))
    assert topology.members == ([2] if rank == 2 else [0, 1, 3])
    absent = find_topology(place / "absent", create=False, group=None)
    assert absent.leaders == (0, 0, 0, 0)


def test_ranks_find_out_who_shares_a_disk(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{spread.MARK}old-00000").touch()
    forks.group(_find, tmp_path, world=4)
    assert recover(tmp_path / "a") == [".mark-old-00000"]
    assert {name for name in tree(tmp_path) if name != "meet"} == {"a", "b"}


def _transfer(rank: int, place: Path, found: Assessment, message: str | None) -> None:
    spread.CHUNK_BYTES = 100  # several to a file
    topology = StorageTopology(_checkpoints(place, rank), rank, leaders=(0, 1, 2))
    fails = pytest.raises(CheckpointError, match=message) if message else contextlib.nullcontext()
    with fails:
        transfer_missing(topology, found, STATE, stage=2)


def _checkpoints(place: Path, rank: int) -> Path:
    return place / "abc"[rank] / "checkpoints"


@pytest.fixture
def two_hosts(tmp_path: Path) -> Any:
    """The assessment of step 2, of which two hosts have a part each and a third has nothing."""
    storages = [_checkpoints(tmp_path, rank) for rank in range(3)]
    assert save(storages[:2], 2)
    return assessment(storages, 2)


def test_each_host_gets_what_it_lacks(two_hosts: Assessment, tmp_path: Path) -> None:
    forks.group(_transfer, tmp_path, two_hosts, None, world=3)
    storages = [_checkpoints(tmp_path, rank) for rank in range(3)]
    assert not [problem for path in storages for problem in verify(committed_dir(path, 2))]
    first, *others = [tree(committed_dir(path, 2)) for path in storages]
    assert others == [first, first]
    assert not [name for path in storages for name in tree(path) if name.startswith(".")]


def test_a_file_that_comes_over_wrong_is_not_put_in_place(two_hosts: Assessment, tmp_path: Path):
    flip_bit(committed_dir(_checkpoints(tmp_path, 1), 2) / "rank-00001.safetensors", -1)
    message = "host of rank 0 cannot.*rank-00001.safetensors was received with the hash"
    forks.group(_transfer, tmp_path, two_hosts, message, world=3)
    assert "rank-00001.safetensors" not in tree(committed_dir(_checkpoints(tmp_path, 0), 2))
    assert not committed_dir(_checkpoints(tmp_path, 2), 2).exists()


def test_a_host_that_cannot_store_a_file_says_so_to_the_others(
    two_hosts: Assessment, tmp_path: Path
) -> None:
    """Raised on that rank alone, it would leave the others waiting for it."""
    (tmp_path / "c").touch()
    message = "host of rank 2 cannot store those that it lacks: .*Not a directory"
    forks.group(_transfer, tmp_path, two_hosts, message, world=3)
