"""What a plan says of an adapter is what the network has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llmx.compose.complete import refusal
from llmx.config import experiment_from_dict
from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.models.adapter import add_adapter
from llmx.plan import make_plan
from llmx.plan.adapter import (
    adapter_size,
    freeze_problems,
    network_modules,
    target_problems,
)
from llmx.plan.choices import with_traces
from llmx.plan.memory import GIB
from llmx.plan.trace import Traces
from tests.composing import composed
from tests.small_models import small_model

SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen3": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    },
}
LORA = {"kind": "lora", "rank": 4, "targets": ["all-linear"]}


def experiment(architecture: str, *, tied: bool = True, **adapter: Any) -> Any:
    config = {**SMALL[architecture], "vocab_size": 90, "tie_word_embeddings": tied}
    return experiment_from_dict(
        {
            "model": {
                "kind": architecture,
                "path": "/models/base",
                "init": "pretrained",
                "config": config,
            },
            "adapter": {**LORA, **adapter},
            "task": {"kind": "sft", "steps": 3},
            "hardware": {
                "hosts": [{"name": "localhost", "slots": 2, "device": "cpu"}],
                "devices": {"cpu": {"accelerator": "cpu", "precisions": ["fp32"]}},
            },
        }
    )


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize(
    "adapter",
    [
        {},
        {"dora": True, "rank": 3},
        {"targets": ["fc2", "down_proj", "c_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_the_parameters_that_are_trained(kind: str, adapter: dict[str, Any]) -> None:
    tied = kind in ("gpt2", "opt")
    network = small_model(kind, **{**SMALL[kind], "tie_word_embeddings": tied})
    names = [name for name, _ in network.named_modules()]
    if "targets" in adapter:
        adapter = {
            "targets": [
                target
                for target in adapter["targets"]
                if any(name.endswith(target) for name in names)
            ]
        }
    exp = experiment(kind, tied=tied, **adapter)
    modules = network_modules(exp.model)
    assert modules is not None
    assert {*modules.linear, *modules.others} == {
        name
        for name, module in network.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    assert not list(target_problems(exp.model, exp.adapter))
    if tied and "modules_to_save" in adapter:
        return  # tied: the embedding is trained with it
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
    assert size is not None
    assert size.trained == sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert size.added == sum(p.numel() for p in network.parameters()) - before
    plan = make_plan(exp)
    assert plan.num_trained == size.trained
    assert plan.num_parameters == before + size.added


def test_gradients_and_optimizer_are_those_of_what_is_trained() -> None:
    words = ["model=llama2_7b", "hardware=a100x8", "batch.micro_batch=1", "zero=stage2"]
    whole = composed(words).plan
    lora = composed([*words, "adapter=lora"]).plan
    assert whole.num_trained is None
    assert lora.num_trained == 39_976_960
    assert lora.num_parameters == whole.num_parameters + lora.num_trained
    memory = lora.memory[0]
    assert memory.parameters_gib == pytest.approx(2 * lora.num_parameters / GIB)
    ranks = lora.world_size
    assert memory.optimizer_gib == pytest.approx(12 * lora.num_trained / ranks / GIB)
    assert memory.gradients_gib < 0.2
    assert whole.memory[0].gradients_gib > 1
    assert memory.total_gib < whole.memory[0].total_gib / 1.5
    assert lora.time.flops == pytest.approx(whole.time.flops * 2 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"targets": []}, ["adapter.targets is empty", "all-linear"]),
        ({"targets": ["all-linear", "q_proj"]}, ["all-linear stands beside other names"]),
        ({"modules_to_save": ["q_proj"], "targets": ["q_proj"]}, ["q_proj is one of adapter.tar"]),
        ({"kind": "none", "rank": 8, "targets": []}, ["adapter.rank=8 has no effect", "=lora"]),
        ({"quantize": "nf4"}, ["adapter.quantize=nf4 trains on CUDA only", "Use adapter=lora"]),
    ],
)
def test_what_is_wrong_is_said(adapter: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        validate(experiment("llama", **adapter))
    assert all(word in str(error.value) for word in words), error.value


def test_an_adapter_needs_weights() -> None:
    exp = experiment("llama")
    exp.model.init = "scratch"
    with pytest.raises(ConfigError, match=r"adapter\.kind=lora with model\.init=scratch"):
        validate(exp)
    exp = experiment("llama")
    exp.model.freeze = ["*.layers.0.*"]
    with pytest.raises(ConfigError, match=r"model\.freeze.* beside adapter\.kind=lora"):
        validate(exp)


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
    task: str, adapter: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = {**BERT, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    base = ["hardware=cpu2", "model=hf", f"model.path={tmp_path}", "model.tokenizer=demo"]
    own = [f"adapter.{key}=[{','.join(names)}]" for key, names in adapter.items()]
    base += ["adapter=lora", f"task={task}", "data.seq_len=64", *own]
    if not words:
        assert composed(base).plan
        return
    with pytest.raises(ConfigError, match=words):
        composed(base)


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_patterns_of_parameters_are_checked_before_ranks_start(kind: str) -> None:
    """Of the real network none is refused."""
    exp = experiment(kind)
    for name, _ in small_model(kind, **SMALL[kind]).named_parameters(remove_duplicate=False):
        model = dataclasses.replace(exp.model, freeze=[name])
        assert not list(freeze_problems(model)), name
    model = dataclasses.replace(exp.model, freeze=["*.embedd*", "*.layers.9.*"])
    problems = list(freeze_problems(model))
    assert len(problems) == 2
    assert all(problem.startswith("model.freeze: ") for problem in problems)
    assert all("a star stands for any characters" in problem for problem in problems)
    model = dataclasses.replace(exp.model, freeze=["layers.0.*", "h.0.*", "decoder.layers.0.*"])
    assert len(list(freeze_problems(model, head=""))) == 2, "of a backbone, maybe"


BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 90,
}


def test_a_bert_has_names_of_its_own() -> None:
    from transformers import BertConfig, BertForMaskedLM

    exp = experiment("llama", targets=["query", "value"])
    model = dataclasses.replace(exp.model, kind="bert", config=BERT)
    network = BertForMaskedLM(BertConfig(**BERT))
    modules = network_modules(model)
    assert modules is not None
    assert {*modules.linear, *modules.others} == {
        name
        for name, module in network.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    # A classifier has other names behind the encoder: what one of both has is not refused.
    others = {"targets": ["pooler.dense"], "modules_to_save": ["classifier"]}
    assert not list(target_problems(model, dataclasses.replace(exp.adapter, **others)))
    (problem,) = target_problems(model, dataclasses.replace(exp.adapter, targets=["q_proj"]))
    assert "It has query, key, value, dense." in problem


QLORA = ["model=llama2_7b", "hardware=a100x8", "adapter=qlora", "batch.micro_batch=1"]


def test_weights_in_4_bits_are_counted() -> None:
    words = [word for word in QLORA if word != "adapter=qlora"]
    lora = composed([*words, "adapter=lora", "zero=stage2"]).plan
    qlora = composed([*QLORA, "zero=stage2"]).plan
    plain = composed([*QLORA, "zero=stage2", "adapter.double_quant=false"]).plan
    assert qlora.num_parameters == lora.num_parameters
    assert qlora.num_trained == lora.num_trained
    quantized = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    others = lora.num_parameters - quantized
    found = [plan.memory[0].parameters_gib * GIB for plan in (lora, qlora, plain)]
    assert found[0] == pytest.approx(2 * lora.num_parameters)
    assert found[1] == pytest.approx(2 * others + quantized * (0.5 + 1 / 64 + 4 / 64 / 256))
    assert found[2] == pytest.approx(2 * others + quantized * (0.5 + 4 / 64))
    # One layer is unpacked at a time.
    more = qlora.memory[0].activations_gib - lora.memory[0].activations_gib
    assert more == pytest.approx(2 * 4096 * 11008 / GIB)
    for part in ("gradients_gib", "optimizer_gib", "logits_gib"):
        assert getattr(qlora.memory[0], part) == getattr(lora.memory[0], part)


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


def test_zero_3_is_not_advised_for_4_bits() -> None:
    words = ["zero=stage2_offload", "data.seq_len=4096", "batch.micro_batch=1"]
    more = ["model.activation_checkpointing=full", "hardware.devices.a100_80g.memory_gib=5"]
    found = composed([*QLORA, *words, *more])
    plan = with_traces(found.plan, found.experiment, Traces({}), allows=refusal)
    said = " ".join(plan.memory_warnings)
    assert "expect it to run out of memory" in said
    assert "zero=stage3" not in said
