"""The search of ``tune`` on surfaces whose fastest point is known: found, and in few trials."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from llmx.run.sweepdir import Trial
from llmx.sweep.search import Axis, Candidate, Search

STAGES = Axis("zero", ("stage1", "stage2", "stage3", "stage3_offload"))
MICRO = Axis("batch.micro_batch", ("1", "2", "4", "8", "16", "32", "64"))
CHECKPOINTING = Axis("model.activation_checkpointing", ("none", "selective", "full"))
AXES = (STAGES, MICRO, CHECKPOINTING)
CAPACITY = 80.0
AT_MOST = {"none": 1.0, "selective": 0.97, "full": 0.85, "stage3_offload": 0.9}

Place = tuple[int, ...]


def memory(place: Place, *, scale: float = 1.0) -> float:
    """Of states and activations, GiB."""
    stage, micro, checkpointing = place
    states = (40.0, 30.0, 12.0, 4.0)[stage]
    kept = (2.0, 1.0, 0.25)[checkpointing] * 2**micro
    return scale * (states + kept)


def speed(place: Place, *, saturates: int = 99) -> float:
    """Rises with the micro batch, up to one, beyond which it falls; falls along the other axes."""
    stage, micro, checkpointing = place
    fixed = (1.0, 1.02, 1.15, 2.0)[stage] * (1.0, 1.08, 1.33)[checkpointing]
    size = 2.0 ** min(micro, saturates)
    beyond = 1.0 - 0.1 * max(0, micro - saturates)
    return 1000.0 * beyond * size / (size + 2.0) / fixed


def candidates(
    *, capacity: float = CAPACITY, plan: Callable[[Place], float] = memory
) -> list[Candidate]:
    found = []
    for place in itertools.product(*(range(len(axis.values)) for axis in AXES)):
        words = tuple(f"{a.key}={a.values[at]}" for a, at in zip(AXES, place, strict=True))
        costs = [AT_MOST.get(a.values[at], 1.0) for a, at in zip(AXES, place, strict=True)]
        bound = costs[0] * costs[1] * costs[2]
        found.append(
            Candidate(
                place, words, speed=speed(place), memory_gib=plan(place), capacity_gib=capacity,
                at_most=bound,
            )
        )  # fmt: skip
    return found


def searched(
    search: Search,
    *,
    truth: Callable[[Place], float] = speed,
    needed: Callable[[Place], float] = memory,
    capacity: float = CAPACITY,
    at_most: int = 100,
) -> list[tuple[Place, str]]:
    """The trials, in order, with why each was run."""
    trials: list[tuple[Place, str]] = []
    while (step := search.next()) is not None and len(trials) < at_most:
        place = step.candidate.place
        assert place not in [earlier for earlier, _ in trials]
        oom = needed(place) > capacity
        search.tell(
            step.candidate,
            Trial(
                len(trials),
                [],
                Path(),
                "oom" if oom else "ok",
                tokens_per_s=None if oom else truth(place),
                memory_gib=None if oom else needed(place),
            ),
        )
        trials.append((place, step.why))
    return trials


def fastest(
    truth: Callable[[Place], float] = speed,
    needed: Callable[[Place], float] = memory,
    capacity: float = CAPACITY,
) -> float:
    places = [candidate.place for candidate in candidates()]
    return max(truth(place) for place in places if needed(place) <= capacity)


@pytest.mark.parametrize("saturates", [0, 1, 2, 3, 4, 5, 99])
@pytest.mark.parametrize("capacity", [8.0, 20.0, 34.0, 48.0, 80.0, 640.0])
@pytest.mark.parametrize("wrong", [0.7, 1.0, 1.3])
def test_the_fastest_point_is_found_in_few_of_84_trials(
    saturates: int, capacity: float, wrong: float
) -> None:
    """Whatever the device has, and where the plan is 30 % off."""

    def truth(place: Place) -> float:
        return speed(place, saturates=saturates)

    def planned(place: Place) -> float:
        return memory(place, scale=wrong)

    search = Search(AXES, candidates(capacity=capacity, plan=planned))
    trials = searched(search, truth=truth, capacity=capacity)
    best = search.best
    assert best is not None
    assert truth(best.place) >= 0.95 * fastest(truth, capacity=capacity)
    assert len(trials) <= 14
    assert sum(search.counts().values()) == 84
    assert all(why for _, why in trials)


def test_from_below_where_nothing_is_known_of_memory() -> None:
    search = Search(AXES, candidates(capacity=0.0), config_place=(0, 2, 0))
    trials = searched(search, capacity=CAPACITY)
    assert trials[0][0] == (0, 2, 0)
    assert search.best is not None
    assert speed(search.best.place) == fastest()
    assert len(trials) <= 14


def test_nothing_that_fits_ends_the_search() -> None:
    search = Search(AXES, candidates())
    trials = searched(search, needed=lambda place: 1000.0)
    assert search.best is None
    assert "no remaining candidate could fit" in search.ended
    assert len(trials) <= 16


def test_failures_of_another_kind_end_it_early() -> None:
    search = Search(AXES, candidates())
    for trial in range(3):
        step = search.next()
        assert step is not None
        search.tell(step.candidate, Trial(trial, [], Path(), "crash"))
    assert search.next() is None
    assert "not for memory" in search.ended


def test_recomputing_is_not_tried_where_memory_is_no_limit() -> None:
    search = Search(AXES, candidates(capacity=640.0))
    trials = searched(search, capacity=640.0)
    assert all(place[2] == 0 for place, _ in trials)
    assert "not worth trying" in search.counts()


def test_what_a_limit_left_out_is_said_to_be_not_tried() -> None:
    search = Search(AXES, candidates())
    search.limit, search.ended = "sweep.max_trials", "sweep.max_trials=1 was reached"
    assert "not tried (sweep.max_trials)" in search.counts()
    assert "not worth trying" not in search.counts()
