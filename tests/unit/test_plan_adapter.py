"""What a plan says of an adapter, of ``model.freeze`` and of networks beside the exported one is
what the networks have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
)

from llmx.config import AdapterConfig, ModelConfig, experiment_from_dict
from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.lifecycle.knowledge import informed
from llmx.models.adapter import add_adapter, freeze
from llmx.plan import make_plan
from llmx.plan.adapter import (
    adapter_size,
    freeze_problems,
    network_modules,
    target_problems,
    trained_parameters,
)
from llmx.plan.memory import with_trained_size
from llmx.plan.types import NetworkBeside, Plan
from tests.composing import composed
from tests.rundirs import PARITY_MODELS
from tests.small_models import KINDS, small_model
from tests.unit.test_models_classification import BERT


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the process that reads a config answers."""
    monkeypatch.setattr("llmx.compose.networks.TIME_LIMIT_S", 900.0)


SMALL_LLAMA = {**PARITY_MODELS["llama"], "model_type": "llama", "vocab_size": 1024}


def experiment(architecture: str, *, model: Any = (), **adapter: Any) -> Any:
    config = {**PARITY_MODELS[architecture], "vocab_size": 90}
    named = {"kind": architecture, "path": "/models/base", "init": "pretrained", "config": config}
    cpus = {"name": "localhost", "slots": 2, "device": "cpu"}
    return experiment_from_dict(
        {
            "model": {**named, **dict(model)},
            "adapter": {"kind": "lora", "rank": 4, "targets": ["all-linear"], **adapter},
            "task": {"kind": "sft", "steps": 3},
            "hardware": {
                "hosts": [cpus],
                "devices": {"cpu": {"accelerator": "cpu", "precisions": ["fp32"]}},
            },
        }
    )


def with_parameters(network: torch.nn.Module) -> set[str]:
    return {
        name
        for name, module in network.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("llama", {}),
        ("llama", {"dora": True, "rank": 3}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("qwen3", {"targets": ["down_proj"]}),
        ("qwen3", {"modules_to_save": ["lm_head"]}),
        ("gpt2", {}),
        ("gpt2", {"targets": ["c_proj"], "dora": True}),
        ("opt", {"targets": ["fc2"]}),
        ("opt", {"dora": True, "rank": 3}),
    ],
)
def test_the_parameters_that_are_trained(kind: str, adapter: dict[str, Any]) -> None:
    tied = kind in ("gpt2", "opt")
    network = small_model(kind, tie_word_embeddings=tied)
    exp = experiment(kind, **adapter)
    exp.model.config["tie_word_embeddings"] = tied
    modules = network_modules(exp.model)
    assert {*modules.linear, *modules.others} == with_parameters(network)
    assert not list(target_problems(exp.model, exp.adapter))
    before = sum(p.numel() for p in network.parameters())
    add_adapter(
        network,
        exp.model,
        exp.adapter,
        exp.seed,
        ds_config={"zero_optimization": {"stage": 0}},
        dtype=next(network.parameters()).dtype,
        head="causal_lm",
    )
    size = adapter_size(exp.model, exp.adapter)
    assert size.trained == sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert size.added == sum(p.numel() for p in network.parameters()) - before
    plan = make_plan(exp)
    assert (plan.num_trained, plan.num_parameters) == (size.trained, before + size.added)


def test_flops_are_those_of_what_is_trained() -> None:
    words = ["model=llama2_7b", "hardware=a100x8", "batch.micro_batch=1", "zero=stage2"]
    whole = composed(words).plan
    lora = composed([*words, "adapter=lora"]).plan
    assert whole.num_trained is None
    assert lora.num_trained == 39_976_960
    assert lora.num_parameters == whole.num_parameters + lora.num_trained
    assert lora.time.flops == pytest.approx(whole.time.flops * 2 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("model", "adapter", "words"),
    [
        ({}, {"targets": []}, ["adapter.targets is empty", "all-linear"]),
        ({}, {"targets": ["all-linear", "q_proj"]}, ["all-linear stands beside other names"]),
        ({}, {"modules_to_save": ["v"], "targets": ["v"]}, ["_save: v is one of adapter.targets"]),
        ({}, {"kind": "none", "targets": []}, ["adapter.rank=4 has no effect", "adapter=lora"]),
        ({}, {"quantize": "nf4"}, ["adapter.quantize=nf4 trains on CUDA only", "Use adapter=lora"]),
        ({"init": "scratch"}, {}, ["adapter.kind=lora with model.init=scratch"]),
        ({"freeze": ["*.layers.0.*"]}, {}, ["model.freeze=", "beside adapter.kind=lora"]),
    ],
)
def test_what_is_wrong_is_said(model: Any, adapter: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        validate(experiment("llama", model=model, **adapter))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"targets": ["q_projj"]}, ['Did you mean "q_proj"', "It has q_proj, k_proj"]),
        ({"targets": ["lm_head"]}, ["lm_head is the output head", "modules_to_save=[lm_head]"]),
        ({"modules_to_save": ["embed"]}, ['Did you mean "embed_tokens"']),
    ],
)
def test_names_are_checked_before_ranks_start(adapter: dict[str, Any], words: list[str]) -> None:
    exp = experiment("llama", **adapter)
    (problem,) = target_problems(exp.model, exp.adapter)
    assert all(word in problem for word in words), problem


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its network is asked for once, by a process of its own."""
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(SMALL_LLAMA))
    (directory / "model.safetensors").touch()
    return directory


@pytest.mark.parametrize(
    ("task", "adapter", "words"),
    [
        ("reward", {"modules_to_save": ["score"]}, ""),
        ("sft", {"modules_to_save": ["score"]}, "score names no module with weights"),
        ("reward", {"modules_to_save": ["lm_head"]}, "lm_head names no module with weights"),
        ("reward", {"targets": ["lm_head"]}, "lm_head names no linear layer"),
        ("embed", {"modules_to_save": ["lm_head"]}, "lm_head names no module with weights"),
        ("embed", {"targets": ["layers.0.mlp.up_proj"]}, ""),
        ("embed", {"targets": ["model.layers.0.mlp.up_proj"]}, "names no linear layer"),
    ],
)
def test_names_are_those_of_a_network_with_the_head_of_the_task(
    task: str, adapter: dict[str, Any], words: str, llama: Path
) -> None:
    base = ["hardware=cpu2", "model=hf", f"model.path={llama}", "model.tokenizer=demo"]
    own = [f"adapter.{key}=[{','.join(names)}]" for key, names in adapter.items()]
    base += ["adapter=lora", f"task={task}", "data.seq_len=64", *own]
    if not words:
        assert composed(base).plan
        return
    with pytest.raises(ConfigError, match=words):
        composed(base)


def test_a_bert_has_names_of_its_own() -> None:
    exp = experiment("llama", targets=["query", "value"])
    model = dataclasses.replace(exp.model, kind="bert", config=BERT)
    modules = network_modules(model)
    network = BertForMaskedLM(BertConfig(**BERT))
    assert {*modules.linear, *modules.others} == with_parameters(network)
    # A classifier has other names behind the encoder: what one of both has is not refused.
    others = {"targets": ["pooler.dense"], "modules_to_save": ["classifier"]}
    assert not list(target_problems(model, dataclasses.replace(exp.adapter, **others)))
    (problem,) = target_problems(model, dataclasses.replace(exp.adapter, targets=["q_proj"]))
    assert "It has query, key, value, dense." in problem


QLORA = ["model=llama2_7b", "hardware=a100x8", "adapter=qlora", "batch.micro_batch=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zero=stage3"], r"adapter.quantize=nf4 with zero.stage=3: .* Set zero=stage2"),
        (["zero=stage2", "model.compile=true"], r"model.compile=true has not been tried"),
    ],
)
def test_where_4_bits_do_not_work(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed([*QLORA, *words])


@pytest.mark.usefixtures("made_up_traces")
def test_zero_3_is_not_advised_for_4_bits() -> None:
    words = ["zero=stage2_offload", "data.seq_len=4096", "batch.micro_batch=1"]
    more = ["model.activation_checkpointing=full", "hardware.devices.a100_80g.memory_gib=5"]
    found = composed([*QLORA, *words, *more])
    said = " ".join(informed(found).plan.memory_warnings)
    assert "expect it to run out of memory" in said
    assert "zero=stage3" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_of_parameters_are_checked_before_ranks_start(kind: str) -> None:
    """Of the real network none is refused."""
    exp = experiment(kind)
    for name, _ in small_model(kind).named_parameters(remove_duplicate=False):
        model = dataclasses.replace(exp.model, freeze=[name])
        assert not list(freeze_problems(model)), name
    model = dataclasses.replace(exp.model, freeze=["*.embedd*", "*.layers.9.*"])
    problems = list(freeze_problems(model))
    assert len(problems) == 2
    assert all(problem.startswith("model.freeze: ") for problem in problems)
    assert all("a star stands for any characters" in problem for problem in problems)
    model = dataclasses.replace(exp.model, freeze=["layers.0.*", "h.0.*", "decoder.layers.0.*"])
    assert len(list(freeze_problems(model, head=""))) == 2, "of a backbone, maybe"


MODEL = ["model=llama2_7b", "hardware=a800x2_n7", "precision=bf16", "data=file", "data.path=demo"]


def planned(*words: str) -> Plan:
    """Of a 7B model on a cluster; what ``plan.json`` keeps is all of it."""
    plan = informed(composed([*MODEL, *words])).plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    return plan


def test_frozen_parameters_are_not_trained() -> None:
    whole = planned("zero=stage2")
    half = planned("zero=stage2", "model.freeze=['*.embed_tokens.*','*.layers.?.*']")
    assert whole.num_trained is None
    part = half.num_trained / half.num_parameters
    assert 0.6 < part < 0.7  # 22 of 32 layers, and the output head


@pytest.mark.parametrize(
    "patterns", [["*.embed_tokens.*"], ["*.layers.0.*", "model.norm.weight"], ["lm_head.*"]]
)
def test_what_is_frozen_is_counted_as_the_network_has_it(patterns: list[str]) -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL_LLAMA))
    freeze(network, patterns)
    wanted = sum(p.numel() for p in network.parameters() if p.requires_grad)
    model = ModelConfig(kind="hf", path="/x", config=SMALL_LLAMA, freeze=patterns)
    assert trained_parameters(model, AdapterConfig()) == wanted


LIVE = "task.options.reference=live"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_live_reference_is_counted(stage: int) -> None:
    stored = planned("task=dpo", f"zero=stage{stage}")
    live = planned("task=dpo", f"zero=stage{stage}", LIVE)
    assert [one.name for one in live.beside] == ["reference"]
    assert stored.beside[0].before_training
    assert stored.beside[0].source is None


def test_a_reference_that_is_the_base_of_an_adapter_takes_nothing() -> None:
    stored, live = (planned("task=dpo", "adapter=lora", *words) for words in ([], [LIVE]))
    assert live.beside == stored.beside == ()
    assert live.beside == ()


BILLION_13 = 13_015_864_320
TEACHER = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "vocab_size": 32000,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""Llama 2 13B, and its parameters."""


def distilled(tmp_path: Path, *words: str, config: dict[str, Any] = TEACHER) -> Plan:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    return planned("task=distill", f"task.options.teacher={tmp_path}", *words)


def test_a_teacher_is_counted_where_it_is_there(tmp_path: Path) -> None:
    how = [f"task.options.teacher_logits={name}" for name in ("stored", "live")]
    stored, live = (distilled(tmp_path, words) for words in how)
    assert [(one.num_parameters, one.source) for one in live.beside] == [
        (BILLION_13, str(tmp_path))
    ]
    assert live.time.computing_s > stored.time.computing_s
    hub = planned("task=distill", "task.options.teacher=owner/name")
    assert [(one.source, one.revision) for one in hub.beside] == [("owner/name", None)]


@pytest.mark.usefixtures("made_up_traces")
def test_a_teacher_that_does_not_fit_before_training_is_said(tmp_path: Path) -> None:
    large = {**TEACHER, "num_hidden_layers": 160}
    plan = distilled(tmp_path, "zero=stage2", config=large)
    assert any("'teacher' of task=distill takes" in one for one in plan.warnings)
    assert any("zero=stage3 shards it over the ranks" in one for one in plan.warnings)
    assert not any("teacher" in one for one in distilled(tmp_path, "zero=stage3").warnings)
    unknown = distilled(tmp_path, config={"model_type": "unheard_of"})
    assert any("memory of the model 'teacher'" in one for one in unknown.warnings)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_value_model_is_trained_as_the_policy_is(stage: int) -> None:
    words = [f"zero=stage{stage}", "task.options.beta=0"]
    alone = planned("task=grpo", *words)
    both = planned("task=ppo", *words, "task.options.group_size=8", "task.options.updates=1")
    (value,) = both.beside
    # Llama's output head of 32,000 rows is a score of one.
    assert value.num_parameters == value.num_trained == alone.num_parameters - 31_999 * 4096
    assert both.num_parameters == alone.num_parameters + value.num_parameters
    assert both.num_trained is None
    part = both.num_parameters / alone.num_parameters
    assert both.time.computing_s > 1.8 * alone.time.computing_s
    checkpoints = [plan.storage.checkpoint_bytes for plan in (both, alone)]
    assert checkpoints[0] == pytest.approx(part * checkpoints[1], rel=1e-3)
    assert both.storage.model_bytes == alone.storage.model_bytes, "the policy is exported"
    with_reference = planned("task=ppo", words[0])
    assert [network.num_trained > 0 for network in with_reference.beside] == [True, False]


def test_a_value_model_with_an_adapter_trains_its_head_whole() -> None:
    alone, plan = (planned(f"task={name}", "adapter=lora") for name in ("grpo", "ppo"))
    (value,) = plan.beside
    assert value.name == "value", "the reference is the policy without its adapter"
    assert value.num_trained == alone.num_trained + 4096
    assert plan.num_trained == alone.num_trained + value.num_trained
    assert plan.storage.model_bytes == alone.storage.model_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_value_model_is_counted_as_the_network_is(tied: bool, rank: int) -> None:
    config = {**SMALL_LLAMA, "tie_word_embeddings": tied}
    with torch.device("meta"):
        network = AutoModelForSequenceClassification.from_config(
            LlamaConfig(**config, num_labels=1)
        )
    adapter = AdapterConfig(kind="lora", rank=rank, targets=["all-linear"])
    model = ModelConfig(kind="hf", path="/x", config=config)
    found = with_trained_size(
        NetworkBeside("value", 0), model, adapter if rank else AdapterConfig()
    )
    whole = sum(parameter.numel() for parameter in network.parameters())
    added = sum(
        rank * (module.in_features + module.out_features)
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "score"
    )
    assert found.num_parameters == whole + added
    assert found.num_trained == (added + network.score.weight.numel() if rank else whole)
