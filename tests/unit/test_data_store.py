"""The store: what is written is read, whole or not at all, by one or by several processes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from llmx.data import Sample, SampleStore
from llmx.data.store.samples import locked
from llmx.errors import DataError
from tests import forks
from tests.small_stores import write_store


def some_samples() -> list[Sample]:
    return [
        Sample(np.array([1, 2, 3], np.uint32), np.array([0, 1, 1], np.bool_), np.array([0])),
        Sample(
            np.array([4_294_967_295, 5, 6, 7], np.uint32),
            np.array([0, 1, 0, 1], np.bool_),
            np.array([0, 2]),
        ),
    ]


def write(path: Path, samples: list[Sample] | None = None) -> SampleStore:
    samples = some_samples() if samples is None else samples
    return write_store(path, iter(samples), fingerprint="abc", seq_len=8, meta={"note": "ü"})


def same(store: SampleStore, samples: list[Sample]) -> None:
    assert len(store) == len(samples)
    for index, sample in enumerate(samples):
        for name in ("tokens", "targets", "sequence_starts"):
            ours, theirs = getattr(store[index], name), getattr(sample, name)
            assert ours.tolist() == theirs.tolist()
        assert store[index].targets.dtype == np.bool_
        assert store.num_target_tokens(index) == int(sample.targets.sum())


def test_round_trip(tmp_path: Path):
    write(tmp_path / "s")
    store = SampleStore.open(tmp_path / "s")
    same(store, some_samples())
    assert (store.fingerprint, store.seq_len, store.num_sequences) == ("abc", 8, 3)
    assert store.meta["note"] == "ü"
    assert (store.meta["num_tokens"], store.meta["num_target_tokens"]) == (7, 4)
    assert store.num_target_tokens(np.array([0, 1, 1])) == 6
    assert store.num_tokens(np.array([0, 1, 1])) == 11
    assert [tokens.tolist() for tokens, _ in store[1].sequences()] == [[4_294_967_295, 5], [6, 7]]
    store.verify()
    with pytest.raises(IndexError, match="sample 2"):
        store[2]


def test_a_damaged_store_is_not_used(tmp_path: Path):
    write(tmp_path / "s")
    tokens = tmp_path / "s" / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[0] ^= 1
    tokens.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"tokens\.bin does not have its recorded checksum"):
        SampleStore.open(tmp_path / "s").verify()
    tokens.write_bytes(bytes(content[:-1]))
    with pytest.raises(DataError, match=r"tokens\.bin has 27 bytes, 28 were written"):
        SampleStore.open(tmp_path / "s")
    tokens.unlink()
    with pytest.raises(DataError, match="has None bytes"):
        SampleStore.open(tmp_path / "s")
    with pytest.raises(DataError, match="not a prepared data store"):
        SampleStore.open(tmp_path)


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path):
    def failing():
        yield some_samples()[0]
        raise DataError("row 2 is wrong")

    with pytest.raises(DataError, match="row 2"):
        write_store(tmp_path / "s", failing(), fingerprint="", seq_len=8, meta={})
    assert list(tmp_path.iterdir()) == []


def test_who_comes_second_uses_what_is_there(tmp_path: Path):
    write(tmp_path / "s")
    inode = (tmp_path / "s").stat().st_ino
    same(write(tmp_path / "s"), some_samples())
    assert (tmp_path / "s").stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir"), locked(tmp_path / "file" / "s"):
        pass


def _hold_and_die(path: Path, started) -> None:
    with locked(path):
        (path.parent / f"{path.name}.tmp-1-dead").mkdir()
        started.set()
        os.kill(os.getpid(), 9)


def _enter(path: Path, entered) -> None:
    with locked(path):
        entered.set()


def test_the_lock_of_a_killed_process_is_free_and_its_parts_are_removed(tmp_path: Path):
    started = forks.context.Event()
    process = forks.process(_hold_and_die, tmp_path / "s", started)
    process.start()
    assert started.wait(30)
    process.join(30)
    assert process.exitcode == -9
    with locked(tmp_path / "s"):
        assert [path.name for path in tmp_path.iterdir()] == ["s.lock"]


def test_a_second_process_waits(tmp_path: Path):
    entered = forks.context.Event()
    with locked(tmp_path / "s"):
        process = forks.process(_enter, tmp_path / "s", entered)
        process.start()
        assert not entered.wait(0.3)
    assert entered.wait(30)
    process.join(30)
    assert process.exitcode == 0
