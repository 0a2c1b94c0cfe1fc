"""The predicted time of drawing, by numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from llmx.models.attention import AttentionMethod
from llmx.models.generate import Decoder, generate
from llmx.models.sampling import Sampling
from llmx.plan import Plan, make_plan
from llmx.plan.memory import samples_of
from llmx.plan.network import Network
from llmx.plan.rollout_time import SamplerSpeed, Samples, server_problem
from llmx.plan.types import DrawnSamples
from tests.composing import planned
from tests.composing import sized as composed
from tests.live_memory import LiveMemory

A100 = SamplerSpeed(flops_per_s=0.75 * 312e12, bytes_per_s=0.7 * 1555e9)
V100 = SamplerSpeed(flops_per_s=0.4 * 125e12, bytes_per_s=0.7 * 900e9)
ATTENTION = 2.0 * 32 * 4096 * 1024
SHAPE = Network(
    7_000_000_000, 7_000_000_000, 0, 0, hidden_size=4096, intermediate_size=11008, num_layers=32,
    kv_size=1024, vocab_size=32000, forward_flops=14e9 + ATTENTION, backward_flops=0.0,
    attention_flops=ATTENTION, head_flops=0.0, rms_norm=True,
)  # fmt: skip
SAMPLES = Samples(
    SHAPE, width=2, num_prompts=16, drawn=DrawnSamples(8, new_tokens=256), seq_len=1024
)
MIXED = [
    "task=grpo", "model=llama3_8b", "hardware=a100x2_v100x2", "adapter=lora", "data.seq_len=1024",
    "batch.global_batch=64", "rollout.hosts=[node-b]",
]  # fmt: skip


def test_a_decoding_step_reads_the_weights_and_the_cache_or_computes_or_launches() -> None:
    """14 GB of weights; for each of 64 rows 768 + 128 tokens of 2 x 32 x 1024 x 2 bytes."""
    cache_gb = 64 * 896 * 131_072 / 1e9  # 7.5
    assert SAMPLES.decoding_step_s(64, V100) == pytest.approx((14 + cache_gb) / (0.7 * 900))
    without_cache = replace(SAMPLES, network=replace(SHAPE, kv_size=0))
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
    """14 GB of weights, and what 128 completions take: 13.0 + 9.3 + 1 GiB."""
    needed = SAMPLES.server_gib(context_gib=1.0)
    assert needed == pytest.approx((14e9 + SAMPLES.drawing_bytes(128)) / 2**30 + 1)
    assert server_problem("v100_32g", needed, 32) == ""
    assert "v100_16g: a rollout server takes 23.4 GiB" in server_problem("v100_16g", needed, 16)


def test_a_step_is_the_sum_of_its_parts_or_the_longer_one() -> None:
    plan = composed(MIXED).plan
    assert plan.precision == "fp16"  # V100s draw
    assert Plan.from_dict(plan.to_dict()) == plan
    parts = plan.time.rollout
    assert any("completions of 256 tokens (assumed" in text for text in plan.time.sources)
    total_s = parts.draws_s + parts.trains_s + parts.weights_s
    assert plan.time.step_s == pytest.approx(total_s)
    assert parts.training_idle == pytest.approx(1 - parts.trains_s / total_s)
    ahead = composed([*MIXED, "rollout.max_staleness=1"]).plan
    assert ahead.time.step_s == pytest.approx(max(parts.trains_s, parts.draws_s + parts.weights_s))


def test_two_updates_take_twice_the_training() -> None:
    times = (composed([*MIXED[:-1], f"task.options.updates={n}"]).plan.time for n in (1, 2))
    once, twice = (time.rollout for time in times if time is not None)
    assert twice.trains_s == pytest.approx(2 * once.trains_s)
    assert twice.draws_s == once.draws_s
    assert not once.drawing_idle  # the ranks draw


def test_drawing_takes_the_cache_and_the_prompts_beside_it() -> None:
    """128 completions of 16 prompts, 64 at once: 768 + 256 columns of 64 x 128 KiB, and beside them
    the next 8 prompts of 768 tokens with the activations of one layer."""
    prompts = 8 * 768 * (131_072 + 2 * (3 * 11008 + 4 * 4096))
    cache = 64 * 1024 * 131_072
    assert SAMPLES.drawing_bytes(128) == pytest.approx(cache + prompts)
    # All at once: only the buffers of one layer are laid out anew.
    assert SAMPLES.drawing_bytes(64) == pytest.approx(cache + 64 * 960 * 131_072 / 64)


@pytest.mark.usefixtures("made_up_traces")
@pytest.mark.parametrize(
    ("words", "rows", "drawer"),
    [
        (["hardware=a100x8", "zero=stage3"], 64, ""),
        (["hardware=a100x2_v100x2", "adapter=lora"], 16, "rank"),  # 90 % of a V100's 32 GB
        (MIXED[2:4] + MIXED[6:], 16, "rollout server"),  # of a V100's 32 GB
    ],
)
def test_as_many_completions_at_once_as_memory_is_left_for(
    words: list[str], rows: int, drawer: str
) -> None:
    exp = ["task=grpo", "model=llama3_8b", "data.seq_len=4096", "batch.global_batch=64", *words]
    found = planned(exp)
    plan = found.plan
    assert plan.drawn.rows == rows
    notes = [note for note in plan.notes if "completions at once on each" in note]
    assert [f"at most {rows} completions at once on each {drawer} " in n for n in notes] == (
        [True] if drawer else []
    )
    assert Plan.from_dict(plan.to_dict()) == plan
    # As ``auto`` plans it.
    assert make_plan(found.experiment, found.knowledge).memory == plan.memory


@pytest.mark.usefixtures("made_up_traces")
def test_the_peak_of_a_rank_that_draws_is_in_the_plan() -> None:
    """Stage 2: 16 GB of weights and the optimizer's part; 3,840 + 64 columns of 64 rows, the cache
    of 8 prompts, and keys of one layer that are copied."""
    words = ["task=grpo", "model=llama3_8b", "hardware=a100x8", "zero=stage2", "data.seq_len=4096"]
    found = planned([*words, "batch.global_batch=64"])
    plan = found.plan
    (memory,) = plan.memory
    samples = samples_of(found.experiment, plan)
    resting_gib = memory.parameters_gib + memory.optimizer_gib
    drawing_gib = samples.drawing_bytes(64) / 2**30
    assert drawing_gib == pytest.approx((64 * 3904 + 8 * 3840 + 60 * 64) * 2**17 / 2**30)
    assert memory.total_gib == pytest.approx(resting_gib + drawing_gib + memory.context_gib)


@pytest.mark.usefixtures("made_up_traces")
def test_a_push_takes_time_and_ram_of_hosts() -> None:
    """8 billion parameters in fp16 to two servers over 10 Gbit/s: 34 s, and 27 s of work."""
    words = [word for word in MIXED if word != "adapter=lora"]
    plan = planned([*words, "zero=stage2"]).plan
    gb = 2 * plan.num_parameters / 1e9
    assert plan.time.rollout.weights_s == pytest.approx(gb * (2 / (1.25 * 0.75) + 1 / 0.6))
    (host,) = plan.storage.hosts
    assert host.push_bytes == 3 * 2 * plan.num_parameters
    (adapted,) = planned(MIXED).plan.storage.hosts  # its base is sent once
    assert 2 * 16e9 < adapted.push_bytes < 2.1 * 16.1e9
    assert host.ram_bytes == host.processes_bytes + host.push_bytes
    assert "adapter=lora" in replace(host, ram_has_bytes=2**33).warning


@pytest.mark.parametrize(
    ("prompts", "group", "new", "completions"),
    [(2, 8, 128, 16), (20, 2, 24, 40)],  # all at once; the last ones join when rows have ended
)
def test_what_is_predicted_is_what_drawing_allocates(
    prompts: int, group: int, new: int, completions: int
) -> None:
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    shape = replace(
        SHAPE, hidden_size=64, intermediate_size=128, num_layers=3, vocab_size=100, kv_size=32
    )
    network = LlamaForCausalLM(LlamaConfig(**config)).eval()
    network.set_attn_implementation("sdpa")
    attention = AttentionMethod("sdpa", "mask", "packed")
    decoder = Decoder(network, network.config, 100, attention, network.dtype, network.device)
    texts = [tuple((7 * n + k) % 100 for k in range(96)) for n in range(prompts)]
    rows = [text for text in texts for _ in range(group)]
    drawn = DrawnSamples(group, new, rows=32)
    samples = Samples(shape, 4, prompts, drawn, seq_len=96 + new)
    sampling = Sampling(max_new_tokens=new, temperature=1.0, stop_ids=frozenset())
    generate(decoder, rows[:1], sampling, seeds=[0])  # what is made once
    with LiveMemory() as memory:
        memory.everything()
        before = memory.live
        memory.restart()
        generate(decoder, rows, sampling, seeds=[*range(len(rows))], batch_size=drawn.rows)
        assert memory.peak - before == pytest.approx(samples.drawing_bytes(completions), rel=0.05)
        assert memory.live - before < 0.01 * (memory.peak - before)  # not when Python collects
