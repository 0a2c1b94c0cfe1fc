"""The predicted time of a step: what is sent at each ZeRO stage, what bounds it, what follows."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmx.errors import ConfigError
from llmx.plan import make_plan
from llmx.plan.step_time import (
    LAYER_S,
    LINK_REACHED,
    MEMORY_REACHED,
    REACHED,
    STAGE_3_LAYER_S,
    LearnedSpeeds,
    step_time,
)
from llmx.plan.types import Plan, TimePlan
from tests.composing import composed as composed_without
from tests.composing import sized as composed
from tests.composing import with_networks

LLAMA = ["model=llama3_8b", "hardware=a100x8", "data.seq_len=4096", "batch.micro_batch=2",
         "batch.global_batch=64"]  # fmt: skip
RANKS, MICRO_STEPS = 8, 4


def planned(*words: str) -> TimePlan:
    return composed([*LLAMA, *words]).plan.time


def sent(*words: str) -> dict[str, float]:
    """By kind of communication, in units of the model's bytes."""
    plan = composed([*LLAMA, *words]).plan
    model = 2 * plan.num_parameters / 1e9
    return {one.name: one.gb / model for one in plan.time.exchanges}


PART = (RANKS - 1) / RANKS


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ("stage0", {"all-reduce of gradients": 2}),
        # bf16 with fp32 sums: DeepSpeed reduces the sums, of four bytes.
        ("stage1 zero.grad_accum_dtype=fp32",
         {"all-reduce of gradients": 4, "all-gather of parameters": 1}),
        ("stage1 zero.grad_accum_dtype=precision",
         {"all-reduce of gradients": 2, "all-gather of parameters": 1}),
        ("stage2", {"all-reduce of gradients": 2 * MICRO_STEPS, "all-gather of parameters": 1}),
        ("stage3 zero.max_reuse_distance=0",
         {"all-gather, forward": MICRO_STEPS, "all-gather, backward": MICRO_STEPS,
          "reduce-scatter of gradients": MICRO_STEPS}),
    ],
)  # fmt: skip
def test_what_each_stage_sends(zero: str, expected: dict[str, float]) -> None:
    first, *more = zero.split()
    found = sent(f"zero={first}", *more)
    assert found == pytest.approx({name: PART * times for name, times in expected.items()})


def test_what_stage_3_keeps_is_not_gathered_again() -> None:
    kept = sent("zero=stage3", "zero.max_reuse_distance=8e9")
    assert kept["all-gather, forward"] == pytest.approx(PART * MICRO_STEPS)
    assert kept["all-gather, backward"] == pytest.approx(PART * MICRO_STEPS / 2, rel=0.02)


def test_zeropp_sends_less() -> None:
    """hpZ: one gathering over all ranks a step, the others in a host; qwZ: 8 bits; qgZ: 4 bits."""
    mixed = ["hardware=a800x2_n7", "batch.global_batch=56", "zero=stage3"]
    again, hpz = "zero.max_reuse_distance=0", "zero.hpz_partition_size=2"
    qwz, qgz = "zero.quantized_weights=true", "zero.quantized_gradients=true"
    whole = 13 / 14
    assert sent(*mixed, again)["all-gather, forward"] == pytest.approx(2 * whole)
    found = sent(*mixed, again, hpz)
    assert found["all-gather, first forward"] == pytest.approx(whole)
    assert found["all-gather, hpZ"] == pytest.approx((2 - 1 + 2) * 1 / 2)
    found = sent(*mixed, again, hpz, qwz, qgz)
    assert found["all-gather, first forward"] == pytest.approx(whole / 2)
    assert found["qgZ in a host"] == pytest.approx(2 / 4 * 1 / 2)
    assert found["qgZ between hosts"] == pytest.approx(2 / 4 * 6 / 7)
    times = [planned(*mixed, *more).step_s for more in ([], [hpz], [hpz, qgz])]
    assert times == sorted(times, reverse=True)


def test_a_step_is_its_operations_at_the_assumed_part_of_the_peak() -> None:
    done = composed([*LLAMA, "zero=stage2"])
    found, device = done.plan.time, done.experiment.hardware.devices["a100_80g"]
    # 6 N of what multiplies, and attention: 8.03 B parameters without the 0.53 B looked up.
    tokens = 64 * 4096
    by_hand = (6 * 7.505e9 + 6 * 32 * 4096 * 4096) * tokens
    assert found.flops == pytest.approx(by_hand, rel=1e-3)
    products, attention = REACHED[device.compute_capability]
    a_token = 6 * 7.505e9 / products + 6 * 32 * 4096 * 4096 / attention
    # 70 times the hidden states of a layer forward, twice that backward; logits.
    moved = 3 * 70 * 2 * 4096 * 32 + 40 * 128256
    seconds = a_token / 312e12 + moved / (device.memory_gb_per_s * 1e9 * MEMORY_REACHED)
    assert found.computing_s == pytest.approx(seconds * tokens / RANKS, rel=1e-3)
    assert found.step_s == pytest.approx(found.computing_s + found.exposed_s + found.update_s)
    assert found.tokens_per_s == pytest.approx(tokens / found.step_s)
    peak = RANKS * 312e12 * found.step_s
    assert dict(found.mfu)["a100_80g"] == pytest.approx(found.flops / peak)
    assert found.bottleneck == "computing"
    assert found.exposed_s < found.communication_s  # hidden behind the backward pass


def test_activation_checkpointing_computes_a_forward_pass_again_but_for_the_head() -> None:
    none, selective, full = (
        planned("zero=stage2", f"model.activation_checkpointing={how}")
        for how in ("none", "selective", "full")
    )
    assert none.flops == selective.flops == full.flops
    assert 1.29 < full.computing_s / none.computing_s < 4 / 3
    assert none.computing_s < selective.computing_s < full.computing_s
    assert dict(full.mfu)["a100_80g"] < dict(none.mfu)["a100_80g"]


def test_weights_of_4_bits_are_unpacked_in_each_pass() -> None:
    """Published: a step of QLoRA takes 1.25 to 1.5 times that of LoRA."""
    words = ["zero=stage2", "model=llama2_7b", "batch.micro_batch=1", "batch.global_batch=8",
             "model.activation_checkpointing=full"]  # fmt: skip
    short, long = (
        [planned(*words, f"adapter={name}", length).computing_s for name in ("lora", "qlora")]
        for length in ("data.seq_len=1024", "data.seq_len=4096")
    )
    assert 1.25 < short[1] / short[0] < 1.5
    # Once for a micro batch, however long it is.
    assert long[1] - long[0] == pytest.approx(short[1] - short[0])


def test_published_speeds_are_predicted_or_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    rows = importlib.import_module("plan_published")
    for row in (row for row in rows.ROWS if row.published):
        exp = rows.experiment(row)
        ratio = rows.planned(row, make_plan(exp, with_networks(exp))) / row.published
        assert (abs(ratio - 1) > rows.NEAR) is bool(row.why), (row, ratio)


def test_stage_3_takes_time_for_every_module() -> None:
    """On a CPU beside computing; a GPU that computes for longer has it done meanwhile. A run at
    ZeRO-3 has shown it."""
    words = ["experiment=demo", "hardware=cpu2", "task.steps=9", "batch.global_batch=16",
             "batch.micro_batch=8"]  # fmt: skip
    times = {}
    for stage, at in itertools.product((2, 3), (frozenset[str](), frozenset({"cpu"}))):
        done = composed([*words, f"zero=stage{stage}"])
        known = LearnedSpeeds(tflops={"cpu": 0.01}, at_stage_3=at)
        found = step_time(done.experiment, done.plan, learned=known)
        times[stage, bool(at)] = found.computing_s
    layers = done.experiment.model.config["num_hidden_layers"]
    assert times[3, False] - times[2, False] == pytest.approx(layers * STAGE_3_LAYER_S)
    assert times[3, True] == times[2, True] == times[2, False]
    link = "hardware.devices.a100_80g.link_gb_per_s=3000"
    large, small = (
        planned("zero=stage3", "data.seq_len=128", f"batch.micro_batch={size}", link)
        for size in (8, 1)
    )
    assert large.tokens_per_s > 1.5 * small.tokens_per_s
    assert small.bottleneck == "launching kernels"
    assert small.computing_s == pytest.approx(64 / 8 * 32 * (STAGE_3_LAYER_S + LAYER_S))
    assert planned("zero=stage3").computing_s == planned("zero=stage2").computing_s


def test_offloading_takes_time() -> None:
    gpu, cpu, both = (
        planned(f"zero={zero}") for zero in ("stage2", "stage2_offload", "stage3_offload")
    )
    assert gpu.host_s == 0
    assert 0 < cpu.host_s < both.host_s
    assert cpu.update_s == 0 < gpu.update_s
    assert any("RAM (assumed)" in text for text in cpu.sources)
    nvme = planned("zero=infinity", "zero.nvme_path=/nvme")
    assert nvme.host_s > 2 * both.host_s
    assert nvme.bottleneck == "host memory (offload)"


def test_the_network_decides_between_hosts() -> None:
    words = ["hardware=a800x2_n7", "zero=stage3", "batch.global_batch=56"]
    assumed = planned(*words)
    assert assumed.bottleneck == "communication"
    assert "network: 10 Gbit/s by host (assumed: hardware.network_gbit_per_s)" in assumed.sources
    same = planned(*words, "hardware.network_gbit_per_s=10")
    assert same.step_s == assumed.step_s
    assert not any("network" in text for text in same.sources)
    fast = planned(*words, "hardware.network_gbit_per_s=400")
    assert fast.step_s < assumed.step_s / 5
    gathered = assumed.exchanges[0]
    assert gathered.seconds == pytest.approx(gathered.gb / (10 / 8 * LINK_REACHED))
    board = planned(*words, "hardware.network_gbit_per_s=4000")
    # Faster than the devices' own link, which then decides.
    assert board.exchanges[0].seconds == pytest.approx(gathered.gb / (32 * LINK_REACHED))


def test_what_is_missing_for_the_time_is_named() -> None:
    done = composed(["hardware=cpu2"])
    assert done.plan.time.step_s == 0
    assert "hardware.devices.cpu.peak_tflops.fp32 is not set" in done.plan.time.unknown
    unknown = composed_without(["hardware=a100x8", "model=hf", "model.path=some/model"])
    assert unknown.plan.time.step_s == 0
    assert "size of the model" in unknown.plan.time.unknown
    known = LearnedSpeeds(tflops={"cpu": 0.05}, source="learned from 2 runs")
    found = step_time(done.experiment, done.plan, learned=known)
    assert found.step_s > 0
    assert not found.unknown
    assert found.mfu == ()
    assert "cpu: 0.05 TFLOP/s, learned from 2 runs" in found.sources


@pytest.mark.parametrize("zero", ["stage1", "stage2"])
def test_unequal_devices_wait_less_where_the_work_is_shared_out(zero: str) -> None:
    words = ["hardware=a100x2_v100x2", f"zero={zero}", "hardware.network_gbit_per_s=100",
             "batch.micro_batch=4"]  # fmt: skip
    even = planned(*words, "batch.balance=off")
    spec = planned(*words, "batch.balance=spec")
    assert max(even.idle[:2]) > 0.3
    assert max(even.idle[2:]) == 0
    assert spec.step_s < even.step_s
    assert even.even_step_s == 0
    assert spec.even_step_s == pytest.approx(even.step_s, rel=0.3)
    assert max(spec.idle) < max(even.idle)
    assert {name for name, _ in spec.mfu} == {"a100_40g", "v100_32g"}


def test_hours_and_cost() -> None:
    found = planned("task.steps=1000", "hardware.price_per_hour.a100_80g=2.5")
    assert found.hours == pytest.approx(1000 * found.step_s / 3600)
    assert found.device_hours == pytest.approx(8 * found.hours)
    assert found.cost == pytest.approx(2.5 * found.device_hours)
    unbound = ["hardware.price_per_hour.a100_80g=2.5", "task.steps=null", "task.epochs=1"]
    assert planned(*unbound).cost is None
    with pytest.raises(ConfigError, match="a100_80 is no device type.*Did you mean"):
        planned("hardware.price_per_hour={a100_80: 2}")


def test_a_plan_of_an_earlier_version_has_no_time() -> None:
    plan = composed([*LLAMA, "hardware=a100x2_v100x2", "task.steps=10"]).plan
    older = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(older) == plan
    del older["time"]
    assert Plan.from_dict(older) == replace(plan, time=None)
