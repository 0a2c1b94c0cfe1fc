"""The micro batches of one rank, made by a thread so that the loop never waits for data.

Which samples they hold is a pure function of the step (``llmx.data.order``).
Tried by ``python -m pytest tests/unit/test_train_batches.py``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llmx.data import Column, collate
from llmx.data.collation import PAD_TO
from llmx.data.order import draw_seed, samples_of_step
from llmx.data.store.samples import Sample
from llmx.plan.balance import Rows, even_work
from llmx.plan.types import BalancePlan, BatchPlan, RankSpeed

PAD_TO_ON = {"cpu": PAD_TO, "cuda": 128}
"""``data.pad_to_multiple_of`` where it is null. On CUDA few shapes are better than short ones:
kernels are planned, and memory is kept, for each shape."""
AHEAD = 2
"""Steps that are prepared ahead."""


@dataclass(frozen=True)
class Layout:
    """How samples become the tensors of a batch."""

    seq_len: int
    pad_id: int
    layout: str
    pad_to: int = PAD_TO
    """A batch is as long as its longest line, rounded up to a multiple of this."""
    whole_rows: bool = True
    """Attention computes a line as one row, padding included, and hides what is to be hidden."""

    def collate(
        self, samples: Sequence[Sample], *, columns: Sequence[Column] | None
    ) -> dict[str, torch.Tensor]:
        """A micro batch; one line of padding without samples."""
        return collate(
            samples,
            seq_len=self.seq_len,
            pad_id=self.pad_id,
            layout=self.layout,
            pad_to=self.pad_to,
            columns=columns,
        )

    def rows(self, store: Any, samples: np.ndarray) -> Rows:
        """Lines, lengths and squared tokens of each sample."""
        lines, lengths, squares = store.row_shapes(samples, packed=self.layout == "packed")
        return Rows(lines, lengths, None if self.whole_rows else squares)


@dataclass(frozen=True)
class Step:
    """One rank's part of one optimizer step."""

    step: int
    micro_batches: tuple[dict[str, torch.Tensor], ...]
    weight: float
    """What the loss of the whole step is divided by, over all ranks: known everywhere without
    asking, but for a task that weighs micro batches (0 then)."""
    target_tokens: int
    """Targets of the whole step, over all ranks."""
    tokens: int
    """Non-padding tokens of the whole step."""
    square_tokens: int
    """Sum over the rows of this rank of the squared length: what attention costs."""
    work: int = 0
    """What this rank's micro batches should take: femtoseconds by the speeds of a balanced plan,
    else their tokens, padding included."""


Transform = Callable[[Any, int, int], Any]
"""Function of a sample, the step and its place in the step, over all ranks: the sample as
it is trained (``Task.transform``)."""


def make_step(
    store: Any,
    step: int,
    *,
    batch: BatchPlan,
    rank: int,
    seed: int,
    layout: Layout,
    stop: int | None = None,
    normaliser: str = "tokens",
    draws: bool = False,
    transform: Transform | None = None,
    balance: BalancePlan | None = None,
) -> Step:
    """The micro batches of ``rank`` at ``step``. Pure but for reading the store. ``stop``: the
    end of the samples, where the last step has fewer; a micro batch may then be empty.
    ``balance``: samples go to ranks by what they take; else in their order.
    ``normaliser``: what the step weighs (``Task.normaliser``). ``draws``: with ``draw_seeds``
    (``Task.draws``)."""
    samples = samples_of_step(
        step, global_batch=batch.global_batch, num_samples=len(store), seed=seed, stop=stop
    )

    micro_batch_places: Sequence[Sequence[int]] = [
        batch.places(rank, number, samples=len(samples))
        for number in range(len(batch.sizes_of(rank)))
    ]
    if balance is not None:
        work = even_work(
            layout.rows(store, samples),
            batch=batch,
            balance=balance,
            seq_len=layout.seq_len,
            pad_to=layout.pad_to,
        )
        micro_batch_places = micro_batch_places if work is None else work[rank]
    micro_batches = tuple(
        micro_batch(
            store,
            samples,
            part,
            step=step,
            seed=seed,
            layout=layout,
            draws=draws,
            transform=transform,
        )
        for part in micro_batch_places
    )
    weights = {"tokens": store.weight_of(samples), "batch": 0.0}
    return step_of(
        step,
        micro_batches,
        layout,
        weight=weights[normaliser] if normaliser in weights else store.num_examples(samples),
        target_tokens=store.num_target_tokens(samples),
        tokens=store.num_tokens(samples),
        speed=None if balance is None else balance.speeds[rank],
    )


def step_of(
    step: int,
    micro_batches: tuple[dict[str, torch.Tensor], ...],
    layout: Layout,
    *,
    weight: float,
    target_tokens: int,
    tokens: int,
    speed: RankSpeed | None,
) -> Step:
    """The step of these micro batches, with what they cost. ``speed``: of this rank, in a balanced
    plan."""
    speed, work, squares = speed or RankSpeed(fixed_fs=0, token_fs=1), 0, 0
    for micro in micro_batches:
        lines, length = micro["input_ids"].shape
        of_rows = square_tokens(micro)
        squares += of_rows
        of_lines = lines * length * length
        work += speed.time_fs(lines * length, of_lines if layout.whole_rows else of_rows)
    return Step(step, micro_batches, weight, target_tokens, tokens, squares, work)


def micro_batch(
    store: Any,
    samples: np.ndarray,
    places: Sequence[int],
    *,
    step: int,
    seed: int,
    layout: Layout,
    draws: bool,
    transform: Transform | None,
) -> dict[str, torch.Tensor]:
    """The tensors of the samples of ``step`` at these places of it."""
    taken_samples = [store[int(samples[place])] for place in places]
    if transform is not None:
        taken_samples = [
            transform(sample, step, place)
            for sample, place in zip(taken_samples, places, strict=True)
        ]
    tensors = layout.collate(taken_samples, columns=store.batch_columns)
    if draws:
        seeds = [
            draw_seed(seed, step, place) + number
            for place, sample in zip(places, taken_samples, strict=True)
            for number in range(len(sample.sequence_starts))
        ]
        tensors["draw_seeds"] = torch.tensor(seeds, dtype=torch.int64)
    return tensors


def square_tokens(batch: dict[str, torch.Tensor]) -> int:
    """Sum of squared row lengths: each token's position in its row is how far it looks back."""
    lookback = (batch["position_ids"] + 1) * (batch["segment_ids"] > 0)
    tokens = int((batch["segment_ids"] > 0).sum())
    return 2 * int(lookback.sum()) - tokens  # n^2 = 2 * (1 + ... + n) - n


def pinned(step: Step) -> Step:
    """Move a step to page-locked memory: from any other, a copy to a GPU waits for all that the GPU
    has been given to do."""
    micro_batches = tuple(
        {name: values.pin_memory() for name, values in micro.items()}
        for micro in step.micro_batches
    )
    return replace(step, micro_batches=micro_batches)


def prefetched(steps: Iterable[Step], *, pin: bool = False) -> Generator[Step, None, None]:
    """The steps, which a daemon thread prepares ahead; errors come out in order. Closed, also in
    the middle, it ends the thread.

    ``pin``: page-locked, for ranks with a GPU.
    """
    ready: queue.Queue[Step | BaseException | None] = queue.Queue(maxsize=AHEAD)
    closed = threading.Event()

    def put(item: Step | BaseException | None) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.2)
                return

    def prepare() -> None:
        try:
            for step in steps:
                put(pinned(step) if pin else step)
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=prepare, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        with contextlib.suppress(queue.Empty):  # it may wait for room
            ready.get_nowait()
        thread.join()
