"""The auxiliary loss of mixtures of experts: transformers' number, and the same under any split."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod, model_inputs
from llmx.models.experts import Routing, accept_masks, expert_blocks
from llmx.models.loss import micro_batch_loss
from tests.rundirs import TINY_LLAMA
from tests.small_models import CONVERTED, converted_model, small_model

KINDS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
LENGTHS = [(5, 9), (3, 4, 6), (14,), (2, 2)]
"""Rows of each line."""


def model_of(kind: str, **more: Any) -> Any:
    model = converted_model(kind, output_router_logits=True, router_aux_loss_coef=0.5, **more)
    accept_masks(model)
    return model


def batch(lines: list[tuple[int, ...]], *, length: int = 16) -> dict[str, torch.Tensor]:
    """Packed lines whose tokens depend on the line alone."""
    shape = (len(lines), length)
    ids, positions, segments = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    labels = torch.full(shape, -100)
    for number, rows in enumerate(lines):
        draw, start = torch.Generator().manual_seed(sum(rows)), 0
        for segment, row in enumerate(rows, start=1):
            part = (number, slice(start, start + row))
            ids[part] = torch.randint(3, 90, (row,), generator=draw)
            positions[part] = torch.arange(row)
            segments[part] = segment
            labels[number, start : start + row - 1] = ids[part][1:]
            start += row
    return {"input_ids": ids, "position_ids": positions, "segment_ids": segments, "labels": labels}


def run(model: Any, routing: Routing, lines: list[tuple[int, ...]], **shape: int) -> torch.Tensor:
    """Sum over the lines: cross entropy, and tokens x the weighted auxiliary loss."""
    made, cpu = batch(lines, **shape), torch.device("cpu")
    inputs, labels = model_inputs(made, method=AttentionMethod(), dtype=torch.float32, device=cpu)
    with routing.watch(made["segment_ids"]):
        loss = micro_batch_loss(model, inputs, labels)
    return routing.objective(loss, factor=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_line_has_the_auxiliary_loss_of_transformers(kind: str) -> None:
    """With its padding left out, too, which transformers does for a mask [B, T]."""
    model = model_of(kind)
    routing = Routing(model)
    for length in (16, 11):
        routing.begin_step()
        run(model, routing, [(length,)])
        made = batch([(length,)])
        mask = (made["segment_ids"] > 0).long() if length < 16 else None
        theirs = model(input_ids=made["input_ids"], attention_mask=mask).aux_loss
        assert routing.auxiliary_sum is not None
        assert routing.auxiliary_sum.item() / length == pytest.approx(theirs.item(), rel=1e-5)


def gradients(model: Any, routing: Routing, parts: list[list[int]]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    routing.begin_step()
    total = 0.0
    for lines in parts:
        objective = run(model, routing, [LENGTHS[line] for line in lines], length=24)
        objective.backward()
        total += objective.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_under_any_split(kind: str, checkpointing: bool) -> None:
    model = model_of(kind).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    routing = Routing(model)
    whole, wanted = gradients(model, routing, [[0, 1, 2, 3]])
    auxiliary, load = float(routing.auxiliary_sum or 0), routing.load
    for split in ([[0], [1], [2], [3]], [[3, 1], [2, 0]]):
        total, found = gradients(model, routing, split)
        assert total == pytest.approx(whole, rel=1e-5)
        assert float(routing.auxiliary_sum or 0) == pytest.approx(auxiliary, rel=1e-5)
        assert torch.equal(routing.load, load)
        assert float((found - wanted).norm() / wanted.norm()) < 2e-5
    # It is felt: the routers learn otherwise without it.
    routing.coefficient = 0.0
    _, without = gradients(model, routing, [[0], [1], [2], [3]])
    assert float((without - wanted).norm() / wanted.norm()) > 1e-2


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_the_load_of_experts_is_what_the_routers_chose(kind: str, group: None) -> None:
    model = converted_model(kind)  # no auxiliary loss is asked for
    routing, chosen = Routing(model), []
    for module, _ in routing.routers:
        module.register_forward_hook(lambda m, i, output: chosen.append(output[-1]))
    with mock.patch("llmx.models.experts.to_device", side_effect=lambda one, _: one) as copies:
        run(model, routing, [(11,), (3, 4)])
    # From page-locked memory: any other copy waits for all that the GPU has been given to do.
    assert [call.args[0].shape for call in copies.call_args_list] == [(2 * 16,), (2,)]
    assert routing.auxiliary_sum is None
    if routing.load is None and kind == "deepseek_v3":
        pytest.skip("routers of this version of transformers do not say what they chose")
    load = routing.load
    assert load is not None
    assert len(load) == len(routing.routers) == len(chosen) > 0
    for found, ids in zip(load, chosen, strict=True):
        real = torch.cat([ids[:11], ids[16 : 16 + 7]])
        assert torch.equal(found, torch.bincount(real.flatten(), minlength=len(found)).float())
    measured = routing.measure(tokens=18)
    assert measured["expert_load_max"] == pytest.approx(float((load / load.mean(1, True)).max()))
    assert measured["experts_idle"] == int((load == 0).sum())
    assert "aux_loss" not in measured


def test_a_dense_model_alone_has_nothing_to_route() -> None:
    model, loss = small_model("llama"), torch.ones(())
    routing = Routing(model)
    assert routing.routers == []
    assert routing.objective(loss, factor=2.0) is loss
    assert routing.measure(tokens=4) == {}
    assert expert_blocks(model) == []
    for kind in set(CONVERTED) - {"gpt_neox", "qwen3_5_text"}:
        (block,) = expert_blocks(converted_model(kind))
        assert "Mo" in block.__name__  # ...MoeBlock, ...MoE


def test_an_auxiliary_loss_of_another_kind_is_refused() -> None:
    config = AutoConfig.for_model(
        "doge", **TINY_LLAMA, vocab_size=90, is_moe=True, num_experts=4, output_router_logits=True
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"Doge\w+ has none that llmx knows.*logits=false"):
        Routing(model)


BESIDE_A_TOWER = """
import sys
from transformers import InternVLConfig, Qwen3MoeConfig
from llmx.models.factory import _import_network
_import_network("causal_lm", InternVLConfig(text_config=Qwen3MoeConfig().to_dict()))
wanted = {"internvl.modeling_internvl", "qwen3_moe.modeling_qwen3_moe"}
sys.exit(not wanted <= {name.removeprefix("transformers.models.") for name in sys.modules})
"""


def test_the_experts_of_a_multi_modal_model_are_imported_with_it() -> None:
    """Its network imports them when it is built; inside ``deepspeed.zero.Init`` that is too late.
    In a process that has imported nothing yet."""
    subprocess.run([sys.executable, "-c", BESIDE_A_TOWER], check=True)
