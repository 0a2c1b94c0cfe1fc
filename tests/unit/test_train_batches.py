"""The parts that ranks take of a step cover it once, and errors of the thread come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmx.data.order import samples_of_step
from llmx.models.loss import IGNORE
from llmx.plan.types import BatchPlan
from llmx.train.batches import Layout, Prefetch, Step, make_step, square_tokens
from llmx.train.evaluation import slices
from tests.reference import SEQ_LEN, synthetic_store

LAYOUT = Layout(seq_len=SEQ_LEN, pad_id=0, layout="packed")


@pytest.mark.parametrize(("micro", "accumulation"), [((6, 6), 1), ((3, 1), 3), ((1, 1, 2), 3)])
def test_ranks_share_a_step_without_gap_or_overlap(
    micro: tuple[int, ...], accumulation: int, tmp_path: Path
) -> None:
    store = synthetic_store(tmp_path / "store")
    batch = BatchPlan(12, accumulation, micro, SEQ_LEN)
    for number in (0, 3):
        steps = [
            make_step(store, number, batch=batch, rank=rank, seed=5, layout=LAYOUT)
            for rank in range(len(micro))
        ]
        samples = samples_of_step(number, global_batch=12, num_samples=len(store), seed=5)
        seen = [[len(m["input_ids"]) for m in step.micro_batches] for step in steps]
        assert seen == [[size] * accumulation for size in micro]
        lines = [
            line[segments > 0].tolist()
            for a in range(accumulation)
            for step in steps
            for line, segments in zip(
                step.micro_batches[a]["input_ids"],
                step.micro_batches[a]["segment_ids"],
                strict=True,
            )
        ]
        assert lines == [store[int(index)].tokens.tolist() for index in samples]
        targets = sum(
            int((m["labels"] != IGNORE).sum()) for step in steps for m in step.micro_batches
        )
        assert {step.target_tokens for step in steps} == {targets}
        assert {step.tokens for step in steps} == {sum(map(len, lines))}
        wanted = [
            sum(
                len(tokens) ** 2 for index in samples for tokens, _ in store[int(index)].sequences()
            )
        ]
        assert [sum(step.square_tokens for step in steps)] == wanted


@pytest.mark.parametrize(("micro", "accumulation"), [((6, 6), 1), ((3, 1), 3), ((1, 1, 2), 3)])
@pytest.mark.parametrize("left", [1, 3, 4, 7, 11, 12])
def test_a_short_last_step_is_covered_once(
    micro: tuple[int, ...], accumulation: int, left: int, tmp_path: Path
) -> None:
    store = synthetic_store(tmp_path / "store")
    batch = BatchPlan(12, accumulation, micro, SEQ_LEN)
    steps = [
        make_step(store, 3, batch=batch, rank=rank, seed=5, layout=LAYOUT, stop=36 + left)
        for rank in range(len(micro))
    ]
    samples = samples_of_step(3, global_batch=12, num_samples=len(store), seed=5)[:left]
    lines = [
        line[segments > 0].tolist()
        for a in range(accumulation)
        for step in steps
        for line, segments in zip(
            step.micro_batches[a]["input_ids"], step.micro_batches[a]["segment_ids"], strict=True
        )
        if segments.any()
    ]
    assert lines == [store[int(index)].tokens.tolist() for index in samples]
    targets = [(m["labels"] != IGNORE).sum() for step in steps for m in step.micro_batches]
    assert {step.target_tokens for step in steps} == {int(sum(targets))}
    # As many micro batches as ever, on every rank: the collectives of ZeRO match.
    assert {len(step.micro_batches) for step in steps} == {accumulation}


def test_square_tokens_ignores_padding() -> None:
    batch = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0]]),
        "segment_ids": torch.tensor([[1, 1, 1, 2, 2, 0, 0]]),
    }
    assert square_tokens(batch) == 3**2 + 2**2


@pytest.mark.parametrize("num_samples", [1, 5, 8, 13])
def test_evaluation_takes_every_sample_once_in_as_many_forwards(num_samples: int) -> None:
    micro = (3, 1)
    parts = [slices(num_samples, micro_batches=micro, rank=rank) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == -(-num_samples // 4)
    assert sorted(i for part in parts for s in part for i in s) == list(range(num_samples))
    assert all(len(s) <= micro[rank] for rank, part in enumerate(parts) for s in part)


def step(number: int) -> Step:
    return Step(number, (), weight=0, target_tokens=0, tokens=0, square_tokens=0)


def test_prefetch_keeps_the_order_and_ends() -> None:
    steps = Prefetch(step(number) for number in range(7))
    assert [s.step for s in steps] == list(range(7))
    steps.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


def test_prefetch_raises_the_error_where_it_happened() -> None:
    def failing() -> Iterator[Step]:
        yield step(0)
        yield step(1)
        raise OSError("the disk is gone")

    steps = Prefetch(failing())
    found = iter(steps)
    assert [next(found).step, next(found).step] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    steps.close()


def test_prefetch_closes_in_the_middle_and_does_not_run_far_ahead() -> None:
    made: list[int] = []

    def endless() -> Iterator[Step]:
        for number in range(10**9):
            made.append(number)
            yield step(number)

    steps = Prefetch(endless())
    assert next(iter(steps)).step == 0
    steps.close()
    assert len(made) < 12
    assert not [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


def test_the_store_counts_targets_as_collate_makes_them(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "store")
    every = np.arange(len(store))
    batch = BatchPlan(len(store), 1, (len(store),), SEQ_LEN)
    found = make_step(store, 0, batch=batch, rank=0, seed=0, layout=LAYOUT)
    assert found.target_tokens == store.num_target_tokens(every)


def test_batches_for_a_gpu_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[torch.Tensor] = []

    def pin_memory(values: torch.Tensor) -> torch.Tensor:
        locked.append(values.clone())
        return locked[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    step = Step(0, (batch, batch), weight=8, target_tokens=8, tokens=8, square_tokens=32)
    (found,) = list(Prefetch(iter([step]), pin=True))
    assert len(locked) == 4
    assert all(values is locked[n] for n, values in enumerate(found.micro_batches[0].values()))
