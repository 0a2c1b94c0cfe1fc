"""What a sweep decides: which trials need not run, on which slots one runs, what ``tune`` tries."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from llmx.config import HardwareConfig, HostConfig, known_keys
from llmx.errors import ConfigError
from llmx.run.sweepdir import Trial
from llmx.sweep.prune import NO_MEMORY, OutOfMemory, impossible, key_of, needs_more
from llmx.sweep.slots import Placed, Slots, first_of, placed_on
from llmx.sweep.tune import Candidate, Search
from tests.composing import composed, planned

# --- What need not run -----------------------------------------------------------------------

TWO_TYPES = ["model=llama2_7b", "data=demo", "hardware=a100x2_v100x2"]
SMALL = ["hardware=cpu2", "model.config.num_hidden_layers=1", "batch.global_batch=32"]
SPLIT = ["zero=stage2", "batch.micro_batch=4"]


def ran_out() -> OutOfMemory:
    """The trial of SPLIT."""
    made = planned([*SMALL, *SPLIT])
    return OutOfMemory(0, made.experiment, made.plan)


def test_names_and_settings_of_the_sweep_make_no_other_trial() -> None:
    one = key_of(composed([*SMALL, *SPLIT], run_dir="/runs/a").experiment)
    for words, same in (("sweep.fail_fast=true", True), ("zero=stage3", False), ("seed=1", False)):
        exp = composed([*SMALL, *SPLIT, words], run_dir="/runs/b").experiment
        assert (key_of(exp) == one) is same


def test_what_needs_as_much_or_more_is_left_out() -> None:
    oom = ran_out()
    for words, is_left_out in (
        ("zero=stage2 batch.micro_batch=4", True),
        ("zero=stage0 batch.micro_batch=16", True),
        ("zero=stage1 batch.micro_batch=8 optim.lr=0.5 tracking.project=other", True),
        ("zero=stage2 batch.micro_batch=2", False),
        ("zero=stage3 batch.micro_batch=16", False),
        ("zero=stage1 batch.micro_batch=2", False),
        ("zero=stage1 batch.micro_batch=8 data.seq_len=64", False),
        ("zero=stage1 batch.micro_batch=8 optim=sgd", False),
    ):
        made = composed([*SMALL, *words.split()])
        said = needs_more(made.experiment, made.plan, [oom])
        assert said.startswith("trial 0 ran out of memory and needs no more" if is_left_out else "")
        assert bool(said) is is_left_out, words


@pytest.mark.usefixtures("made_up_traces")
def test_fewer_micro_steps_may_need_less_although_the_micro_batch_is_larger() -> None:
    """One micro step sums no gradients in fp32: the plan says that it needs less."""
    made = planned([*SMALL, "zero=stage2", "batch.micro_batch=8"])
    (part,) = made.plan.memory
    less = dataclasses.replace(part, activations_gib=0.0, context_gib=0.0)
    plan = dataclasses.replace(made.plan, memory=(less,))
    oom = ran_out()
    assert needs_more(made.experiment, made.plan, [oom])
    assert needs_more(made.experiment, plan, [oom]) == ""
    # Where the plan knows no memory, the micro batch decides.
    known = dataclasses.replace(oom, plan=dataclasses.replace(oom.plan, memory=()))
    for micro_batch, runs in ((2, True), (8, False)):
        made = composed([*SMALL, "zero=stage2", f"batch.micro_batch={micro_batch}"])
        plan = dataclasses.replace(made.plan, memory=())
        assert (needs_more(made.experiment, plan, [known]) == "") is runs


@pytest.mark.usefixtures("made_up_traces")
def test_only_model_states_that_no_device_holds_are_never_started() -> None:
    made = planned([*TWO_TYPES, "zero=stage0", "precision=fp32"])
    said = impossible(made.experiment, made.plan)
    assert said.startswith("parameters, gradients and optimizer states alone take")
    assert "v100" in said or "a100" in said
    # The plan's prediction of activations is no proof.
    words = ["zero=stage3", "zero.offload_optimizer=cpu", "batch.micro_batch=64",
             "batch.balance=even", "batch.global_batch=256", "data.seq_len=4096"]  # fmt: skip
    made = planned([*TWO_TYPES, *words])
    assert not all(part.fits for part in made.plan.memory), "the plan itself says it does not fit"
    assert impossible(made.experiment, made.plan) == ""


def test_every_key_that_takes_no_memory_exists() -> None:
    names = known_keys()
    for pattern in NO_MEMORY:
        stem = pattern.removesuffix("*").removesuffix(".").removesuffix("_")
        assert any(name.startswith(stem) for name in names), pattern


# --- On which slots --------------------------------------------------------------------------


def hosts(*slots: int, device: str = "a100_40g", first: str = "a") -> list[HostConfig]:
    names = (chr(ord(first) + at) for at in range(len(slots)))
    return [
        HostConfig(name=name, slots=count, device=device, memory_gib=64.0)
        for name, count in zip(names, slots, strict=True)
    ]


TYPES = HardwareConfig(hosts=[*hosts(2), *hosts(2, device="v100_32g", first="b")])


@pytest.mark.parametrize(
    ("slots", "count", "placed"),
    [
        ((4, 2), 2, ["b:0,1", "a:0,1", "a:2,3"]),  # the fullest first
        ((2, 3), 2, ["a:0,1", "b:0,1"]),  # on one host, where one has so many
        ((2, 2, 2, 2), 3, ["a:0,1 b:0", "c:0,1 d:0"]),  # all of one shape
        (TYPES, 1, ["a:0", "a:1", "b:0", "b:1"]),
        (TYPES, 2, ["a:0,1", "b:0,1"]),  # of one type
    ],
)
def test_trials_share_no_slot(slots: object, count: int, placed: list[str]) -> None:
    pool = HardwareConfig(hosts=hosts(*slots)) if isinstance(slots, tuple) else slots
    free, first, taken = Slots(), first_of(pool, count), []
    while (one := free.take(pool.hosts, count, first)) is not None:
        taken.append(one)
    assert [str(one) for one in taken] == placed
    free.give_back(taken[0])
    assert str(free.take(pool.hosts, count, first)) == placed[0]


def test_a_trial_larger_than_any_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 slots of a100_40g, 2 slots of v100_32g.* at most 2"):
        first_of(TYPES, 3)


def test_the_part_is_written_into_the_hardware_of_the_trial() -> None:
    exp = composed(TWO_TYPES).experiment
    node_b = exp.hardware.hosts[1]
    found = placed_on(exp, Placed(((node_b, (1,)),)))
    (host,) = found.hardware.hosts
    assert (host.name, host.slots, host.gpus) == ("node-b", 1, ["1"])
    assert host.memory_gib == 128, "its share of the RAM"
    assert found.hardware.env["LLMX_RANKS_PER_HOST"] == "2"
    mine = dataclasses.replace(node_b, gpus=["4", "6"])
    (host,) = placed_on(exp, Placed(((mine, (1,)),))).hardware.hosts
    assert host.gpus == ["6"], "of those that the user chose"
    cpu = composed(["hardware=cpu2"]).experiment
    found = placed_on(cpu, Placed(((cpu.hardware.hosts[0], (1,)),)))
    assert found.hardware.hosts[0].gpus == [], "a CPU rank has no device"
    assert found.hardware.env["LLMX_RANKS_PER_HOST"] == "2"


# --- What tune tries next: surfaces whose fastest point is known -----------------------------

AXES = {
    "zero": ("stage1", "stage2", "stage3", "stage3_offload"),
    "batch.micro_batch": ("1", "2", "4", "8", "16", "32", "64"),
    "model.activation_checkpointing": ("none", "selective", "full"),
}
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
    for place in itertools.product(*(range(len(values)) for values in AXES.values())):
        chosen = [values[at] for values, at in zip(AXES.values(), place, strict=True)]
        words = tuple(f"{key}={value}" for key, value in zip(AXES, chosen, strict=True))
        stage, _, checkpointing = (AT_MOST.get(value, 1.0) for value in chosen)
        found.append(
            Candidate(
                words, (words[0], words[2]), place[1], speed=speed(place), memory_gib=plan(place),
                capacity_gib=capacity, at_most=stage * checkpointing,
            )
        )  # fmt: skip
    return found


def place_of(candidate: Candidate) -> Place:
    words = [word.partition("=")[2] for word in candidate.words]
    stage, micro, way = (v.index(w) for v, w in zip(AXES.values(), words, strict=True))
    return stage, micro, way


def searched(
    search: Search,
    *,
    truth: Callable[[Place], float] = speed,
    needed: Callable[[Place], float] = memory,
    capacity: float = CAPACITY,
) -> list[Place]:
    """The trials, in order."""
    trials: list[Place] = []
    while (step := search.next()) is not None and len(trials) < 100:
        candidate, why = step
        place = place_of(candidate)
        assert place not in trials
        assert why
        trial = Trial(len(trials), [], Path(), "oom")
        if needed(place) <= capacity:
            measured = {"tokens_per_s": truth(place), "memory_gib": needed(place)}
            trial = Trial(len(trials), [], Path(), "ok", **measured)
        search.trials[candidate] = trial
        trials.append(place)
    return trials


def fastest(truth: Callable[[Place], float] = speed, capacity: float = CAPACITY) -> float:
    places = [place_of(candidate) for candidate in candidates()]
    return max(truth(place) for place in places if memory(place) <= capacity)


@pytest.mark.parametrize("capacity", [8.0, 20.0, 34.0, 48.0, 80.0, 640.0])
@pytest.mark.parametrize("saturates", [0, 1, 3, 5, 99])
def test_the_fastest_point_is_found_in_few_of_84_trials(saturates: int, capacity: float) -> None:
    """Whatever the device has, and where the plan is 30 % off."""
    truth = functools.partial(speed, saturates=saturates)
    for wrong in (0.7, 1.0, 1.3):
        planned = candidates(capacity=capacity, plan=functools.partial(memory, scale=wrong))
        search = Search(planned)
        trials = searched(search, truth=truth, capacity=capacity)
        assert truth(place_of(search.best)) >= 0.95 * fastest(truth, capacity)
        assert len(trials) <= 14
        assert sum(search.counts().values()) == 84
        if capacity == 640.0:  # recomputing is not tried where memory is no limit
            assert all(place[2] == 0 for place in trials)
            assert "not worth trying" in search.counts()


def test_from_below_where_nothing_is_known_of_memory() -> None:
    search = Search(candidates(capacity=0.0))
    trials = searched(search)
    assert trials[0] == (0, 0, 0)
    assert speed(place_of(search.best)) == fastest()
    assert len(trials) <= 14


def test_nothing_that_fits_ends_the_search() -> None:
    search = Search(candidates())
    assert len(searched(search, needed=lambda place: 1000.0)) <= 16
    assert search.best is None
    assert "no remaining candidate could fit" in search.ended
    search = Search(candidates())
    search.limit, search.ended = "sweep.max_trials", "sweep.max_trials=1 was reached"
    assert "not tried (sweep.max_trials)" in search.counts()
    assert "not worth trying" not in search.counts()


def test_failures_of_another_kind_end_it_early() -> None:
    search = Search(candidates())
    for trial in range(3):
        step = search.next()
        search.trials[step[0]] = Trial(trial, [], Path(), "crash")
    assert search.next() is None
    assert "not for memory" in search.ended
