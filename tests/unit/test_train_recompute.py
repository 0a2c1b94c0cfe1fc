"""Activation checkpointing changes what is kept, and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmx.models.blocks import compile_blocks, recompute
from tests.saved_activations import saved_bytes, small_inputs, small_model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_gradients_are_the_same_and_less_is_kept(kind: str, how: str) -> None:
    model = small_model(kind, dtype=torch.float32)
    before, expected = gradients(model)
    recompute(model, how)
    after, found = gradients(model)
    assert after < 0.75 * before
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_selective_computes_no_matrix_product_again() -> None:
    counts = {}
    for how in ("none", "selective", "full"):
        model = small_model("llama", dtype=torch.float32)
        if how != "none":
            recompute(model, how)
        with Count(torch.ops.aten.mm.default) as products:
            gradients(model)
        counts[how] = products.number
    assert counts["none"] == counts["selective"] < counts["full"]


@pytest.mark.parametrize("how", ["none", "selective"])
def test_compiled_blocks_compute_the_same(how: str) -> None:
    """By the compiler's graphs, without its code generator."""
    model = small_model("llama", dtype=torch.float32, num_hidden_layers=2)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        output = model.base_model(**small_inputs(batch=2, length=64), use_cache=False)[0]
        output.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    if how != "none":
        recompute(model, how)
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_blocks(model, backend=backend)
    found = gradients()
    assert graphs
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_compiled_blocks_compute_no_matrix_product_again() -> None:
    """By the compiler's own choice of what to keep: forward and backward pass of a block."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    products: dict[str, list[int]] = {}
    for how in ("selective", "full"):
        counts: list[int] = []

        def count(graph: Any, _inputs: Any, counts: list[int] = counts) -> Any:
            nodes = graph.graph.nodes
            counts.append(sum(node.target is torch.ops.aten.mm.default for node in nodes))
            return make_boxed_func(graph.forward)

        # More blocks than the compiler compiles one function for: they must share one graph.
        model = small_model("llama", dtype=torch.float32, num_hidden_layers=9)
        recompute(model, how)
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
        compile_blocks(model, backend=backend)
        model.base_model(**small_inputs(batch=2, length=64), use_cache=False)[0].sum().backward()
        products[how] = counts
    # Seven weights: one product forward and two backward. The last one's result is not needed
    # again, so full checkpointing computes six of them twice.
    assert products == {"selective": [7, 14], "full": [7, 20]}


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator, self.number = operator, 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None):
        self.number += function is self.operator
        return function(*args, **(kwargs or {}))


def gradients(model: Any) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept by the forward pass, and all gradients."""
    model.zero_grad(set_to_none=True)
    kept, output = saved_bytes(model, small_inputs(batch=2, length=64))
    output.float().square().mean().backward()
    return kept, [p.grad.clone() for p in model.parameters() if p.grad is not None]
