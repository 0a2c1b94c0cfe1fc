"""The parts that ranks take of a step cover it once, and errors of the thread come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from llmx.data.order import samples_of_step
from llmx.data.store.samples import SampleStore
from llmx.models.loss import IGNORE
from llmx.plan.types import BatchPlan
from llmx.train.batches import Layout, Step, make_step, prefetched
from llmx.train.evaluation import slices
from tests.reference import SEQ_LEN, synthetic_store

LAYOUT = Layout(seq_len=SEQ_LEN, pad_id=0, layout="packed")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    return synthetic_store(tmp_path_factory.mktemp("batches") / "store")


@pytest.mark.parametrize(("micro", "accumulation"), [((6, 6), 1), ((3, 1), 3), ((1, 1, 2), 3)])
@pytest.mark.parametrize("left", [1, 3, 4, 7, 11, 12, None])
def test_ranks_share_a_step_without_gap_or_overlap(store, micro, accumulation, left) -> None:
    """Also one that is short, the last one; it goes on into the next epoch."""
    batch, number = BatchPlan(12, accumulation, micro, SEQ_LEN), 3
    stop = 36 + left if left else None
    steps = [
        make_step(store, number, batch=batch, rank=rank, seed=5, layout=LAYOUT, stop=stop)
        for rank in range(len(micro))
    ]
    samples = samples_of_step(number, global_batch=12, num_samples=len(store), seed=5)[:left]
    # As many micro batches as ever, on every rank: the collectives of ZeRO match.
    assert {len(step.micro_batches) for step in steps} == {accumulation}
    if left in (12, None):
        seen = [[len(m["input_ids"]) for m in step.micro_batches] for step in steps]
        assert seen == [[size] * accumulation for size in micro]
    lines = [
        line[segments > 0].tolist()
        for parts in zip(*(step.micro_batches for step in steps), strict=True)
        for part in parts
        for line, segments in zip(part["input_ids"], part["segment_ids"], strict=True)
        if segments.any()
    ]
    assert lines == [store[int(index)].tokens.tolist() for index in samples]
    targets = [(m["labels"] != IGNORE).sum() for step in steps for m in step.micro_batches]
    assert {step.target_tokens for step in steps} == {int(sum(targets))}
    assert {step.tokens for step in steps} == {sum(map(len, lines))}
    rows = [tokens for index in samples for tokens, _ in store[int(index)].sequences()]
    assert sum(step.square_tokens for step in steps) == sum(len(tokens) ** 2 for tokens in rows)


@pytest.mark.parametrize("num_samples", [1, 5, 8, 13])
def test_evaluation_takes_every_sample_once_in_as_many_forwards(num_samples: int) -> None:
    micro = (3, 1)
    parts = [slices(num_samples, micro_batches=micro, rank=rank) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == -(-num_samples // 4)
    assert sorted(i for part in parts for s in part for i in s) == list(range(num_samples))
    assert all(len(s) <= micro[rank] for rank, part in enumerate(parts) for s in part)


def steps(count: int, made: list[int] | None = None) -> Iterator[Step]:
    for number in range(count):
        if made is not None:
            made.append(number)
        yield Step(number, (), weight=0, target_tokens=0, tokens=0, square_tokens=0)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


def test_prefetch_keeps_the_order_and_raises_the_error_where_it_happened() -> None:
    def failing() -> Iterator[Step]:
        yield from steps(7)
        raise OSError("the disk is gone")

    found = prefetched(failing())
    assert [next(found).step for _ in range(7)] == list(range(7))
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    assert not threads()


def test_prefetch_closes_in_the_middle_and_does_not_run_far_ahead() -> None:
    made: list[int] = []
    found = prefetched(steps(10**9, made))
    assert next(found).step == 0
    found.close()
    assert len(made) < 12
    assert not threads()


def test_batches_for_a_gpu_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[torch.Tensor] = []

    def pin_memory(values: torch.Tensor) -> torch.Tensor:
        locked.append(values.clone())
        return locked[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    step = Step(0, (batch, batch), weight=8, target_tokens=8, tokens=8, square_tokens=32)
    (found,) = list(prefetched([step], pin=True))
    assert len(locked) == 4
    assert all(values is locked[n] for n, values in enumerate(found.micro_batches[0].values()))
