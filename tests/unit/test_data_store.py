"""Stores and their precomputed columns: what is written is read, whole or not at all, by one or by
several processes."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from llmx.data import Sample, SampleStore, collate
from llmx.data.examples import Column
from llmx.data.store.precomputed import Precomputed, check_values
from llmx.data.store.samples import locked
from llmx.errors import ConfigError, DataError
from tests.small_stores import write_store

SAMPLES = [
    Sample(np.array(tokens, np.uint32), np.array(targets, np.bool_), np.array(starts))
    for tokens, targets, starts in (
        ([1, 2, 3], [0, 1, 1], [0]), ([4_294_967_295, 5, 6, 7], [0, 1, 0, 1], [0, 2]),
    )
]  # fmt: skip


def write(path: Path) -> SampleStore:
    return write_store(path, SAMPLES, fingerprint="abc", seq_len=8, meta={"note": "ü"})


def check_same(store: SampleStore) -> None:
    assert len(store) == len(SAMPLES)
    for index, sample in enumerate(SAMPLES):
        for name in ("tokens", "targets", "sequence_starts"):
            ours, theirs = getattr(store[index], name), getattr(sample, name)
            assert ours.tolist() == theirs.tolist()
        assert store[index].targets.dtype == np.bool_
        assert store.num_target_tokens(index) == int(sample.targets.sum())


def test_round_trip(tmp_path: Path):
    write(tmp_path / "s")
    inode = (tmp_path / "s").stat().st_ino
    store = write(tmp_path / "s")  # who comes second uses what is there
    check_same(store)
    assert (tmp_path / "s").stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
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
        yield SAMPLES[0]
        raise DataError("row 2 is wrong")

    with pytest.raises(DataError, match="row 2"):
        write_store(tmp_path / "s", failing(), fingerprint="", seq_len=8, meta={})
    assert list(tmp_path.iterdir()) == []


def test_a_lock_excludes_others_and_what_a_dead_process_left_is_removed(tmp_path: Path):
    (tmp_path / "s.tmp-1-dead").mkdir()
    with locked(tmp_path / "s"):
        assert [path.name for path in tmp_path.iterdir()] == ["s.lock"]
        with (tmp_path / "s.lock").open() as another, pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_SH | fcntl.LOCK_NB)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir"), locked(tmp_path / "file" / "s"):
        pass


# Precomputed columns

LOGP = Column("reference_logp", per="sequence")
WIDE = Column("scores", per="example", dtype="int32", shape=(2,))
TOP = Column("top", per="token", dtype="int16", shape=(2,))


def pairs(path: Path, *, count: int = 5) -> SampleStore:
    """Samples of one pair each, the last one of two."""

    def sample(number: int, size: int) -> Sample:
        lengths = [3 + number, 4] * size
        starts = np.cumsum([0, *lengths[:-1]])
        tokens = np.arange(sum(lengths), dtype=np.uint32) + number
        targets = np.ones(len(tokens), np.bool_)
        targets[starts] = False
        return Sample(tokens, targets, starts, example_starts=np.arange(0, 2 * size, 2))

    samples = [sample(number, 1 + (number == count - 1)) for number in range(count)]
    return write_store(path, samples, fingerprint=f"of {count}", seq_len=64, meta={})


def wanted(store: SampleStore, **identity: object) -> Precomputed:
    return Precomputed(store, (LOGP, WIDE, TOP), {"model": "m", **identity})


def filled(one: Precomputed, first: int = 0, last: int | None = None) -> dict[str, np.ndarray]:
    """The values of these samples: what they are numbered by over the whole store."""
    last = len(one.store) if last is None else last
    values = {}
    for column, per in ((LOGP, "sequence"), (WIDE, "example"), (TOP, "target")):
        span = one.store.span(per, first, last)
        numbers = np.arange(span.start, span.stop)
        found = {LOGP: -numbers / 3, WIDE: 2 * numbers, TOP: numbers + 1}[column]
        found = np.repeat(found[:, None], 2, axis=1) if column.shape else found
        values[column.name] = found.astype(column.numpy_dtype)
    return values


def published(one: Precomputed, values: dict[str, np.ndarray] | None = None) -> SampleStore:
    one.record(values or filled(one), 0, len(one.store))
    one.publish(facts={"seconds": 1.0})
    store = one.open()
    assert store is not None
    return store


def test_published_columns_are_those_of_the_store(tmp_path: Path) -> None:
    one = wanted(pairs(tmp_path / "data-train-v3"))
    assert one.open() is None
    values = filled(one)
    assert (len(values["reference_logp"]), values["scores"].shape) == (12, (6, 2))
    store = published(one, values)
    last = store[4]
    assert last.columns["reference_logp"].tolist() == values["reference_logp"][8:].tolist()
    assert last.columns["scores"].tolist() == [[8, 8], [10, 10]]
    batch = collate(
        [store[1], store[4]], seq_len=64, pad_id=0, layout="packed", columns=store.batch_columns
    )
    assert torch.equal(
        batch["reference_logp"], torch.from_numpy(values["reference_logp"][[2, 3, 8, 9, 10, 11]])
    )
    assert one.store.columns == (), "the store itself is as it was"
    assert not list(tmp_path.glob("*.partial"))
    # Another one is not in its way, and the first that is there stays.
    other = wanted(one.store, precision="bf16")
    assert other.path != one.path
    assert other.open() is None
    again = published(one, {name: np.zeros_like(column) for name, column in values.items()})
    assert again.values_of("scores")[-1].tolist() == [10, 10]
    os.truncate(one.path / "scores.bin", 7)
    with pytest.raises(DataError, match=r"scores\.bin has 7 bytes, 48 were written"):
        one.open()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_column_by_token_is_stored_at_the_targets_alone(layout: str, tmp_path: Path) -> None:
    one = wanted(pairs(tmp_path / "data-train-v3"))
    targets = one.store.span("target", 0, len(one.store)).stop
    assert targets == sum(one.store.num_target_tokens(index) for index in range(5)) < 50
    store = published(one)
    assert (one.path / "top.bin").stat().st_size == 4 * targets
    assert store.values_of("top").shape == (targets, 2)
    sample = store[3]
    assert sample.columns["top"].shape == (len(sample.tokens), 2)
    assert (sample.columns["top"][~sample.targets] == 0).all()
    # In a batch a value stands where its token is to be predicted, in the order of the labels.
    batch = collate(
        [store[1], store[4]], seq_len=64, pad_id=0, layout=layout, columns=store.batch_columns
    )
    found = batch["top"][batch["labels"] != -100]
    spans = [store.span("target", index, index + 1) for index in (1, 4)]
    numbers = [number + 1 for span in spans for number in range(span.start, span.stop)]
    assert found[:, 0].tolist() == numbers


def test_a_column_by_token_of_samples_without_a_target_is_empty(tmp_path: Path) -> None:
    samples = pairs(tmp_path / "pairs")
    prompts = [dataclasses.replace(s, targets=np.zeros_like(s.targets)) for s in samples]
    store = write_store(tmp_path / "data-train-v3", prompts, fingerprint="p", seq_len=64, meta={})
    opened = published(wanted(store))
    top = opened.values_of("top")
    assert (top.shape, top.dtype) == ((0, 2), np.int16)


def test_an_interrupted_computation_goes_on_where_it_was(tmp_path: Path) -> None:
    one = wanted(pairs(tmp_path / "data-train-v3"))
    assert one.recorded() == 0
    one.record(filled(one, 0, 2), 0, 2)
    one.record(filled(one, 2, 3), 2, 3)
    assert one.open() is None, "half of it is never read"
    with pytest.raises(DataError, match="holds the columns of 3 of 5 samples"):
        one.publish(facts={})
    assert one.recorded() == 3
    one.record(filled(one, 3, 5), 3, 5)
    one.publish(facts={})
    store = one.open()
    assert store is not None
    assert all(np.array_equal(store.values_of(name), each) for name, each in filled(one).items())
    # A file that does not hold what the journal says counts for nothing.
    other = wanted(one.store, precision="bf16")
    other.record(filled(other, 0, 3), 0, 3)
    (partial,) = tmp_path.glob("*.partial")
    (partial / "scores.bin").write_bytes(b"x")
    assert other.recorded() == 0


def test_what_a_task_gives_is_checked() -> None:
    counts = {"sequence": 4, "example": 2}
    good = {"reference_logp": torch.zeros(4), "scores": torch.ones(2, 2, dtype=torch.int64)}

    def check(**changes: torch.Tensor) -> dict[str, np.ndarray]:
        return check_values({**good, **changes}, (LOGP, WIDE), counts, task="own")

    assert check()["scores"].dtype == np.int32
    with pytest.raises(ConfigError, match=r"gave more, reference_logp, scores; `precomputed`"):
        check(more=torch.zeros(4))
    with pytest.raises(ConfigError, match=r"reference_logp in the shape \(2,\); by sequence .*4"):
        check(reference_logp=torch.zeros(2))
    with pytest.raises(DataError, match=r"not finite: the frozen model overflows"):
        check(reference_logp=torch.tensor([0.0, float("-inf"), 0.0, 0.0]))
    half = Column("half", per="sequence", dtype="float16")
    with pytest.raises(DataError, match=r"column half .* not finite: the frozen model overflows"):
        check_values({"half": torch.full((4,), 1e6)}, (half,), counts, task="own")
    with pytest.raises(ConfigError, match=r"top in the shape \(7, 2\); by target token .*9, 2"):
        check_values({"top": torch.zeros(7, 2)}, (TOP,), {"target": 9}, task="own")
