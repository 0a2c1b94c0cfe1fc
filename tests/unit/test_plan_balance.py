"""Who takes how many samples: exact, or an error that lists the nearest exact values; as fast as
trying everything finds, and found at once."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.config import BatchConfig
from llmx.errors import ConfigError
from llmx.observe.report.plan_table import balance_line
from llmx.plan import make_plan
from llmx.plan.balance import (
    Rows,
    balanced_batch,
    busy_fs,
    even_batch,
    even_work,
    fit_speed,
    sample_fs,
    share_out,
    step_fs,
)
from llmx.plan.batch import evenly, solve_batch
from llmx.plan.learned import Observation
from llmx.plan.types import BalancePlan, BatchPlan, RankSpeed
from tests.composing import composed, sized, with_networks
from tests.composing import planned as traced
from tests.effort import at_most

SPEED = st.builds(
    RankSpeed,
    fixed_fs=st.integers(0, 4000),
    token_fs=st.integers(1, 4000),
    square_fs=st.integers(0, 20),
)


def parts(total: int, limits: list[int], least: int = 1):
    """Every way to share ``total`` out."""
    if len(limits) == 1:
        if least <= total <= limits[0]:
            yield (total,)
        return
    for first in range(least, min(limits[0], total) + 1):
        for rest in parts(total - first, limits[1:], least):
            yield (first, *rest)


def balance_of(speeds, limits, *, same_steps: bool, **exchanged) -> BalancePlan:
    return BalancePlan("spec", tuple(speeds), tuple(limits), same_steps, **exchanged)


@settings(max_examples=25)
@given(
    speeds=st.lists(SPEED, min_size=1, max_size=3),
    limit=st.integers(1, 6),
    total=st.integers(1, 10),
    same_steps=st.booleans(),
    exchange=st.none() | st.integers(1, 400),
    overlap=st.booleans(),
)
def test_no_other_split_is_faster(speeds, limit, total, same_steps, exchange, overlap) -> None:
    """Against all micro batches of all ranks; a further micro step costs half a per cent, or what
    is exchanged in it."""
    limits = [limit] * len(speeds)
    exchanged = {"micro_step_fs": exchange, "overlap": overlap}
    balance = balance_of(speeds, limits, same_steps=same_steps, **exchanged)
    try:
        sizes = share_out(total, balance, seq_len=2)
    except ConfigError:
        assert total < len(speeds) or not any(
            len(speeds) * steps <= total <= limit * len(speeds) * steps
            for steps in range(1, total + 1)
        )
        return
    assert sum(map(sum, sizes)) == total
    assert all(1 <= size <= limit for own in sizes for size in own)
    assert not same_steps or len(set(map(len, sizes))) == 1
    found = step_fs(sizes, balance, seq_len=2)
    if same_steps:
        step = {
            size: min(
                max(s.fixed_fs + n * sample_fs(s, 2) for s, n in zip(speeds, part, strict=True))
                for part in parts(size, limits)
            )
            for size in range(len(speeds), min(total, limit * len(speeds)) + 1)
        }
        if exchange is not None:
            hidden = {n: max(each + exchange // 10, exchange) for n, each in step.items()}
            step = hidden if overlap else {n: each + exchange for n, each in step.items()}
        best = [0] + [2**62] * total
        for size in range(1, total + 1):
            for last, seconds in step.items():
                if last <= size:
                    best[size] = min(best[size], best[size - last] + seconds)
        allowed = best[total] * (1 + total / 200) + total if exchange is None else best[total]
        assert best[total] <= found <= allowed
    else:
        best_time = min(
            max(
                -(-n // limit) * s.fixed_fs + n * sample_fs(s, 2)
                for s, n in zip(speeds, part, strict=True)
            )
            for part in parts(total, [total] * len(speeds))
        )
        assert found == best_time


@pytest.mark.usefixtures("made_up_traces")
def test_sixteen_hosts_of_four_types_are_planned_at_once() -> None:
    """The whole plan: memory by type, split, time and what hosts need."""
    types = ("h100_80g", "a100_80g", "a100_40g", "v100_32g")
    hosts = ", ".join(
        f"{{name: n{i}, address: 10.0.0.{i + 1}, slots: 8, device: {types[i % 4]}}}"
        for i in range(16)
    )
    words = ["model=llama3_8b", "model.activation_checkpointing=full", "zero=stage2"]
    words += ["hardware=a100x2_v100x2", f"hardware.hosts=[{hosts}]", "data.seq_len=2048"]
    words += ["hardware.network_gbit_per_s=50"]
    found = traced([*words, "batch.global_batch=4096", "batch.micro_batch=16"])
    with at_most(lines=500_000):
        plan = make_plan(found.experiment, found.knowledge)
    assert len(plan.memory) == 4
    assert plan.world_size == 128
    assert plan.time.step_s < 0.8 * plan.time.even_step_s


def test_fast_ranks_have_more_micro_steps_where_they_may() -> None:
    speeds = [RankSpeed(0, 10), RankSpeed(0, 40)]
    for same_steps, sizes in ((False, ((4,) * 4, (4,))), (True, ((4,) * 4, (1,) * 4))):
        balance = balance_of(speeds, [4, 4], same_steps=same_steps)
        assert share_out(20, balance, seq_len=8) == sizes
        step = step_fs(sizes, balance, seq_len=8)
        assert busy_fs(sizes, speeds, 8) == [step, step]


def test_a_slow_network_is_met_less_often() -> None:
    """Fewer micro steps, though fast ranks then wait: by the exchange that follows from the links,
    before any run has measured it."""
    words = ["model=llama3_8b", "hardware=a100x2_v100x2", "zero=stage3", "data.seq_len=4096"]
    words += ["batch.micro_batch=2", "batch.global_batch=64"]
    link = "hardware.network_gbit_per_s="
    slow, fast = (sized([*words, f"{link}{speed}"]).plan for speed in (10, 10_000))
    assert slow.balance.pending
    assert slow.balance.overlap
    assert slow.balance.micro_step_fs
    assert slow.batch.accumulation < fast.batch.accumulation
    for plan in (slow, fast):
        assert plan.time.step_s <= 1.001 * plan.time.even_step_s
    assert fast.time.step_s < 0.8 * fast.time.even_step_s


def test_what_is_not_measured_yet_does_not_decide_how_many_samples_a_step_has() -> None:
    words = ["hardware=a100x2_v100x2", "model=llama3_8b", "batch.micro_batch=8", "zero=stage3"]
    words += ["batch.accumulation=1"]
    by_sheet, measured, even = (
        composed([*words, f"batch.balance={how}"]).plan.batch.global_batch
        for how in ("spec", "measured", "even")
    )
    assert (by_sheet, measured, even) == (22, 4 * 8, 4 * 8)


@pytest.mark.parametrize("size", [2**24 - 1, 2**24 - 3, 16_777_199])
def test_a_large_batch_is_shared_out_at_once(size: int) -> None:
    speeds = [RankSpeed(10**9, 10**7), RankSpeed(10**9, 3 * 10**7), RankSpeed(10**10, 10**8)]
    for same_steps in (True, False):
        with at_most(lines=500_000):
            balance = balance_of(speeds, [64] * 3, same_steps=same_steps)
            sizes = share_out(size, balance, seq_len=8)
        assert sum(map(sum, sizes)) == size
    equal = None
    with at_most(lines=10_000), contextlib.suppress(ConfigError):  # divisors, not every number
        equal = solve_batch(BatchConfig(global_batch=size), seq_len=8, world=3)
    assert (equal is not None) == (size % 3 == 0)


def test_what_cannot_be_cut_names_what_can() -> None:
    four, two = [RankSpeed(0, 1)] * 4, [RankSpeed(0, 1)] * 2
    for same in (False, True):
        with pytest.raises(ConfigError, match="less than the 4 ranks"):
            share_out(3, balance_of(four, [1] * 4, same_steps=same), seq_len=8)
    with pytest.raises(ConfigError, match=r"Use batch.global_batch=12 or 14"):
        share_out(13, balance_of(two, [1, 1], same_steps=True), seq_len=8)
    with pytest.raises(ConfigError, match="Leave accumulation out"):
        share_out(16, balance_of(two, [2, 2], same_steps=True, accumulation=3), seq_len=8)
    sizes = share_out(13, balance_of(two, [1, 1], same_steps=False), seq_len=8)
    assert sizes == ((1,) * 7, (1,) * 6)


def test_speeds_are_found_again_from_times_and_have_no_negative_part() -> None:
    """Noise must not make a larger micro batch cheaper, nor time below zero."""
    true = RankSpeed(fixed_fs=2 * 10**12, token_fs=3 * 10**9, square_fs=4 * 10**5)
    shapes = [(256, 256**2), (1024, 4 * 256**2), (2048, 8 * 256**2), (1024, 8 * 128**2)]
    found = fit_speed([(t, q, true.time_fs(t, q) / 1e15) for t, q in shapes])
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(true), rel=1e-3)
    for points in ([(100, 10_000, 0.1)], [(100, 10_000, 0.1), (200, 20_000, 0.25)]):
        found = fit_speed(points)
        assert min(found.fixed_fs, found.square_fs) >= 0
        for tokens, squares, seconds in points:
            assert found.time_fs(tokens, squares) / 1e15 == pytest.approx(seconds, rel=0.15)
    with pytest.raises(ValueError, match="above 0"):
        fit_speed([(1, 1, 0.0)])


MIXED = ["hardware=a100x2_v100x2", "batch.global_batch=28", "batch.micro_batch=10"]


def test_the_plan_says_by_what_it_shares_out() -> None:
    plan = composed([*MIXED, "batch.balance=spec"]).plan
    assert balance_line(plan) == "by the data sheets"
    line = balance_line(composed(MIXED).plan)
    assert line == "measured by the ranks at the start; until then by the data sheets"
    weights = "batch.weights={node-a: 1.0, v100_32g: 3.0}"
    assert balance_line(composed([*MIXED, weights]).plan) == "by batch.weights"
    odd = ["batch.global_batch=13", "batch.micro_batch=2", "batch.accumulation=3", "zero=stage2"]
    assert composed([*MIXED[:1], *odd]).plan.time.even_step_s == 0  # there is no even split


def test_a_weight_of_a_device_that_is_not_there_names_what_is() -> None:
    with pytest.raises(ConfigError, match=r'node-a, node-b, v100_32g. Did you mean "v100_32g"\?'):
        composed(["hardware=a100x2_v100x2", "batch.weights={v100: 2}"])


def test_what_is_gained_is_against_an_even_split_that_fits_on_every_rank() -> None:
    plan = composed([*MIXED, "batch.balance=spec"]).plan
    batch = even_batch(replace(plan, balance=replace(plan.balance, limits=(10, 10, 2, 3))))
    assert max(batch.micro_batches) == 2


def test_a_plan_shares_out_by_what_finished_runs_have_shown() -> None:
    """Until its ranks have measured, and it says so; where all types of devices have been seen."""

    def seen(device: str, tflops: float) -> Observation:
        return Observation(device, "bf16", "sft", "llama", 20.0, "sdpa", 2, 1024, tflops)

    words = [*MIXED, "model=llama3_8b", "zero=stage1"]
    done = sized(words)
    runs = tuple(
        replace(seen(device, tflops), precision=done.plan.precision)
        for device, tflops in (("a100_40g", 60.0), ("v100_32g", 10.0))
    )
    of_network = with_networks(done.experiment)
    by_sheets, found, half = (
        make_plan(done.experiment, replace(of_network, runs=known, runs_file="learned.json"))
        for known in ((), runs, runs[:1])
    )
    assert [sum(found.batch.sizes_of(rank)) for rank in range(4)] == [12, 12, 2, 2]
    assert found.batch != by_sheets.batch
    assert half.balance == by_sheets.balance
    until_then = "measured by the ranks at the start; until then"
    assert balance_line(found) == f"{until_then} learned from 2 runs in learned.json"
    assert balance_line(by_sheets) == f"{until_then} by the data sheets"
    spec = sized([*words, "batch.balance=spec"])
    with_runs = make_plan(spec.experiment, replace(of_network, runs=runs))
    assert with_runs.batch == spec.plan.batch


# --- Samples of different lengths -----------------------------------------------------------------

SEQ_LEN = 512


def planned(
    total: int, speeds: list[RankSpeed], limit: int, *, same_steps: bool
) -> tuple[BatchPlan, BalancePlan]:
    balance = BalancePlan("measured", tuple(speeds), (limit,) * len(speeds), same_steps=same_steps)
    return balanced_batch(total, balance, seq_len=SEQ_LEN), balance


def shared_out(rows: Rows, batch: BatchPlan, balance: BalancePlan):
    return even_work(rows, batch=batch, balance=balance, seq_len=SEQ_LEN, pad_to=8)


def times(places, rows: Rows, balance: BalancePlan) -> list[list[int]]:
    """Femtoseconds of each micro step of each rank."""
    found = []
    for own, speed in zip(places, balance.speeds, strict=True):
        found.append([])
        for part in own:
            longest = max((rows.lengths[at] for at in part), default=0)
            length = min(SEQ_LEN, -(-longest // 8) * 8)
            lines = sum(rows.lines[at] for at in part)
            found[-1].append(speed.time_fs(lines * length, lines * length**2) if part else 0)
    return found


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, SEQ_LEN), min_size=4, max_size=40),
    factors=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    limit=st.integers(2, 8),
    same_steps=st.booleans(),
    whole=st.booleans(),
    short=st.integers(0, 3),
)
def test_every_sample_is_trained_once(lengths, factors, limit, same_steps, whole, short) -> None:
    speeds = [RankSpeed(1000, 10 * factor, factor) for factor in factors]
    batch, balance = planned(len(lengths), speeds, limit, same_steps=same_steps)
    lengths = lengths[: len(lengths) - short]  # the last step may have fewer
    squares = None if whole else [n * n for n in lengths]
    rows = Rows([1] * len(lengths), lengths, squares)
    places = shared_out(rows, batch, balance)
    if places is None:
        assert len(set(lengths)) == 1
        return
    assert sorted(at for own in places for part in own for at in part) == list(range(len(lengths)))
    assert [len(own) for own in places] == [len(batch.sizes_of(r)) for r in range(len(speeds))]
    for part in (part for own in places for part in own if part):
        longest = max(lengths[at] for at in part)
        assert len(part) * min(SEQ_LEN, -(-longest // 8) * 8) <= limit * SEQ_LEN
    assert places == shared_out(rows, batch, balance)


@pytest.mark.parametrize(
    ("same_steps", "factors"), [(True, (1, 1)), (True, (2, 5, 8)), (False, (1, 4, 4, 1))]
)
def test_ranks_finish_together(factors, same_steps) -> None:
    """Chats of all lengths: less of a step is spent in waiting than with slices of as many samples;
    what is left are whole samples, of which a slow rank takes four a micro step."""
    draw = random.Random(3)
    speeds = [RankSpeed(0, 10 * factor, factor // 2) for factor in factors]
    total = 48 * len(factors)
    batch, balance = planned(total, speeds, 16, same_steps=same_steps)
    idle = {"work": 0.0, "samples": 0.0}
    for _ in range(5):
        lengths = [min(SEQ_LEN, int(draw.lognormvariate(4.5, 0.9)) + 4) for _ in range(total)]
        rows = Rows([1] * total, lengths)
        work = shared_out(rows, batch, balance)
        steps = [range(len(batch.sizes_of(rank))) for rank in range(len(speeds))]
        slices = tuple(
            tuple(tuple(batch.places(rank, step, samples=total)) for step in own)
            for rank, own in enumerate(steps)
        )
        for name, places in (("work", work), ("samples", slices)):
            found = times(places, rows, balance)
            if same_steps:
                longest = sum(map(max, zip(*found, strict=True)))
            else:
                longest = max(map(sum, found))
            idle[name] += 1 - sum(map(sum, found)) / (longest * len(found))
    assert idle["work"] / 5 < 0.15
    assert idle["work"] < 0.7 * idle["samples"]


def test_the_squared_part_counts() -> None:
    """Two long rows cost as much attention as many short ones with more tokens."""
    batch, balance = planned(34, [RankSpeed(0, 1, 10)] * 2, 34, same_steps=True)
    rows = Rows([1] * 34, [512] * 2 + [128] * 32)
    (first,), (second,) = shared_out(rows, batch, balance)
    assert set(first) == {0, 1}, (first, second)
    alike = Rows([1] * 34, [SEQ_LEN] * 34)
    assert shared_out(alike, batch, balance) is None, "left to the plan"


# --- Equal ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "world", "message"),
    [
        ({"global_batch": 13, "micro_batch": 2}, 2, "Use batch.global_batch=12 or 16"),
        ({"global_batch": 3, "micro_batch": 2}, 4, "less than the 4 ranks"),
        ({"global_batch": 16, "micro_batch": 2, "accumulation": 3}, 2, "4 x 3 = 12"),
        ({"tokens_per_step": 10**13, "micro_batch": 8}, 2, "at most 16777216 are possible"),
    ],
)
def test_what_cannot_be_cut_equally_names_what_can(batch, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        solve_batch(BatchConfig(**batch), seq_len=8, world=world)
    plan = solve_batch(BatchConfig(tokens_per_step=20_000, micro_batch=3), seq_len=8, world=world)
    assert plan.global_batch % (world * 3) == 0, "rounded to whole micro steps"
    assert abs(plan.tokens_per_step - 20_000) <= world * 3 * 8 / 2


@given(target=st.integers(1, 400), micro=st.integers(1, 20), world=st.integers(1, 9))
def test_the_smallest_accumulation_that_fits_is_found(target, micro, world) -> None:
    """Against trying every accumulation in turn."""
    expected = None
    for accumulation in range(1, target + 1):
        if target % accumulation == 0:
            shares = evenly(target // accumulation, world)
            if min(shares) >= 1 and max(shares) <= micro:
                expected = (accumulation, shares)
                break
    try:
        plan = solve_batch(
            BatchConfig(global_batch=target, micro_batch=micro), seq_len=8, world=world
        )
    except ConfigError:
        assert expected is None
    else:
        assert (plan.accumulation, plan.micro_batches) == expected
        assert plan.global_batch == target == sum(plan.micro_batches) * plan.accumulation
        assert plan.tokens_per_step == target * 8


@given(st.integers(0, 500), st.integers(1, 9))
def test_even_parts_are_everything(total, count) -> None:
    parts = evenly(total, count)
    assert (len(parts), sum(parts)) == (count, total)
    assert parts[0] - parts[-1] <= 1
    assert list(parts) == sorted(parts, reverse=True)
