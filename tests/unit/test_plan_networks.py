"""What a plan says of an adapter, of ``model.freeze`` and of networks beside the exported one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmx.errors import ConfigError
from llmx.lifecycle import knowledge
from llmx.lifecycle.knowledge import informed
from llmx.plan.types import Plan
from tests.composing import composed, planned, sized


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the process that reads a config answers."""
    monkeypatch.setattr("llmx.compose.networks.TIME_LIMIT_S", 900.0)


LLAMA = ["model=llama2_7b", "hardware=a100x8", "batch.micro_batch=1"]
LLAMA += ["model.config.num_hidden_layers=8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("adapter=lora adapter.targets=[]", "adapter.targets is empty.*all-linear"),
        ("adapter=lora adapter.targets=[all-linear,q_proj]", "all-linear stands beside"),
        ("adapter=lora adapter.targets=[v] adapter.modules_to_save=[v]", "v is one of adap"),
        ("adapter.rank=4", "adapter.rank=4 has no effect.*adapter=lora"),
        ("adapter=qlora hardware=cpu2", "=nf4 trains on CUDA only.*Use adapter=lora"),
        ("adapter=lora model.init=scratch", "adapter.kind=lora with model.init=scratch"),
        ("adapter=lora model.freeze=['*.layers.0.*']", "model.freeze=.*beside adapter.kind=lora"),
        ("adapter=qlora zero=stage3", "adapter.quantize=nf4 with zero.stage=3: .* Set zero=stage2"),
        ("adapter=qlora zero=stage2 model.compile=true", "model.compile=true has not been tried"),
    ],
)
def test_what_is_wrong_is_said(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed([*LLAMA, *words.split()])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("adapter.targets=[q_projj]", 'Did you mean "q_proj".*It has q_proj, k_proj'),
        ("model.freeze=['*.layers.99.*']", "model.freeze: .*matches none of the"),
    ],
)
def test_names_are_checked_by_the_network_before_ranks_start(
    typed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, once: the second start reads the refusal."""
    monkeypatch.setenv("LLMX_TRACES", "on")
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path))
    monkeypatch.setattr(knowledge, "TIME_LIMIT_S", 900.0)
    done = composed([*LLAMA, typed, *(["adapter=lora"] if "adapter" in typed else [])])
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            informed(done)
        monkeypatch.setattr(knowledge, "ask", None)


def test_flops_are_those_of_what_is_trained() -> None:
    whole = sized([*LLAMA, "zero=stage2"]).plan
    lora = sized([*LLAMA, "zero=stage2", "adapter=lora"]).plan
    assert whole.num_trained is None
    assert lora.num_trained == 9_994_240
    assert lora.num_parameters == whole.num_parameters + lora.num_trained
    assert lora.time.flops == pytest.approx(whole.time.flops * 2 / 3, rel=0.02)


@pytest.mark.usefixtures("made_up_traces")
def test_zero_3_is_not_advised_for_4_bits() -> None:
    words = "adapter=qlora zero=stage2_offload hardware.devices.a100_80g.memory_gib=2"
    (_, advice) = planned([*LLAMA, *words.split(), "data.seq_len=4096"]).plan.memory_warnings
    assert "The least memory has zero=stage2_offload" in advice


MODEL = ["model=llama2_7b", "hardware=a800x2_n7", "precision=bf16", "data=file", "data.path=demo"]
MODEL += ["model.config.num_hidden_layers=8"]


def plan_of(*words: str) -> Plan:
    """Of a quarter of a 7B model on a cluster; what ``plan.json`` keeps is all of it."""
    plan = sized([*MODEL, *words]).plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    return plan


def test_frozen_parameters_are_not_trained() -> None:
    half = plan_of("zero=stage2", "model.freeze=['*.embed_tokens.*','*.layers.[0-3].*']")
    assert half.num_trained == (half.num_parameters - 4096) // 2 + 4096  # and the last norm


LIVE = "task.options.reference=live"


def test_a_live_reference_is_counted() -> None:
    stored, live = plan_of("task=dpo"), plan_of("task=dpo", LIVE)
    (reference,) = live.beside
    assert (reference.name, reference.network.num_trained) == ("reference", 0)
    assert reference.network.num_parameters == live.num_parameters
    assert stored.beside[0].before_training
    assert stored.beside[0].source is None
    assert stored.beside[0].network.num_parameters == stored.num_parameters
    assert live.time.computing_s > 1.2 * stored.time.computing_s
    adapted = [plan_of("task=dpo", "adapter=lora", *words) for words in ([], [LIVE])]
    assert [plan.beside for plan in adapted] == [(), ()], "its base is the reference"


TEACHER = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "vocab_size": 32000,
    "num_hidden_layers": 2, "num_attention_heads": 40, "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""Two of the layers of Llama 2 13B."""


def teacher_words(root: Path, config: dict[str, Any]) -> list[str]:
    (root / "config.json").write_text(json.dumps(config))
    (root / "model.safetensors").touch()
    return ["task=distill", f"task.options.teacher={root}"]


def test_a_teacher_is_counted_where_it_is_there(tmp_path: Path) -> None:
    words = teacher_words(tmp_path, TEACHER)
    stored, live = (
        plan_of(*words, f"task.options.teacher_logits={name}") for name in ("stored", "live")
    )
    for plan in (stored, live):
        (teacher,) = plan.beside
        assert (teacher.network.num_parameters, teacher.source) == (962_094_080, str(tmp_path))
    assert live.time.computing_s > stored.time.computing_s
    (hub,) = plan_of("task=distill", "task.options.teacher=owner/name").beside
    assert (hub.source, hub.revision, hub.network) == ("owner/name", None, None)


@pytest.mark.usefixtures("made_up_traces")
def test_a_teacher_that_does_not_fit_before_training_is_said(tmp_path: Path) -> None:
    words = [*MODEL, *teacher_words(tmp_path, {**TEACHER, "num_hidden_layers": 160})]
    warnings = planned([*words, "zero=stage2"]).plan.warnings
    assert any("'teacher' of task=distill takes" in text for text in warnings)
    assert any("zero=stage3 shards it over the ranks" in text for text in warnings)
    assert not any("teacher" in text for text in planned([*words, "zero=stage3"]).plan.warnings)
    (tmp_path / "unknown").mkdir()
    unknown = teacher_words(tmp_path / "unknown", {"model_type": "unheard_of"})
    warnings = planned([*MODEL, *unknown]).plan.warnings
    assert any("memory of the model 'teacher'" in text for text in warnings)


def test_a_value_model_is_trained_as_the_policy_is() -> None:
    words = ["zero=stage3", "task.options.beta=0"]
    alone = plan_of("task=grpo", *words)
    both = plan_of("task=ppo", *words, "task.options.group_size=8", "task.options.updates=1")
    value = both.beside[0].network
    # Llama's output head of 32,000 rows is a score of one.
    assert value.num_parameters == value.num_trained == alone.num_parameters - 31_999 * 4096
    assert both.num_parameters == alone.num_parameters + value.num_parameters
    assert both.num_trained is None
    part = both.num_parameters / alone.num_parameters
    assert both.time.computing_s > 1.8 * alone.time.computing_s
    checkpoints = [plan.storage.checkpoint_bytes for plan in (both, alone)]
    assert checkpoints[0] == pytest.approx(part * checkpoints[1], rel=1e-3)
    assert both.storage.model_bytes == alone.storage.model_bytes, "the policy is exported"
    with_reference = plan_of("task=ppo", words[0])
    assert [bool(b.network.num_trained) for b in with_reference.beside] == [True, False]
    # With an adapter its head is trained whole.
    alone, plan = (plan_of(f"task={name}", "adapter=lora") for name in ("grpo", "ppo"))
    (value,) = plan.beside
    assert value.name == "value", "the reference is the policy without its adapter"
    assert value.network.num_trained == alone.num_trained + 4096
    assert plan.num_trained == alone.num_trained + value.network.num_trained
    assert plan.storage.model_bytes == alone.storage.model_bytes
