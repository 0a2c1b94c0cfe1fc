"""Precomputed columns on disk: whole or not there, found by what decides them, and continued."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmx.data import collate
from llmx.data.examples import Column
from llmx.data.store.precomputed import Precomputed, check_values
from llmx.data.store.samples import Sample, SampleStore
from llmx.errors import ConfigError, DataError
from tests.small_stores import write_store

LOGP = Column("reference_logp", per="sequence")
WIDE = Column("scores", per="example", dtype="int32", shape=(2,))


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
    return Precomputed(store, (LOGP, WIDE), {"model": "m", **identity})


def filled(one: Precomputed) -> dict[str, np.ndarray]:
    values = one.empty()
    values["reference_logp"][...] = -np.arange(len(values["reference_logp"])) / 3
    values["scores"][...] = np.arange(2 * len(values["scores"])).reshape(-1, 2)
    return values


def test_published_columns_are_those_of_the_store(tmp_path: Path) -> None:
    one = wanted(pairs(tmp_path / "data-train-v2"))
    assert one.open() is None
    values = filled(one)
    assert values["reference_logp"].shape == (12,)
    assert values["scores"].shape == (6, 2)
    one.publish(values, how={"seconds": 1.0})
    store = one.open()
    assert store is not None
    last = store[4]
    assert last.columns["reference_logp"].tolist() == values["reference_logp"][8:].tolist()
    assert last.columns["scores"].tolist() == [[8, 9], [10, 11]]
    batch = collate(
        [store[1], store[4]], seq_len=64, pad_id=0, layout="packed", columns=store.batch_columns
    )
    assert torch.equal(
        batch["reference_logp"], torch.from_numpy(values["reference_logp"][[2, 3, 8, 9, 10, 11]])
    )
    assert one.store.columns == (), "the store itself is as it was"
    # Another one is not in its way, and the first that is there stays.
    other = wanted(one.store, precision="bf16")
    assert other.path != one.path
    assert other.open() is None
    one.publish(one.empty(), how={})
    again = one.open()
    assert again is not None
    assert again.values_of("scores")[-1].tolist() == [10, 11]


def test_a_file_that_was_cut_is_not_used(tmp_path: Path) -> None:
    one = wanted(pairs(tmp_path / "data-train-v2"))
    one.publish(filled(one), how={})
    with (one.path / "scores.bin").open("r+b") as stream:
        stream.truncate(7)
    with pytest.raises(DataError, match=r"scores\.bin has 7 bytes, 48 were written"):
        one.open()


def test_an_interrupted_computation_goes_on_where_it_was(tmp_path: Path) -> None:
    one = wanted(pairs(tmp_path / "data-train-v2"))
    values = filled(one)
    assert one.recorded(one.empty()) == 0
    one.record(values, 0, 2)
    one.record(values, 2, 3)
    assert one.open() is None, "half of it is never read"
    found = one.empty()
    assert one.recorded(found) == 3
    assert found["reference_logp"].tolist() == [*values["reference_logp"][:6].tolist(), *[0.0] * 6]
    assert found["scores"][:3].tolist() == values["scores"][:3].tolist()
    # A file that does not hold what the journal says counts for nothing.
    (partial,) = tmp_path.glob("*.partial")
    (partial / "scores.bin").write_bytes(b"x")
    assert one.recorded(one.empty()) == 0
    one.forget()
    assert not partial.exists()


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
    with pytest.raises(ConfigError, match=r"per='token'; values are precomputed by sequence or"):
        Precomputed(None, (Column("top", per="token"),), {})  # type: ignore[arg-type]
