"""Rows packed into one line see nothing of each other, in every architecture."""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from llmx.data import collate
from llmx.data.store.samples import Sample
from llmx.models import attention as module
from llmx.models import varlen
from llmx.models.attention import AttentionMethod, isolation_mask, methods, model_inputs
from llmx.models.blocks import compile_blocks
from llmx.models.isolation import find_methods
from llmx.models.varlen import SEGMENTS, VARLEN, Unsupported
from tests.architectures import full_config, small_config
from tests.small_models import KINDS, small_model

CPU = torch.device("cpu")


def sample(*lengths: int, seed: int = 0) -> Sample:
    draw = np.random.Generator(np.random.Philox(key=seed))
    total = sum(lengths)
    return Sample(
        tokens=draw.integers(3, 90, size=total).astype(np.uint32),
        targets=np.ones(total, dtype=bool),
        sequence_starts=np.cumsum([0, *lengths[:-1]]).astype(np.int64),
    )


def inputs_of(
    *samples: Sample, method: AttentionMethod | str = "sdpa", pad_to: int = 8
) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
    """The batch of these samples, the arguments of a forward and the labels."""
    if isinstance(method, str):
        method = methods(method, "packed")[0]
    batch = collate(samples, seq_len=48, pad_id=0, layout=method.layout, pad_to=pad_to)
    return batch, *module.model_inputs(batch, method=method, dtype=torch.float32, device=CPU)


def test_mask_literally() -> None:
    mask = isolation_mask(torch.tensor([[1, 1, 2, 2, 0]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    added = module.additive(mask, dtype=torch.bfloat16)
    assert added.dtype == torch.bfloat16
    assert added[0].tolist() == [0.0] + [torch.finfo(torch.bfloat16).min] * 4


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", "llmx_varlen"])
def test_kernels_for_rows_of_any_length_get_one_line_and_where_rows_begin(kernel: str) -> None:
    batch, inputs, labels = inputs_of(sample(5, 3), sample(6), sample(2, 4), method=kernel)
    assert inputs["attention_mask"] is None
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == labels.shape == (1, 24)
    assert torch.equal(labels[0], batch["labels"].flatten())
    # The padding of a line is a segment of its own; the next line begins another.
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 8, 14, 16, 18, 22, 24]
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    # A number, not a tensor: a layer that reads it waits for no device.
    assert type(inputs["max_length_q"]) is type(inputs["max_length_k"]) is int
    assert inputs["max_length_q"] == 6
    # Lines that end and begin with the same number are two segments.
    assert module.segment_bounds(torch.tensor([[1, 1, 1], [1, 1, 2]])) == (0, 3, 5, 6)


def test_flex_attention_hides_the_same_as_the_dense_mask() -> None:
    method = AttentionMethod("flex_attention", "mask")
    assert method in methods("flex_attention", "packed")
    batch, inputs, _ = inputs_of(sample(5, 9, 3), method=method)
    places, zero = torch.arange(batch["input_ids"].shape[1]), torch.tensor(0)
    found = inputs["attention_mask"].mask_mod(zero, zero, places[:, None], places[None, :])
    assert torch.equal(found, isolation_mask(batch["segment_ids"])[0, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("isolation", "layout"), [("position_ids", "padded"), ("mask", "packed")])
@torch.no_grad()
def test_on_a_gpu_transformers_makes_no_mask_of_the_padding(
    kind, isolation, layout, monkeypatch
) -> None:
    """It takes positions that restart for packed rows, and so the padding's zeros."""
    model, method, masks = small_model(kind), AttentionMethod("sdpa", isolation, layout), []

    def logits() -> torch.Tensor:
        batch, inputs, _ = inputs_of(sample(13, seed=1), sample(6, seed=2), method=method)
        return model(**inputs, use_cache=False).logits[batch["segment_ids"] > 0]

    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(*values, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*values, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    before = logits()
    masks.clear()
    monkeypatch.setattr("llmx.models.attention._fast_without_mask", lambda device: True)
    torch.testing.assert_close(logits(), before)
    assert masks
    assert all(mask is None for mask in masks)


# --- Row by row, without a mask anywhere ----------------------------------------------------------

BOUNDS = (0, 5, 14, 17, 24)


def reference_kernel(query, key, value, *, cu_seq_lens, max_length, scale, window):
    """What PyTorch's kernel computes, in plain operations; and what it asks of its arguments."""
    assert query.dim() == key.dim() == value.dim() == 3
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    assert query.shape[2] == key.shape[2]
    assert cu_seq_lens.dtype == torch.int32
    assert cu_seq_lens[0] == 0
    assert cu_seq_lens[-1] == query.shape[0]
    assert type(max_length) is int
    assert max_length == int(cu_seq_lens.diff().max())
    assert window is None or type(window) is int
    parts = []
    for start, stop in pairwise(cu_seq_lens.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)[None, :]
        seen = (back >= 0) & (back < (window or len(back)))
        scores = (q @ k.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        parts.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_kernel", reference_kernel)


@pytest.mark.parametrize(
    ("window", "key_heads", "value_width"),
    [(None, 4, 16), (4, 2, 8)],
)
def test_both_functions_are_attention_of_each_row(kernel, window, key_heads, value_width) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 4, 24, 16, requires_grad=True)
    key = torch.randn(1, key_heads, 24, 16, requires_grad=True)
    value = torch.randn(1, key_heads, 24, value_width, requires_grad=True)
    places = torch.arange(24)
    row = torch.repeat_interleave(torch.arange(4), torch.tensor(BOUNDS).diff())
    back = places[:, None] - places[None, :]
    mask = (row[:, None] == row[None, :]) & (back >= 0) & (back < (window or 24))
    all_heads = (x.repeat_interleave(4 // key_heads, 1) for x in (key, value))
    expected = functional.scaled_dot_product_attention(
        query, *all_heads, attn_mask=mask, scale=0.3
    ).transpose(1, 2)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    told = {"cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32), "max_length_q": 9}
    for function, rows in (
        (varlen.varlen_forward, told),
        (varlen.segments_forward, {"segment_bounds": torch.tensor(BOUNDS)}),
    ):
        found, _ = function(
            torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, **rows
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        own = torch.autograd.grad((found * weight).sum(), (query, key, value))
        for one, other in zip(own, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [VARLEN, SEGMENTS])
@pytest.mark.parametrize("model", ["mistral", "deepseek_v3", "gemma3_text", "gpt2"])
def test_models_are_isolated_by_both(kernel: None, name: str, model: str) -> None:
    config = full_config(model)
    config.attn_pdrop = 0.0  # of GPT-2
    found = find_methods(config, implementations=[name], layouts=["packed"])
    assert found.packed is not None, found.why_not_packed
    assert found.packed.implementation == name


@pytest.mark.parametrize(
    ("model", "why"),
    [("gpt2", "dropout"), ("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("llama4_text", "row")],
)
def test_what_the_kernels_do_not_compute_is_not_trained_with_them(kernel, model, why) -> None:
    found = find_methods(full_config(model), implementations=[VARLEN], layouts=["packed"])
    assert found.packed is None
    assert why in found.why_not_packed


@pytest.mark.parametrize("function", [varlen.varlen_forward, varlen.segments_forward])
def test_without_the_rows_it_refuses_instead_of_mixing_them(function: Any) -> None:
    q, mask, rows = torch.randn(1, 4, 8, 16), torch.ones(1, 1, 8, 8), torch.tensor([0, 8])
    with pytest.raises(Unsupported, match="does not hand"):
        function(torch.nn.Module(), q, q, q, None)
    with pytest.raises(Unsupported, match="mask of its own"):
        function(torch.nn.Module(), q, q, q, mask, segment_bounds=rows)


def test_no_layer_looks_at_a_tensor_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward in ``llmx_varlen``, nothing reads a value back: no wait for a GPU."""
    varlen.register()
    # The real kernel reads cu_seq_lens on the device; the reference would read it here.
    monkeypatch.setattr(varlen, "varlen_kernel", lambda query, key, value, **_: query * 1.0)
    called: set[Any] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.add(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    model = AutoModelForCausalLM.from_config(small_config("llama"), attn_implementation=VARLEN)
    _, inputs, _ = inputs_of(sample(5, 9), sample(7), method=VARLEN)
    with Watch():
        model(**inputs, use_cache=False)
    aten = torch.ops.aten
    assert aten.mm in called
    assert not called & {aten._local_scalar_dense, aten.nonzero, aten.equal}


def test_a_torch_whose_kernel_has_no_window_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.10 has it: there, but a call of ours would be a TypeError."""
    older = ModuleType("torch.nn.attention.varlen")
    older.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, older.__name__, older)
    assert not varlen.has_kernel()


def test_the_call_of_pytorchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CUDA kernel gets: PyTorch's own function, by its own signature."""
    if not varlen.has_kernel():
        pytest.skip(f"torch {torch.__version__} has not this kernel, which came with 2.12")
    import torch.nn.attention.varlen as module

    calls: list[dict[str, Any]] = []
    signature = inspect.signature(module.varlen_attn)

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))
        return args[0]

    monkeypatch.setattr(module, "varlen_attn", record)
    query, key = torch.randn(24, 4, 16), torch.randn(24, 2, 16)
    offsets = torch.tensor(BOUNDS, dtype=torch.int32)
    for window in (None, 4):
        varlen.varlen_kernel(
            query, key, key, cu_seq_lens=offsets, max_length=9, scale=0.5, window=window
        )
    plain, sliding = calls
    assert plain["cu_seq_q"] is plain["cu_seq_k"] is offsets
    assert plain["max_q"] == plain["max_k"] == 9
    assert plain["enable_gqa"] is True
    # (-1, 0) is causal; (3, 0) sees itself and three before: a window of 4.
    assert (plain["window_size"], sliding["window_size"]) == ((-1, 0), (3, 0))


@pytest.mark.parametrize("name", [VARLEN, SEGMENTS])
def test_compiled_blocks_take_rows_of_any_length_and_number(name, monkeypatch) -> None:
    """Compiled a few times at the start and then never again, and never given up."""

    def kernel(query, key, value, *, cu_seq_lens, max_length, scale, window):
        return query + cu_seq_lens.sum() * max_length  # without a loop, as the real one

    monkeypatch.setattr(varlen, "varlen_kernel", kernel)
    varlen.register()
    config = small_config("llama")
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_blocks(model, backend=backend)
    (method,) = methods(name, "packed")
    counts = []
    for lengths in ((7, 9), (8, 4, 12), (16,), (1, 2, 3, 2), (24,), (5, 5, 5, 5, 12), (3,) * 10):
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        batch = {"input_ids": places, "position_ids": places, "labels": places}
        batch["segment_ids"] = (rows + 1).int()[None]
        inputs, _ = model_inputs(batch, method=method, dtype=torch.float32, device=CPU)
        model(**inputs, use_cache=False).logits.sum().backward()
        counts.append(len(graphs))
    torch._dynamo.reset()
    assert counts[3] == counts[-1], counts
