"""Whatever a rank computes again, its gradients become ready in the order of every other rank:
DeepSpeed's stages 1 and 2 add up buckets that are filled in this order."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmx.config import AdapterConfig, DataConfig, ModelConfig
from llmx.models.adapter import add_adapter
from llmx.models.attention import AttentionMethod, model_inputs
from llmx.models.blocks import recompute
from llmx.models.spec import CAUSAL_LM
from llmx.models.varlen import SEGMENTS, register
from llmx.train.engine.build import BuiltNetwork, check_gradient_order, gradient_order
from tests.saved_activations import SMALL, WITH_EXPERTS, small_inputs, small_model

WHOLE = {"zero_optimization": {"stage": 0}}
KINDS = [*SMALL, *WITH_EXPERTS]


def network_of(kind: str, *, adapted: bool, how: str) -> Any:
    model = small_model(kind, dtype=torch.float32)
    if adapted:
        adapter = AdapterConfig(kind="lora", rank=2, targets=["all-linear"], dropout=0.1)
        source = ModelConfig(kind=kind)
        add_adapter(model, source, adapter, 0, ds_config=WHOLE, dtype=torch.float32, head=CAUSAL_LM)
    if how != "none":
        recompute(model, how)
    return model.train()


def order_of(network: Any) -> list[str]:
    inputs = small_inputs(batch=2, length=16)
    return gradient_order(network, partial(network, **inputs, use_cache=False))


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_the_same_whatever_is_computed_again(kind: str, adapted: bool) -> None:
    network = network_of(kind, adapted=adapted, how="none")
    wanted = order_of(network)
    trained = {name for name, one in network.named_parameters() if one.requires_grad}
    assert set(wanted) == trained
    assert len(wanted) == len(trained)
    assert not any(one.grad is not None for one in network.parameters())
    for how in ("selective", "full"):
        assert order_of(network_of(kind, adapted=adapted, how=how)) == wanted


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt", "mixtral"])
def test_the_order_is_the_same_whatever_computes_attention(kind: str) -> None:
    """As types of devices differ in it: row by row (a V100), and otherwise; several rows in one
    line."""
    register()
    batch = {
        "input_ids": torch.arange(24)[None] % 20,
        "position_ids": torch.cat([torch.arange(n) for n in (5, 12, 7)])[None],
        "segment_ids": torch.repeat_interleave(torch.tensor([1, 2, 3]), torch.tensor([5, 12, 7]))[
            None
        ],
        "labels": torch.arange(24)[None] % 20,
    }
    orders = {}
    for way, isolation in ((SEGMENTS, "cu_seq_lens"), ("sdpa", "mask"), ("eager", "mask")):
        network = small_model(kind, dtype=torch.float32)
        network.set_attn_implementation(way)
        network.config.output_router_logits = False  # llmx takes them from the routers
        inputs, _ = model_inputs(
            batch,
            method=AttentionMethod(way, isolation),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        orders[way] = gradient_order(network, partial(network, **inputs, use_cache=False))
    assert orders[SEGMENTS] == orders["sdpa"] == orders["eager"]


def test_another_graph_is_another_order() -> None:
    """What the comparison is for: the same numbers, the gradients in another order."""
    one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    both = torch.nn.ModuleList([one, two])
    values = torch.ones(1, 4)
    orders = [
        gradient_order(both, lambda: one(values) + two(values)),
        gradient_order(both, lambda: two(values) + one(values)),
    ]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


class Small(torch.nn.Module):
    """A network that asks nothing of its values."""

    config = SimpleNamespace()

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)

    def forward(self, input_ids: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.rows(input_ids))}


def test_networks_are_tried_on_the_device_of_their_rank() -> None:
    """They are built in host memory; a GPU's attention runs nowhere else. Here a device that
    computes shapes only."""
    network, method = Small(), AttentionMethod("eager", "none")
    exp: Any = SimpleNamespace(data=DataConfig(seq_len=8))
    part = BuiltNetwork(exp, network, network.config, method, "fp32", False, 8)
    plan: Any = SimpleNamespace(checkpointing=(("v100_32g", "full"),))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        check_gradient_order({"policy": part}, plan, device=torch.device("meta"))
    finally:
        torch.distributed.destroy_process_group()
    assert {one.device.type for one in network.parameters()} == {"meta"}
