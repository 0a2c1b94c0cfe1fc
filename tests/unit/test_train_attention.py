"""Rows packed into one line see nothing of each other, in every architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmx.data import collate
from llmx.data.store.samples import Sample
from llmx.models import attention as module
from llmx.models.attention import AttentionMethod, isolation_mask, methods
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


def logits_alone(model: Any, tokens: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(tokens.astype(np.int64))
    return model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_packed_rows_have_the_logits_they_have_alone(kind: str, attention: str) -> None:
    model = small_model(kind, attention=attention)
    samples = [sample(5, 9, 3, seed=1), sample(13, seed=2)]
    batch, inputs, _ = inputs_of(*samples, method=attention)
    assert inputs["attention_mask"] is not None
    packed = model(**inputs, use_cache=False).logits
    for line, one in enumerate(samples):
        rows = torch.cat([logits_alone(model, tokens) for tokens, _ in one.sequences()])
        torch.testing.assert_close(packed[line, : len(rows)], rows, rtol=1e-4, atol=1e-4)
    # The mask is what does it: with a causal one over the whole line, rows see each other.
    causal = isolation_mask(torch.ones_like(batch["segment_ids"]))
    inputs["attention_mask"] = (
        module.additive(causal, dtype=torch.float32) if attention == "eager" else causal
    )
    leaking = model(**inputs, use_cache=False).logits
    assert (leaking[0, 5:14] - packed[0, 5:14]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_single_rows_need_no_mask_and_padding_at_the_right_does_nothing(kind: str) -> None:
    model, samples = small_model(kind), [sample(5, seed=4), sample(14, seed=5)]
    _, inputs, _ = inputs_of(*samples)
    assert inputs["attention_mask"] is None
    logits = model(**inputs, use_cache=False).logits
    for line, one in enumerate(samples):
        alone = logits_alone(model, one.tokens)
        torch.testing.assert_close(logits[line, : len(alone)], alone, rtol=1e-4, atol=1e-4)


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


def test_lines_that_end_and_begin_with_the_same_number_are_two_segments() -> None:
    assert module.segment_bounds(torch.tensor([[1, 1, 1], [1, 1, 2]])) == (0, 3, 5, 6)
    assert module.segment_bounds(torch.tensor([[0, 0]])) == (0, 2)


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
