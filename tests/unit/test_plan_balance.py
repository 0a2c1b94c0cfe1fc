"""Who takes how many samples: exact, as fast as trying everything finds, and found at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.config import BatchConfig
from llmx.errors import ConfigError
from llmx.observe.report.plan_table import balance_line
from llmx.plan import make_plan
from llmx.plan.balance import (
    against_even,
    balanced_batch,
    busy_fs,
    fit_speed,
    sample_fs,
    share_out,
    step_fs,
    with_balance,
)
from llmx.plan.batch import wanted_global_batch
from llmx.plan.types import BalancePlan, RankSpeed
from llmx.run.speeds import keep_speeds, known_speeds
from tests.composing import composed
from tests.effort import at_most
from tests.rundirs import experiment

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


def test_slower_devices_get_smaller_micro_batches() -> None:
    weights = [312.0, 312.0, 125.0, 125.0]
    batch = BatchConfig(micro_batch=5, accumulation=2)
    size = wanted_global_batch(batch, seq_len=8, weights=weights)
    assert size == 28
    speeds = tuple(RankSpeed(0, round(1e9 / weight)) for weight in weights)
    balance = BalancePlan("spec", speeds, (5,) * 4, same_steps=True, accumulation=2)
    plan = balanced_batch(size, balance, seq_len=8)
    assert (plan.micro_batches, plan.accumulation, plan.sizes) == ((5, 5, 2, 2), 2, ())


@settings(deadline=None, max_examples=25)
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
    arguments = {"speeds": speeds, "limits": limits, "seq_len": 2, "same_steps": same_steps}
    arguments |= {"micro_step_fs": exchange, "overlap": overlap}
    try:
        sizes = share_out(total, **arguments)
    except ConfigError:
        assert total < len(speeds) or not any(
            len(speeds) * steps <= total <= limit * len(speeds) * steps
            for steps in range(1, total + 1)
        )
        return
    assert sum(map(sum, sizes)) == total
    assert all(1 <= size <= limit for own in sizes for size in own)
    assert not same_steps or len(set(map(len, sizes))) == 1
    cost = {"micro_step_fs": exchange or 0, "overlap": overlap and exchange is not None}
    found = step_fs(sizes, speeds, 2, same_steps=same_steps, **cost)
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


@pytest.mark.parametrize("zero", ["stage1", "stage2"])
def test_sixteen_hosts_of_four_types_are_planned_at_once(zero: str) -> None:
    """The whole plan: memory by type, split, time and what hosts need."""
    types = ("h100_80g", "a100_80g", "a100_40g", "v100_32g")
    hosts = ", ".join(
        f"{{name: n{i}, address: 10.0.0.{i + 1}, slots: 8, device: {types[i % 4]}}}"
        for i in range(16)
    )
    words = ["model=llama3_8b", "model.activation_checkpointing=full", f"zero={zero}"]
    words += ["hardware=a100x2_v100x2", f"hardware.hosts=[{hosts}]", "data.seq_len=2048"]
    exp = composed([*words, "batch.global_batch=4096", "batch.micro_batch=16"]).experiment
    with at_most(lines=500_000):
        plan = make_plan(exp)
    assert plan.world_size == 128
    assert plan.time is not None
    assert plan.time.step_s < 0.8 * plan.time.even_step_s


def test_fast_ranks_have_more_micro_steps_where_they_may() -> None:
    fast, slow = RankSpeed(0, 10), RankSpeed(0, 40)
    arguments = {"speeds": [fast, slow], "limits": [4, 4], "seq_len": 8}
    sizes = share_out(20, same_steps=False, **arguments)
    assert sizes == ((4, 4, 4, 4), (4,))
    step = step_fs(sizes, [fast, slow], 8, same_steps=False)
    assert busy_fs(sizes, [fast, slow], 8) == [step, step]
    together = share_out(20, same_steps=True, **arguments)
    assert together == ((4, 4, 4, 4), (1, 1, 1, 1))
    step = step_fs(together, [fast, slow], 8, same_steps=True)
    assert busy_fs(together, [fast, slow], 8) == [step, step]


def test_a_slow_network_is_met_less_often() -> None:
    """Fewer micro steps, though fast ranks then wait: by the exchange that follows from the links,
    before any run has measured it."""
    words = ["model=llama3_8b", "hardware=a100x2_v100x2", "zero=stage3", "data.seq_len=4096"]
    words += ["batch.micro_batch=2", "batch.global_batch=64"]
    slow, fast = (
        composed([*words, f"hardware.network_gbit_per_s={speed}"]).plan for speed in (10, 10_000)
    )
    assert slow.balance is not None
    assert slow.balance.pending
    assert slow.balance.overlap
    assert slow.balance.micro_step_fs
    assert slow.batch.accumulation < fast.batch.accumulation
    assert slow.time is not None
    assert fast.time is not None
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
    assert by_sheet < measured == even == 4 * 8


@pytest.mark.parametrize("size", [2**24, 2**24 - 3, 16_777_199])
@pytest.mark.parametrize("same_steps", [False, True])
def test_a_large_batch_is_shared_out_at_once(size, same_steps) -> None:
    speeds = [RankSpeed(10**9, 10**7), RankSpeed(10**9, 3 * 10**7), RankSpeed(10**10, 10**8)]
    with at_most(lines=500_000):
        sizes = share_out(size, speeds=speeds, limits=[64] * 3, seq_len=8, same_steps=same_steps)
    assert sum(map(sum, sizes)) == size


def test_what_cannot_be_cut_names_what_can() -> None:
    arguments = {"speeds": [RankSpeed(0, 1)] * 2, "seq_len": 8}
    with pytest.raises(ConfigError, match="less than the 4 ranks"):
        share_out(3, speeds=[RankSpeed(0, 1)] * 4, limits=[1] * 4, seq_len=8, same_steps=False)
    with pytest.raises(ConfigError, match=r"Use batch.global_batch=12 or 14"):
        share_out(13, limits=[1, 1], same_steps=True, **arguments)
    with pytest.raises(ConfigError, match="Leave accumulation out"):
        share_out(16, limits=[2, 2], same_steps=True, accumulation=3, **arguments)
    assert share_out(13, limits=[1, 1], same_steps=False, **arguments) == ((1,) * 7, (1,) * 6)


def test_speeds_are_found_again_from_times() -> None:
    true = RankSpeed(fixed_fs=2 * 10**12, token_fs=3 * 10**9, square_fs=4 * 10**5)
    shapes = [(256, 256**2), (1024, 4 * 256**2), (2048, 8 * 256**2), (1024, 8 * 128**2)]
    points = [(t, q, true.time_fs(t, q) / 1e15) for t, q in shapes]
    found = fit_speed(points)
    assert found.fixed_fs == pytest.approx(true.fixed_fs, rel=1e-3)
    assert found.token_fs == pytest.approx(true.token_fs, rel=1e-3)
    assert found.square_fs == pytest.approx(true.square_fs, rel=1e-3)


def test_a_fit_has_no_negative_part() -> None:
    """Noise must not make a larger micro batch cheaper, nor time below zero."""
    for points in ([(100, 10_000, 0.1)], [(100, 10_000, 0.1), (200, 20_000, 0.25)]):
        found = fit_speed(points)
        assert found.fixed_fs >= 0
        assert found.square_fs >= 0
        for tokens, squares, seconds in points:
            assert found.time_fs(tokens, squares) / 1e15 == pytest.approx(seconds, rel=0.15)
    with pytest.raises(ValueError, match="above 0"):
        fit_speed([(1, 1, 0.0)])


def test_the_plan_says_what_it_gains_and_who_waits() -> None:
    mixed = ["hardware=a100x2_v100x2", "batch.global_batch=28", "batch.micro_batch=10"]
    plan = composed([*mixed, "batch.balance=spec"]).plan
    assert balance_line(plan) == "by the data sheets"  # the rest is in the predicted time
    line = balance_line(replace(plan, time=None))
    assert line.startswith("by the data sheets; a step takes 0.57 of the time of the even split")
    assert line.endswith("(a100_40g) 0 %, node-b (v100_32g) 0.16 % (without communication)")
    line = balance_line(composed(mixed).plan)
    assert line == "measured by the ranks at the start; until then by the data sheets"
    weights = "batch.weights={node-a: 1.0, v100_32g: 3.0}"
    assert balance_line(composed([*mixed, weights]).plan) == "by batch.weights"
    odd = ["batch.global_batch=13", "batch.micro_batch=2", "batch.accumulation=3", "zero=stage2"]
    assert "there is no even split" in balance_line(composed([*mixed[:1], *odd]).plan)


def test_a_weight_of_a_device_that_is_not_there_names_what_is() -> None:
    with pytest.raises(ConfigError) as caught:
        composed(["hardware=a100x2_v100x2", "batch.weights={v100: 2}"])
    assert 'a100_40g, node-a, node-b, v100_32g. Did you mean "v100_32g"?' in str(caught.value)


def test_what_is_gained_is_against_an_even_split_that_fits_on_every_rank() -> None:
    words = ["hardware=a100x2_v100x2", "batch.global_batch=28", "batch.micro_batch=10"]
    plan = composed([*words, "batch.balance=spec"]).plan
    assert plan.balance is not None
    sample = plan.batch.seq_len
    speeds = (RankSpeed(10 * sample, 1),) * 4
    unequal = replace(plan.balance, speeds=speeds, limits=(10, 10, 2, 3))
    _, even, _ = against_even(replace(plan, balance=unequal))
    assert even == 4 * (10 + 2) * sample, "four micro steps of two samples, not one of seven"


def test_a_plan_takes_the_speeds_of_an_earlier_run(tmp_path: Path) -> None:
    """And says so; another model, other hosts or another stage has none."""
    exp = experiment(
        tmp_path / "run",
        batch={"global_batch": 12, "micro_batch": 12, "accumulation": None, "balance": "measured"},
        zero={"stage": 1},
    )
    plan = make_plan(exp)
    assert known_speeds(exp, plan) is None
    assert plan.balance is not None
    measured = replace(plan.balance, speeds=(RankSpeed(0, 10), RankSpeed(0, 50)), pending=False)
    keep_speeds(exp, with_balance(plan, measured), run_dir=tmp_path / "run")
    known = known_speeds(exp, make_plan(exp))
    assert known is not None
    found = make_plan(exp, measured_speeds=known)
    assert [sum(found.batch.sizes_of(rank)) for rank in range(2)] == [10, 2]
    assert "as an earlier run here has measured" in balance_line(found)
    assert known.source in balance_line(found)
    assert "by the data sheets" in balance_line(plan)
    for groups in ({"zero": {"stage": 2}}, {"data": {"seq_len": 64}}, {"precision": "bf16"}):
        other = experiment(tmp_path / "run", **{"batch": {"balance": "measured"}, **groups})
        assert known_speeds(other, make_plan(other)) is None
    (Path(known.source)).write_text("{")
    assert known_speeds(exp, plan) is None
