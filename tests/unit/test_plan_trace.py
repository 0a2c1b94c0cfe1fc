"""The micro step on fake tensors against the same one on real ones, byte by byte."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from llmx.compose.complete import Composed
from llmx.lifecycle import knowledge
from llmx.lifecycle.knowledge import find_traces
from llmx.plan import make_plan
from llmx.plan.choices import advice, choices
from llmx.plan.knowledge import Knowledge
from llmx.plan.trace import (
    FETCH,
    FETCH_BACKWARD,
    GRADIENT,
    RELEASE,
    Event,
    StepTrace,
    TraceKey,
    Traces,
)
from llmx.run.rundir import RunDir, read_mapping
from llmx.train import memory_trace
from llmx.train.memory_trace import Numbers, networks_of, trace_step, with_all_blocks
from tests.live_memory import LiveMemory
from tests.published_configs import FAMILIES
from tests.rundirs import EXPERT_MODELS, PARITY_MODELS, experiment

LLAMA = {"hidden_size": 128, "intermediate_size": 352}
GPT2 = {"n_embd": 128}
OPT = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512}
LORA = {"kind": "lora", "rank": 4, "targets": ["all-linear"], "dropout": 0.1}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """``demo`` is asked of the Hub, whose client tries again for half a minute without a network;
    the program that traces is offline then (``llmx.offline``)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def small(root: Path, *, kind: str = "llama", config: dict[str, Any] = LLAMA, **groups: Any) -> Any:
    model = {"kind": kind, "config": {**PARITY_MODELS[kind], **config}, **groups.pop("model", {})}
    return experiment(
        root / "run", model=model, data={"seq_len": 64}, task={"kind": "pretrain"}, **groups
    )


def traced(exp: Any, *, micro_batch: int = 2, **run: Any) -> StepTrace:
    run = {"precision": "fp32", "accelerator": "cpu", "attention": "sdpa", **run}
    return trace_step(exp, micro_batch=micro_batch, **run)


class Counted(LiveMemory):
    """Counts what is really allocated, without the weights."""

    def leave_out(self, values: Any) -> None:
        self.take([*values])
        self.before = self.live
        self.restart()

    def mark(self, kind: int, index: int) -> None:
        """Nothing is noted, and the peak is that of the whole micro step."""


def really(exp: Any, monkeypatch: pytest.MonkeyPatch, **run: Any) -> int:
    """Peak bytes of activations and temporaries of the same micro step on real tensors."""
    made: list[Counted] = []

    def recorder() -> Counted:
        made.append(Counted())
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(memory_trace, "Recorder", recorder)
        patch.setattr(memory_trace, "FakeTensorMode", lambda **_: contextlib.nullcontext())
        traced(exp, **run)
    return made[0].peak - made[0].before


@pytest.mark.parametrize(
    ("kind", "config", "how"),
    [("llama", LLAMA, "none"), ("gpt2", GPT2, "selective"), ("opt", OPT, "full")],
)
def test_fake_bytes_are_the_real_ones(
    kind: str, config: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = small(tmp_path, kind=kind, config=config, model={"activation_checkpointing": how})
    found = traced(exp)
    assert found.peak == pytest.approx(really(exp, monkeypatch), rel=0.01)
    network = found.networks["policy"]
    assert found.num_trained == network.num_trained == network.num_parameters
    gradients = [one.index for one in found.events if one.kind == GRADIENT]
    assert sorted(gradients) == list(range(len(found.parameters)))
    # All that was made for the step is gone at its end.
    assert found.events[-1].live < 10_000


def test_adapters_and_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = small(tmp_path, adapter=LORA)
    found = traced(exp, precision="bf16")
    assert found.peak == pytest.approx(really(exp, monkeypatch, precision="bf16"), rel=0.01)
    assert 0 < found.num_trained < found.networks["policy"].num_parameters / 10
    gradients = {one.index for one in found.events if one.kind == GRADIENT}
    assert gradients == {i for i, one in enumerate(found.parameters) if one.trained}


TASKS: dict[str, dict[str, Any]] = {
    "noise in the embeddings": {"task": {"kind": "sft", "options": {"neftune_alpha": 5}}},
    "a stored reference": {"task": {"kind": "dpo"}},
    "a live reference": {"task": {"kind": "dpo", "options": {"reference": "live"}}},
    "the base of an adapter": {
        "task": {"kind": "dpo", "options": {"reference": "live"}},
        "adapter": LORA,
    },
    "joint": {"task": {"kind": "dpo", "options": {"loss": "kto"}}},
    "a loss of one value by sequence": {"task": {"kind": "reward"}},
    "a loss over all examples": {"task": {"kind": "embed"}},
    "a teacher": {"task": {"kind": "distill"}},
    "completions with rewards": {"task": {"kind": "grpo", "options": {"beta": 0.1}}},
    "a value model": {"task": {"kind": "ppo"}},
    "a value model with an adapter": {"task": {"kind": "ppo"}, "adapter": LORA},
    "4 bits": {"adapter": {**LORA, "quantize": "nf4", "double_quant": True}},
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_traced(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = TASKS[name]
    config = {**PARITY_MODELS["llama"], **LLAMA, "vocab_size": 2048}
    if name == "a teacher":
        values = {**config, "model_type": "llama", "num_hidden_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(values))
        options = {"teacher": str(tmp_path), "teacher_logits": "live"}
        groups = {"task": {"kind": "distill", "options": options}}
    model = {"kind": "llama", "config": config, "init": "pretrained", "path": "demo"}
    exp = experiment(tmp_path / "run", model=model, data={"seq_len": 64}, **groups)
    found = traced(exp)
    assert found.peak == pytest.approx(really(exp, monkeypatch), rel=0.01)
    network = LlamaForCausalLM(LlamaConfig(**config))
    whole = sum(one.numel() for one in network.parameters())
    valued = whole - network.lm_head.weight.numel() + config["hidden_size"]
    sizes = {name: (b.num_parameters, b.num_trained) for name, b in found.networks.items()}
    policy = {"policy": (whole, whole)}
    expected = {
        "a live reference": {**policy, "reference": (whole, 0)},
        "a stored reference": {**policy, "reference": (whole, 0)},  # before training
        "a value model": {**policy, "value": (valued, valued)},
    }
    assert expected.get(name, {}).items() <= sizes.items()
    if name == "the base of an adapter":
        assert [*sizes] == ["policy"]
    elif name == "a teacher":
        assert sizes["student"] == (whole, whole)
        assert 0 < sizes["teacher"][0] < whole
    elif name == "a value model":
        assert found.num_trained == whole + valued
    elif name == "4 bits":
        blocks = network.model.modules()
        linear = sum(one.weight.numel() for one in blocks if isinstance(one, nn.Linear))
        assert found.networks["policy"].num_packed == linear
        assert found.buffers == pytest.approx(linear * (0.5 + (1 + 4 / 256) / 64), rel=0.01)
        assert StepTrace.from_dict(found.to_dict()) == found


def test_a_vocabulary_from_scratch_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    scratch = {"init": "scratch", "tokenizer": "demo", "pad_vocab_to_multiple_of": 64}
    exp = small(tmp_path, config={**LLAMA, "vocab_size": 4096}, model=scratch)
    rows = -(-knowledge.tokenizer_rows("demo") // 64) * 64
    assert rows < 4096
    assert traced(exp).parameters[0].numel == rows * 128


def test_a_gpu_needs_no_gpu(tmp_path: Path) -> None:
    """Its kernels keep no scores, and its fused loss no logits."""
    exp = small(tmp_path, kind="gpt2", config={**GPT2, "attn_pdrop": 0.1, "resid_pdrop": 0.1})
    on_cuda = traced(exp, accelerator="cuda", attention="sdpa")
    assert on_cuda.peak < traced(exp).peak
    llama = traced(small(tmp_path), accelerator="cuda", precision="bf16", attention="varlen")
    assert llama.peak < traced(small(tmp_path)).peak / 1.5


def test_every_module_is_hooked_and_a_block_with_experts_as_one() -> None:
    """As DeepSpeed's stage 3 does: it fetches ahead at modules without parameters, too."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    config = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, vocab_size=16, **heads
    )
    network = MixtralForCausalLM(config)
    hooked = [(type(module).__name__, own) for module, own in memory_trace._hooked(network)]
    assert [len(own) for name, own in hooked if name == "MixtralSparseMoeBlock"] == [3, 3]
    assert not any(name.endswith(("Experts", "Router")) for name, _ in hooked)
    assert [own for name, own in hooked if name == "MixtralDecoderLayer"] == [[], []]
    every = [id(parameter) for _, own in hooked for parameter in own]
    assert sorted(every) == sorted(map(id, network.parameters()))


def test_bytes_between_two_micro_batches(tmp_path: Path) -> None:
    exp = small(tmp_path)
    one, two, four = (traced(exp, micro_batch=size) for size in (1, 2, 4))
    between = one.at(four, 1 / 3)
    assert between.peak == pytest.approx(two.peak, rel=0.02)
    assert StepTrace.from_dict(two.to_dict()) == two
    other = traced(small(tmp_path, config={**LLAMA, "num_hidden_layers": 1}))
    assert one.at(other, 0.5) is None


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_the_network_is_counted_as_it_is_built(kind: str, tmp_path: Path) -> None:
    """12 layers of width 16 in rows of 64 tokens; BERT sees all of its row, GPT-2 is tied."""
    rows = 1024  # of the tokenizer, whatever the config says
    sizes = {"vocab_size": rows, "max_position_embeddings": 64, "num_hidden_layers": 12}
    config = {**sizes, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    if kind == "llama":
        config["num_key_value_heads"] = 2
    if kind == "gpt2":
        config = {"vocab_size": rows, "n_positions": 64, "n_embd": 16, "n_inner": 32, "n_head": 4,
                  "n_layer": 12}  # fmt: skip
    model, task = {"kind": kind, "config": config}, "mlm" if kind == "bert" else "pretrain"
    exp = experiment(tmp_path / "run", model=model, data={"seq_len": 64}, task={"kind": task})
    (network,) = networks_of(exp).values()
    layer = {"llama": 2 * 256 + 2 * 128 + 3 * 512, "gpt2": 4 * 256 + 2 * 512,
             "bert": 4 * 256 + 2 * 512}[kind]  # fmt: skip
    head = rows * 16 + (16 * 16 if kind == "bert" else 0)
    attention = 12 * 2 * 16 * 64 * (2 if kind == "bert" else 1)
    assert network.attention_flops == attention
    assert network.forward_flops == 2 * (12 * layer + head) + attention
    assert network.backward_flops == 2 * network.forward_flops
    assert network.head_flops == 2 * rows * 16
    positions = {"llama": rows * 16, "gpt2": 64 * 16, "bert": (64 + 2) * 16}
    assert network.num_looked_up == positions[kind]
    assert (network.kv_size, network.num_layers) == (8 if kind == "llama" else 16, 12)
    assert (network.hidden_size, network.intermediate_size, network.vocab_size) == (16, 32, rows)
    assert network.rms_norm is (kind == "llama")


def test_seventy_billion_parameters(tmp_path: Path) -> None:
    """Without their memory; two of the eighty layers, so that this is quick."""
    layers = 2
    config = {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    exp = small(tmp_path, config=config, model={"init": "pretrained", "path": None})
    found = traced(exp, precision="bf16", accelerator="cuda", attention="varlen", micro_batch=1)
    whole = found.networks["policy"].num_parameters
    layer = (whole - 2 * 128256 * 8192) / layers
    assert 80 * layer + 2 * 128256 * 8192 == pytest.approx(70.55e9, rel=0.001)


def on_gpus(root: Path, **groups: Any) -> Any:
    """Four GPUs with little beside the context of CUDA."""
    host = {"name": "localhost", "slots": 4, "device": "small"}
    device = {"accelerator": "cuda", "memory_gib": 1.15, "precisions": ["fp32", "bf16"]}
    return small(
        root, hardware={"hosts": [host], "devices": {"small": device}}, precision="bf16", **groups
    )


def test_a_plan_that_does_not_fit_names_what_was_planned_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(knowledge, "TIME_LIMIT_S", 900.0)
    wide = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "vocab_size": 8000}
    exp = on_gpus(tmp_path, config=wide, batch={"micro_batch": 8}, model={"init": "pretrained"})
    plan = make_plan(exp)
    assert plan.memory == ()
    traces = find_traces(exp, plan, variants=True)  # in a process of its own
    assert not traces.problem
    assert TraceKey(plan.attention_on("small"), "full", 1) in traces.found
    known = Knowledge(traces=traces)
    found = make_plan(exp, known)
    assert not found.memory[0].fits
    text = advice(exp, found, known, allows=lambda variant: "")
    assert "These fit by the plan, the fastest first: " in text
    every = choices(exp, known, allows=lambda variant: "")
    assert [one.chosen for one in every].count(True) == 1
    assert [one.cost for one in every] == sorted(one.cost for one in every)
    named = next(one for one in every if one.fits and one.micro_batch <= 8)
    assert " ".join(named.overrides(exp)) in text
    # The second plan of the same starts no process.
    monkeypatch.setattr(knowledge, "ask", None)
    assert find_traces(exp, plan, variants=True).found == traces.found
    # Nor does one whose run has its traces, on a machine that has none.
    composed = Composed(exp, found, {}, knowledge=known)
    RunDir(Path(exp.run_dir)).root.mkdir()
    knowledge.keep_traces(composed)
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "another"))
    assert find_traces(exp, plan, variants=True).found == traces.found
    of_run = Traces.from_dict(read_mapping(RunDir(Path(exp.run_dir)).traces))
    assert of_run.found == traces.found


def test_code_of_the_hub_is_not_run_and_the_memory_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(knowledge, "ask", None)
    exp = on_gpus(tmp_path, model={"trust_remote_code": True})
    plan = make_plan(exp)
    traces = find_traces(exp, plan, variants=False)
    assert "code of the Hub" in traces.problem
    assert make_plan(exp, Knowledge(traces=traces)) == plan


# --- A few blocks that are traced, and the others like them, against all of them traced ----------

BLOCKS = 8


def of_blocks(root: Path, kind: str, *, config: Any = (), run: Any = (), **groups: Any) -> Any:
    """Traces a network of that many blocks."""
    exp = small(root, kind=kind, config={"num_hidden_layers": BLOCKS, **dict(config)}, **groups)
    return lambda: traced(exp, **dict(run))


def both(monkeypatch: pytest.MonkeyPatch, trace: Any) -> tuple[StepTrace, list[bool]]:
    """A trace, and for each try to leave blocks out whether it held."""
    tries: list[bool] = []

    def seen(*given: Any) -> StepTrace | None:
        tries.append((found := with_all_blocks(*given)) is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(memory_trace, "with_all_blocks", seen)
        return trace(), tries


def whole(monkeypatch: pytest.MonkeyPatch, trace: Any) -> StepTrace:
    """All blocks are run."""
    with monkeypatch.context() as patch:
        patch.setattr(memory_trace, "stack_of", lambda _network: None)
        found: StepTrace = trace()
    return found


ON_GPUS = {"precision": "bf16", "accelerator": "cuda", "attention": "varlen"}
FROZEN = ["*.embed_tokens.*", "*.layers.0.*", "*.layers.1.*"]  # are run, and not what is repeated


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("llama", {"model": {"activation_checkpointing": "selective"}}),
        ("opt", {}),
        ("qwen3", {"model": {"activation_checkpointing": "full"}, "run": ON_GPUS}),
        ("llama", {"adapter": LORA, "run": ON_GPUS}),
        ("llama", {"model": {"freeze": FROZEN}}),
    ],
)
def test_the_trace_is_that_of_all_blocks(
    kind: str, groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = of_blocks(tmp_path, kind, **groups)
    found, held = both(monkeypatch, trace)
    assert held == [True]
    assert found == whole(monkeypatch, trace)
    gradients = {event.index for event in found.events if event.kind == GRADIENT}
    assert gradients == {i for i, one in enumerate(found.parameters) if one.trained}


def test_experts_and_few_blocks_are_all_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of routers is of all blocks together: nothing is left out."""
    config = {**EXPERT_MODELS["mixtral"], "model_type": "mixtral", "num_hidden_layers": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 96}))
    model = {"kind": "hf", "path": str(tmp_path), "config": {}}
    experts = experiment(tmp_path / "run", model=model, task={"kind": "pretrain"})
    assert both(monkeypatch, lambda: traced(experts))[1] == []
    # Experts are no linear layers: an adapter leaves them frozen, and the plan says so.
    lora = experiment(tmp_path / "run", model=model, adapter=LORA, task={"kind": "pretrain"})
    reach = re.match(r"The adapter reaches (\d+\.\d)% of the weights", traced(lora).reach)
    assert 0 < float(reach[1]) < 50
    assert traced(small(tmp_path, adapter=LORA)).reach == ""
    few = of_blocks(tmp_path, "llama", config={"num_hidden_layers": 5})
    assert both(monkeypatch, few)[1] == []


@pytest.mark.parametrize("run", [{}, ON_GPUS])
def test_the_next_attention_that_the_ranks_try_is_traced(run: Any, tmp_path: Path) -> None:
    """gpt-oss has attention sinks, which neither the kernels nor sdpa know."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["gpt-oss"]))
    model = {"kind": "hf", "path": str(tmp_path), "config": {}}
    auto = experiment(tmp_path / "run", model=model, task={"kind": "pretrain"})
    assert traced(auto, **run) == traced(auto, **{**run, "attention": "eager"})
    auto.model.attention = "sdpa"
    with pytest.raises(Exception, match="sdpa|scaled_dot_product"):
        traced(auto, **{**run, "attention": "sdpa"})


def test_blocks_that_do_not_agree_are_all_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a try that is given up nothing of it is left; a network may count on all blocks."""
    trace = of_blocks(tmp_path, "llama")
    expected = whole(monkeypatch, trace)
    with monkeypatch.context() as patch:
        patch.setattr(memory_trace, "with_all_blocks", lambda *_given: None)
        assert trace() == expected
    forward = LlamaModel.forward

    def by_number(self: Any, *args: Any, **keywords: Any) -> Any:
        assert self.layers[self.config.num_hidden_layers - 1] is not None
        return forward(self, *args, **keywords)

    monkeypatch.setattr(LlamaModel, "forward", by_number)
    assert trace() == expected


# Four blocks of one module and one parameter each, between another two.
NUMBERS = [Numbers(range(n + 1, n + 2), range(n + 1, n + 2)) for n in range(9)]


RUN = [
    *(Event(FETCH, 0, 0, 0), Event(RELEASE, 0, 5, 5)),
    *(
        Event(kind, n, 5 + 10 * n + peak, 5 + 10 * n + live)
        for n in range(1, 5)
        for kind, peak, live in ((FETCH, 0, -10), (RELEASE, 3, 0))
    ),
    *(
        Event(kind, n, 5 + 10 * n + 1, 5 + 10 * n - live)
        for n in range(4, 0, -1)
        for kind, live in ((FETCH_BACKWARD, 0), (GRADIENT, 10))
    ),
    Event(GRADIENT, 0, 5, 0),
]


@pytest.mark.parametrize("key", ["kind", "index", "peak", "live"])
def test_one_difference_between_the_blocks_is_enough(key: str) -> None:
    for place in (4, 5, 12, 13):
        run = [*RUN]
        run[place] = replace(run[place], **{key: getattr(run[place], key) + 1})
        assert with_all_blocks(StepTrace((), (), tuple(run)), NUMBERS, 4) is None, place
