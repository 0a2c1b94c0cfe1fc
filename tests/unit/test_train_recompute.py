"""Activation checkpointing changes what is kept, and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from llmx.models.blocks import compile_blocks, recompute
from tests.saved_activations import saved_bytes, small_inputs, small_model

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


@pytest.mark.parametrize("how", ["none", "selective"])
def test_compiled_blocks_compute_the_same(how: str) -> None:
    """By the compiler's graphs, without its code generator."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = gradients(model_of("llama", "none", num_hidden_layers=2))
    model = model_of("llama", how, num_hidden_layers=2)
    torch._dynamo.reset()
    compile_blocks(model, backend=backend)
    for one, other in zip(expected, gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert graphs


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
    gradients(model)
    assert counts == products
