"""A network with its first blocks alone is the smaller network; which networks have such blocks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel

from llmx.config import AdapterConfig, ModelConfig
from llmx.models.adapter import add_adapter
from llmx.models.attention import AttentionMethod, model_inputs
from llmx.models.blocks import compile_blocks, recompute, stack_of
from llmx.models.experts import Routing
from llmx.models.model import Model, Models, ModelSpec
from llmx.models.spec import CAUSAL_LM
from llmx.models.varlen import SEGMENTS, register
from llmx.train.engine.build import check_gradient_order, gradient_order
from tests.rundirs import PARITY_MODELS
from tests.saved_activations import SMALL, WITH_EXPERTS, saved_bytes, small_inputs, small_model
from tests.small_models import CONVERTED
from tests.unit.test_models_classification import BERT

KINDS: dict[str, dict[str, Any]] = {
    **PARITY_MODELS,
    "mixtral": CONVERTED["mixtral"],
    "bert": {**BERT, "vocab_size": 32},
}


def config_of(kind: str, layers: int = 3) -> Any:
    key = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    return AutoConfig.for_model(kind, **{"vocab_size": 32, **KINDS.get(kind, {}), key: layers})


def network_of(config: Any) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = AutoModel.from_config(config)
    return network.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_blocks_are_the_smaller_network(kind: str) -> None:
    network = network_of(config_of(kind))
    stack = stack_of(network)
    assert len(stack.blocks) == 3
    ids = torch.arange(8)[None]
    whole = network(ids).last_hidden_state
    weights = network.state_dict()
    smaller = network_of(config_of(kind, 2))
    smaller.load_state_dict({name: weights[name] for name in smaller.state_dict()})
    stack.cut(2)
    assert len(list(network.parameters())) == len(list(smaller.parameters()))
    assert torch.equal(network(ids).last_hidden_state, smaller(ids).last_hidden_state)
    stack.cut(1)
    assert not torch.equal(network(ids).last_hidden_state, whole)
    stack.cut(3)  # of all blocks, however many are left
    assert torch.equal(network(ids).last_hidden_state, whole)
    stack.cut(1)
    stack.cut(len(stack.blocks))
    assert torch.equal(network(ids).last_hidden_state, whole)
    assert list(network.state_dict()) == list(weights)


def test_blocks_that_differ_are_no_stack() -> None:
    # Every second block of Gemma 2 looks at a window of what came before.
    windows = AutoConfig.for_model("gemma2", **PARITY_MODELS["llama"], vocab_size=32)
    assert stack_of(network_of(windows)) is None
    half_frozen, shared = (network_of(config_of("llama")) for _ in range(2))
    half_frozen.layers[2].requires_grad_(False)
    assert stack_of(half_frozen) is None
    shared.layers[1] = shared.layers[0]
    assert stack_of(shared) is None
    two = AutoConfig.for_model(
        "t5", vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )
    assert stack_of(network_of(two)) is None


def test_the_first_blocks_may_be_others() -> None:
    """Those of DeepSeek V3 have no experts."""
    values = {**CONVERTED["deepseek_v3"], "num_hidden_layers": 5, "first_k_dense_replace": 2}
    deepseek = AutoConfig.for_model("deepseek_v3", **values, vocab_size=32)
    for config, least in ((deepseek, 3), (config_of("llama"), 1)):
        stack = stack_of(network_of(config))
        assert stack.least == least


# --- Whatever a rank computes again, its gradients become ready in the order of every other rank:
# DeepSpeed's stages 1 and 2 add up buckets that are filled in this order.

WHOLE = {"zero_optimization": {"stage": 0}}


def network_to_train(kind: str, *, adapted: bool, how: str) -> Any:
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


@pytest.mark.parametrize("kind", [*SMALL, *WITH_EXPERTS])
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_the_order_is_the_same_whatever_is_computed_again(kind: str, adapted: bool) -> None:
    network = network_to_train(kind, adapted=adapted, how="none")
    wanted = order_of(network)
    trained = {name for name, one in network.named_parameters() if one.requires_grad}
    assert set(wanted) == trained
    assert len(wanted) == len(trained)
    assert not any(one.grad is not None for one in network.parameters())
    for how in ("selective", "full"):
        assert order_of(network_to_train(kind, adapted=adapted, how=how)) == wanted
    # As types of devices differ in it: row by row (a V100), and otherwise; rows in one line.
    register()
    rows = torch.tensor([5, 12, 7])
    inputs: dict[str, Any] = {"input_ids": torch.arange(24)[None] % 20}
    inputs["position_ids"] = torch.cat([torch.arange(length) for length in rows])[None]
    batch = {**inputs, "labels": inputs["input_ids"]}
    batch["segment_ids"] = torch.tensor([1, 2, 3]).repeat_interleave(rows)[None]
    orders = []
    for way, isolation in ((SEGMENTS, "cu_seq_lens"), ("eager", "mask")):
        if kind == "bert":
            continue
        other = network_to_train(kind, adapted=adapted, how="none")
        other.set_attn_implementation(way)
        other.config.output_router_logits = False  # llmx takes them from the routers
        inputs, _ = model_inputs(
            batch,
            method=AttentionMethod(way, isolation),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        orders.append(gradient_order(other, partial(other.eval(), **inputs, use_cache=False)))
    assert orders == ([] if kind == "bert" else [wanted] * 2)


class Small(torch.nn.Module):
    """A network that asks nothing of its values."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)

    def forward(self, input_ids: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.rows(input_ids))}


def test_another_graph_is_another_order() -> None:
    """What the comparison is for: the same numbers, the gradients in another order."""
    both, values = torch.nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.ones(1, 4)
    one, two = (
        gradient_order(both, lambda s=s: sum(m(values) for m in both[::s])) for s in (1, -1)
    )
    assert one != two
    assert sorted(one) == sorted(two)


@pytest.mark.usefixtures("group")
def test_networks_are_tried_on_the_device_of_their_rank() -> None:
    """They are built in host memory; a GPU's attention runs nowhere else. Here a device that
    computes shapes only."""
    network = Small()
    model = Model(
        name="policy",
        spec=ModelSpec(),
        module=network,
        forward=network,
        config=network.config,
        vocab_size=8,
        attention=AttentionMethod("eager", "none"),
        dtype=torch.float32,
        device=torch.device("meta"),
        routing=Routing(network),
    )
    plan: Any = SimpleNamespace(checkpointing=(("v100_32g", "full"),))
    check_gradient_order(Models(policy=model), plan, seq_len=8)
    assert {one.device.type for one in network.parameters()} == {"meta"}


# --- Activation checkpointing changes what is kept, and no number ---------------------------------

INPUTS = small_inputs(batch=2, length=64)


def model_of(kind: str, how: str, **config: Any) -> Any:
    model = small_model(kind, dtype=torch.float32, **config)
    if how != "none":
        recompute(model, how)
    return model


def gradients(model: Any) -> list[torch.Tensor]:
    model.base_model(**INPUTS, use_cache=False)[0].float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_gradients_are_the_same_and_less_is_kept(kind: str, how: str) -> None:
    plain, model = model_of(kind, "none"), model_of(kind, how)
    assert saved_bytes(model, INPUTS)[0] < 0.75 * saved_bytes(plain, INPUTS)[0]
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(one, other)


class Count(TorchDispatchMode):
    """Matrix products."""

    number = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None):
        self.number += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


def test_selective_computes_no_matrix_product_again() -> None:
    counts = {}
    for how in ("none", "selective", "full"):
        with Count() as products:
            gradients(model_of("llama", how))
        counts[how] = products.number
    assert counts["none"] == counts["selective"] < counts["full"]


# Seven weights: one product forward and two backward. The last one's result is not needed again,
# so full checkpointing computes six of them twice.
@pytest.mark.parametrize(("how", "products"), [("selective", [7, 14]), ("full", [7, 20])])
def test_compiled_blocks_compute_no_matrix_product_again(how: str, products: list[int]) -> None:
    """By the compiler's own choice of what to keep: forward and backward pass of a block."""
    counts: list[int] = []

    def count(graph: Any, _inputs: Any) -> Any:
        nodes = graph.graph.nodes
        counts.append(sum(node.target is torch.ops.aten.mm.default for node in nodes))
        return make_boxed_func(graph.forward)

    # More blocks than the compiler compiles one function for: they must share one graph.
    model = model_of("llama", how, num_hidden_layers=9)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    compile_blocks(model, backend=backend)
    plain = model_of("llama", "none", num_hidden_layers=9)
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert counts == products
