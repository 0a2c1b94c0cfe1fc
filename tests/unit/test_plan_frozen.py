"""The plan of networks beside the exported one, frozen or trained, and of ``model.freeze``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

from llmx.compose.complete import Composed
from llmx.config import AdapterConfig, ModelConfig
from llmx.models.adapter import freeze
from llmx.plan.adapter import trained_parameters
from llmx.plan.memory import GIB, with_trained_size
from llmx.plan.types import NetworkBeside, Plan
from tests.composing import composed

MODEL = ["model=llama2_7b", "hardware=a800x2_n7", "precision=bf16"]
TEACHER = {
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
}
BILLION_13 = 13_015_864_320
"""Parameters of Llama 2 13B."""


def dpo(*words: str) -> Composed:
    return composed([*MODEL, "task=dpo", "data=file", "data.path=demo", *words])


def parameters_gib(plan: Plan) -> float:
    (memory,) = plan.memory
    return memory.parameters_gib


@pytest.mark.parametrize("stage", [2, 3])
def test_a_live_reference_is_counted(stage: int) -> None:
    stored = dpo(f"zero=stage{stage}").plan
    live = dpo(f"zero=stage{stage}", "task.options.reference=live").plan
    more = 2 * live.num_parameters / (live.world_size if stage == 3 else 1) / GIB
    assert parameters_gib(live) - parameters_gib(stored) == pytest.approx(more)
    assert live.memory[0].logits_gib > stored.memory[0].logits_gib
    for part in ("gradients_gib", "optimizer_gib", "activations_gib"):
        assert getattr(live.memory[0], part) == getattr(stored.memory[0], part)
    assert [one.name for one in live.beside] == ["reference"]
    assert stored.beside[0].before_training
    # It survives a trip through plan.json; an elastic restart plans with it.
    assert Plan.from_dict(json.loads(json.dumps(live.to_dict()))) == live
    assert Plan.from_dict(json.loads(json.dumps(stored.to_dict()))) == stored


def test_a_reference_that_is_the_base_of_an_adapter_takes_nothing() -> None:
    stored = dpo("adapter=lora").plan
    live = dpo("adapter=lora", "task.options.reference=live").plan
    assert live.memory == stored.memory
    assert live.beside == stored.beside == ()
    assert "beside" not in live.to_dict()


def distilled(tmp_path: Path, *words: str, config: dict[str, Any] = TEACHER) -> Plan:
    teacher = tmp_path / "teacher"
    teacher.mkdir(exist_ok=True)
    (teacher / "config.json").write_text(json.dumps(config))
    (teacher / "model.safetensors").touch()
    option = f"task.options.teacher={teacher}"
    return composed([*MODEL, "task=distill", option, "data=file", "data.path=demo", *words]).plan


def test_a_teacher_is_counted_where_it_is_there(tmp_path: Path) -> None:
    stored = distilled(tmp_path)
    live = distilled(tmp_path, "task.options.teacher_logits=live")
    assert [one.num_parameters for one in live.beside] == [BILLION_13]
    assert live.time.computing_s > stored.time.computing_s
    # At ZeRO-2 every rank holds it whole: 24 GiB of bf16.
    stage2 = [
        distilled(tmp_path, "zero=stage2", f"task.options.teacher_logits={how}")
        for how in ("stored", "live")
    ]
    more = parameters_gib(stage2[1]) - parameters_gib(stage2[0])
    assert more == pytest.approx(2 * BILLION_13 / GIB)


def test_a_teacher_that_does_not_fit_before_training_is_said(tmp_path: Path) -> None:
    large = {**TEACHER, "num_hidden_layers": 160}
    plan = distilled(tmp_path, "zero=stage2", config=large)
    assert any("'teacher' of task=distill takes" in one for one in plan.warnings)
    assert any("zero=stage3 shards it over the ranks" in one for one in plan.warnings)
    assert not any("teacher" in one for one in distilled(tmp_path, "zero=stage3").warnings)
    unknown = distilled(tmp_path, config={"model_type": "unheard_of"})
    assert any("memory of the model 'teacher'" in one for one in unknown.warnings)


def test_frozen_parameters_have_neither_gradients_nor_an_optimizer() -> None:
    words = [*MODEL, "zero=stage2", "data=file", "data.path=demo"]
    whole = composed(words).plan
    half = composed([*words, "model.freeze=['*.embed_tokens.*','*.layers.?.*']"]).plan
    assert whole.num_trained is None
    assert half.num_trained is not None
    part = half.num_trained / half.num_parameters
    assert 0.6 < part < 0.7  # 22 of 32 layers, and the output head
    for name in ("gradients_gib", "optimizer_gib"):
        ours, theirs = getattr(half.memory[0], name), getattr(whole.memory[0], name)
        assert ours == pytest.approx(part * theirs, rel=1e-6)
    assert half.memory[0].parameters_gib == whole.memory[0].parameters_gib


@pytest.mark.parametrize(
    "patterns", [["*.embed_tokens.*"], ["*.layers.0.*", "model.norm.weight"], ["lm_head.*"]]
)
def test_what_is_frozen_is_counted_as_the_network_has_it(patterns: list[str]) -> None:
    config = {**TEACHER, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(LlamaConfig(**config))
    freeze(network, patterns)
    wanted = sum(p.numel() for p in network.parameters() if p.requires_grad)
    model = ModelConfig(kind="hf", path="/x", config=config, freeze=patterns)
    assert trained_parameters(model, AdapterConfig()) == wanted


def test_what_a_loss_asks_of_the_output_head() -> None:
    many = ["data=file", "data.path=demo", "batch.micro_batch=16"]
    summed = composed([*MODEL, "task=sft", *many]).plan
    unfused = composed([*MODEL, "task=sft", *many, "model.fused_loss=false"]).plan
    whole = dpo("batch.micro_batch=16").plan
    none = composed([*MODEL, "task=reward", *many]).plan
    assert (summed.logits, whole.logits, none.logits) == ("summed", "whole", "none")
    assert whole.memory[0].logits_gib > summed.memory[0].logits_gib
    assert whole.memory[0].logits_gib == unfused.memory[0].logits_gib
    assert none.memory[0].logits_gib == 0
    assert "logits" not in summed.to_dict()
    assert Plan.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_the_source_of_a_network_is_known(tmp_path: Path) -> None:
    plan = distilled(tmp_path)
    assert [one.source for one in plan.beside] == [str(tmp_path / "teacher")]
    hub = composed(
        [*MODEL, "task=distill", "task.options.teacher=owner/name", "data=file", "data.path=demo"]
    ).plan
    assert [(one.source, one.revision) for one in hub.beside] == [("owner/name", None)]
    assert [one.source for one in dpo().plan.beside] == [None]


def ppo(*words: str) -> Composed:
    return composed([*MODEL, "task=ppo", "data=file", "data.path=demo", *words])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_value_model_is_trained_as_the_policy_is(stage: int) -> None:
    """Gradients, optimizer and activations twice; a reference takes its weights alone."""
    words = [f"zero=stage{stage}", "task.options.beta=0"]
    alone = composed([*MODEL, "task=grpo", "data=file", "data.path=demo", *words]).plan
    both = ppo(*words, "task.options.group_size=8", "task.options.updates=1").plan
    (value,) = both.beside
    # Llama's output head of 32,000 rows is a score of one.
    assert value.num_parameters == value.num_trained == alone.num_parameters - 31_999 * 4096
    assert both.num_parameters == alone.num_parameters + value.num_parameters
    assert both.num_trained is None
    part = both.num_parameters / alone.num_parameters
    for name in ("gradients_gib", "optimizer_gib"):
        ours, theirs = getattr(both.memory[0], name), getattr(alone.memory[0], name)
        assert ours == pytest.approx(part * theirs, rel=1e-6)
    assert both.memory[0].activations_gib == pytest.approx(2 * alone.memory[0].activations_gib)
    assert both.memory[0].logits_gib == alone.memory[0].logits_gib
    assert both.time.computing_s > 1.8 * alone.time.computing_s
    checkpoints = [plan.storage.checkpoint_bytes for plan in (both, alone)]
    assert checkpoints[0] == pytest.approx(part * checkpoints[1], rel=1e-3)
    assert both.storage.model_bytes == alone.storage.model_bytes, "the policy is exported"
    with_reference = ppo(f"zero=stage{stage}").plan
    assert [network.num_trained > 0 for network in with_reference.beside] == [True, False]
    assert with_reference.memory[0].optimizer_gib == both.memory[0].optimizer_gib
    assert Plan.from_dict(json.loads(json.dumps(with_reference.to_dict()))) == with_reference


def test_a_value_model_with_an_adapter_trains_its_head_whole() -> None:
    plan = ppo("adapter=lora", "adapter.rank=8").plan
    (value,) = plan.beside
    assert value.name == "value", "the reference is the policy without its adapter"
    alone = composed(
        [*MODEL, "task=grpo", "data=file", "data.path=demo", "adapter=lora", "adapter.rank=8"]
    ).plan
    assert value.num_trained == alone.num_trained + 4096
    assert plan.num_trained == alone.num_trained + value.num_trained
    assert plan.storage.model_bytes == alone.storage.model_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_value_model_is_counted_as_the_network_is(tied: bool, rank: int) -> None:
    config = {**TEACHER, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    config |= {"tie_word_embeddings": tied}
    with torch.device("meta"):
        network = AutoModelForSequenceClassification.from_config(
            LlamaConfig(**config, num_labels=1)
        )
    lora = AdapterConfig(kind="lora", rank=rank, targets=["all-linear"])
    adapter = lora if rank else AdapterConfig()
    model = ModelConfig(kind="hf", path="/x", config=config)
    found = with_trained_size(NetworkBeside("value", 0), model, adapter)
    whole = sum(parameter.numel() for parameter in network.parameters())
    linear = [
        module
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "score"
    ]
    added = sum(rank * (module.in_features + module.out_features) for module in linear)
    assert found.num_parameters == whole + added
    assert found.num_trained == (added + 64 if rank else whole)
