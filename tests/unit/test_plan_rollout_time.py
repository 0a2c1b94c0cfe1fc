"""The predicted time of drawing, by numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmx.cli.plan import main
from llmx.plan import Plan
from llmx.plan.geometry import Geometry
from llmx.plan.rollout_time import SamplerSpeed, Samples, server_problem
from llmx.plan.types import DrawnSamples
from tests.composing import composed

A100 = SamplerSpeed(flops_per_s=0.75 * 312e12, bytes_per_s=0.7 * 1555e9)
V100 = SamplerSpeed(flops_per_s=0.4 * 125e12, bytes_per_s=0.7 * 900e9)
SHAPE = Geometry(
    num_parameters=7_000_000_000, hidden_size=4096, intermediate_size=11008, num_layers=32,
    kv_size=1024, vocab_size=32000, query_size=4096,
)  # fmt: skip
SAMPLES = Samples(
    SHAPE, width=2, num_prompts=16, drawn=DrawnSamples(8, new_tokens=256), seq_len=1024
)
MIXED = [
    "task=grpo", "model=llama3_8b", "hardware=a100x2_v100x2", "adapter=lora", "data.seq_len=1024",
    "batch.global_batch=64", "rollout.hosts=[node-b]",
]  # fmt: skip


@pytest.mark.parametrize(("speed", "gb_per_s"), [(A100, 0.7 * 1555), (V100, 0.7 * 900)])
def test_a_decoding_step_reads_the_weights_and_the_cache(
    speed: SamplerSpeed, gb_per_s: float
) -> None:
    """14 GB of weights; for each of 64 rows 768 + 128 tokens of 2 x 32 x 1024 x 2 bytes."""
    cache_gb = 64 * 896 * 131_072 / 1e9  # 7.5
    assert SAMPLES.decoding_step_s(64, speed) == pytest.approx((14 + cache_gb) / gb_per_s)


def test_many_rows_are_limited_by_arithmetic_and_small_models_by_kernels() -> None:
    without_cache = replace(SAMPLES, shape=replace(SHAPE, kv_size=0))
    flops = 2 * 7e9 + 4 * 32 * 4096 * 896
    expected = 1000 * flops / (0.4 * 125e12)
    assert without_cache.decoding_step_s(1000, V100) == pytest.approx(expected)
    slow_launches = replace(V100, layer_s=0.01)
    assert without_cache.decoding_step_s(1, slow_launches) == pytest.approx(0.32)


def test_a_device_draws_at_most_64_completions_at_once() -> None:
    """100 completions of 13 prompts are two rounds of 50."""
    prefill_s = 13 * 768 * (2 * 7e9 + 4 * 32 * 4096 * 384) / (0.75 * 312e12)
    expected = prefill_s + 2 * 256 * SAMPLES.decoding_step_s(50, A100)
    assert SAMPLES.drawing_s(100, A100) == pytest.approx(expected)
    assert SAMPLES.drawing_s(0, A100) == 0


def test_ranks_draw_equal_parts_and_a_faster_server_more() -> None:
    a100_s, v100_s = SAMPLES.by_ranks_s([A100, V100])
    assert (a100_s, v100_s) == (SAMPLES.drawing_s(64, A100), SAMPLES.drawing_s(64, V100))
    # Eight batches of 16: the A100, 1.7 times as fast, draws five of them.
    fast_s, slow_s = SAMPLES.by_servers_s([A100, V100], world=2)
    assert fast_s == pytest.approx(5 * SAMPLES.drawing_s(16, A100))
    assert slow_s == pytest.approx(3 * SAMPLES.drawing_s(16, V100))
    # One server draws the parts of the ranks, one after the other.
    assert SAMPLES.by_servers_s([V100], world=2) == [2 * SAMPLES.drawing_s(64, V100)]


def test_a_server_that_does_not_fit_is_named() -> None:
    """14 GB of weights, and 64 rows of 1,024 tokens of 128 KiB: 13.0 + 8 + 1 GiB."""
    needed = SAMPLES.server_gib(context_gib=1.0)
    assert needed == pytest.approx(14e9 / 2**30 + 8 + 1)
    assert server_problem("v100_32g", needed, 32) == ""
    assert "v100_16g: a rollout server takes 22.0 GiB" in server_problem("v100_16g", needed, 16)


def test_a_step_is_the_sum_of_its_parts_or_the_longer_one() -> None:
    plan = composed(MIXED).plan
    assert plan.precision == "fp16"  # V100s draw
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.time is not None
    parts = plan.time.rollout
    assert parts is not None
    total_s = parts.draws_s + parts.trains_s + parts.weights_s
    assert plan.time.step_s == pytest.approx(total_s)
    assert parts.training_idle == pytest.approx(1 - parts.trains_s / total_s)
    ahead = composed([*MIXED, "rollout.max_staleness=1"]).plan
    assert ahead.time is not None
    assert ahead.time.step_s == pytest.approx(max(parts.trains_s, parts.draws_s + parts.weights_s))


def test_two_updates_take_twice_the_training() -> None:
    once, twice = (
        composed([*MIXED[:-1], f"task.options.updates={updates}"]).plan.time for updates in (1, 2)
    )
    assert once is not None
    assert twice is not None
    assert once.rollout is not None
    assert twice.rollout is not None
    assert twice.rollout.trains_s == pytest.approx(2 * once.rollout.trains_s)
    assert twice.rollout.draws_s == once.rollout.draws_s
    assert not once.rollout.drawing_idle  # the ranks draw


def test_plan_prints_who_waits(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_TRACES", "off")
    assert main(MIXED) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "completions of 256 tokens (assumed" in text
